"""The command line's own promises: quick help, one message for an error, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from notebook_factory import write_notebook
from typer.testing import CliRunner

from labkit import __version__, bundled
from labkit.cli import COMMANDS, app, options
from labkit.cli.run import joined_pairs
from labkit.policy import ONLINE

MAIN = "import sys; sys.argv[0] = 'labkit'; from labkit.cli import main; main()"


def labkit(*args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_help_names_every_command():
    shown = labkit("--help")
    assert shown.returncode == 0
    for name in COMMANDS:
        assert f" {name} " in shown.stdout
        described = labkit(name, "--help")
        assert described.returncode == 0
        assert "…" not in described.stdout  # a word too long for its column is cut


def test_help_loads_nothing_heavy():
    code = (
        "import sys\ntry:\n    from labkit.cli import app; app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'llama_cpp', 'numpy', 'pandas', 'altair', 'papermill', 'nbformat', 'gguf'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version():
    assert labkit("--version").stdout == f"labkit {__version__}\n"


def test_labkit_error_is_one_message_and_exit_code_1(tmp_path):
    done = labkit("run", tmp_path / "absent.ipynb")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: there is no notebook at")
    assert "Traceback" not in done.stderr


def test_wrong_use_is_exit_code_2(tmp_path):
    notebook = write_notebook(tmp_path / "a.ipynb", "1", parameters="seed = 1")
    for args in (["nonsense"], ["run"], ["run", notebook, "-p", "seed"], ["tour", "-m", "absent"]):
        assert labkit(*args).returncode == 2


@pytest.mark.parametrize(
    ("given", "joined"),
    [
        (["a", "-p", "seed", "-1"], ["a", "-p", "seed=-1"]),
        (["-p", "a=1", "-p", "text", "x=y z"], ["-p", "a=1", "-p", "text=x=y z"]),
        (["--parameter", "a", "1", "-o", "out"], ["--parameter", "a=1", "-o", "out"]),
        (["-p"], ["-p"]),
        (["-p", "a"], ["-p", "a"]),
    ],
)
def test_pairs_of_papermill_are_joined(given, joined):
    assert joined_pairs(given) == joined


def test_run_refuses_an_unknown_parameter(tmp_path):
    notebook = write_notebook(tmp_path / "a.ipynb", "1", parameters="cache_mib = 64")
    done = labkit("run", notebook, "-p", "cache_mbb", "64", cwd=tmp_path)
    assert done.returncode == 1
    assert "nearest is `cache_mib`" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_run_writes_results_and_reads_paths_from_where_it_is_called(tmp_path):
    (tmp_path / "notebooks").mkdir()
    cell = "from labkit.experiment import write_finding\nwrite_finding(out_dir, 'T', model + text)"
    notebook = write_notebook(
        tmp_path / "notebooks" / "a.ipynb",
        cell,
        parameters="model = text = ''\nout_dir = '../runs/a'",
    )
    (tmp_path / "my.gguf").touch()
    text = "my.gguf " * 99  # no path, although it could be taken for one
    given = ("-p", "model", "my.gguf", "-p", "text", text)
    done = labkit("run", notebook, *given, "-o", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["finding"] == str(tmp_path / "my.gguf") + text
    assert result["parameters"]["out_dir"] == str(tmp_path / "out")
    for name in ("a.ipynb", "a.html", "finding.json"):
        assert (tmp_path / "out" / name).is_file()


def test_run_reports_a_dead_kernel(tmp_path):
    notebook = write_notebook(tmp_path / "a.ipynb", "import os; os.kill(os.getpid(), 9)")
    done = labkit("run", notebook, "-o", tmp_path / "out")
    assert done.returncode == 1
    assert "the kernel died in cell [1]" in done.stderr
    assert (tmp_path / "out" / "a.html").is_file()


def test_list_shows_parameters_and_runs_nothing(tmp_path):
    notebook = write_notebook(tmp_path / "a.ipynb", "1 / 0", parameters="seed = 1\nmodel = ''")
    assert "seed = 1  (int)" in labkit("run", notebook, "--list").stdout
    listed = json.loads(labkit("run", notebook, "--list", "--json").stdout)
    assert listed == {"seed": {"default": 1}, "model": {"default": ""}}


def test_replay_shows_writes_and_refuses(tmp_path):
    rows = [f"0,1,{step},{layer},0,{step % 2},1,0,1048576" for step in range(4) for layer in (0, 1)]
    trace = tmp_path / "t.csv"
    head = "# layer=0 expert_bytes=1048576\n# layer=1 expert_bytes=1048576\n"
    names = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
    trace.write_text(head + names + "\n".join(rows) + "\n")
    assert "Token cycle 2.0 MiB" in labkit("replay", trace).stdout
    out = tmp_path / "curve.csv"
    done = labkit(
        "replay", trace, "--budgets", "3,4", "--policies", "lru,belady", "--csv", out, "--json"
    )
    table = json.loads(done.stdout)
    assert [(row["budget_mib"], row["policy"], row["hit_pct"]) for row in table] == [
        (3, "lru", 0), (3, "belady", 37.5), (4, "lru", 50), (4, "belady", 50),
    ]  # fmt: skip
    assert out.read_text().splitlines()[1] == "3.000,lru,0.000,0.000,8.000,3.000"
    for args in (["--budgets", "x"], ["--policies", "mru"]):
        assert labkit("replay", trace, *args).returncode == 2
    assert "makes no sense" in labkit("replay", trace, "--budgets=-1").stderr
    trace.write_text(names + "\n".join(rows) + "\n")
    assert labkit("replay", trace).returncode == 1
    assert labkit("replay", trace, "--entry-bytes", "4096").returncode == 0


def test_generate_takes_a_policy():
    wanted = ("generate", bundled.model_path(), "-p", "In the", "-n", "2", "--policy")
    assert labkit(*wanted, "echo").returncode == 0


def test_generate_shows_the_text_as_it_comes_and_all_of_it():
    wanted = ("generate", bundled.model_path(), "-p", "In the beginning", "-n", "8")
    shown = labkit(*wanted).stdout
    assert shown == json.loads(labkit(*wanted, "--json").stdout)["text"] + "\n"


def refusal(*args: str | Path) -> str:
    """What a command says that was used in a wrong way, on one line without a frame."""
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exit_code == 2, done.output
    return " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--prefetch", "router, previous"),
        ("--overlap", "auto, serial, pipeline, userfaultfd"),
        ("--prefill", "auto, experts, layers"),
        ("--policy", ", ".join(ONLINE)),
    ],
)
def test_a_choice_that_is_none_is_refused_in_words_of_the_command_line(option: str, words: str):
    said = refusal("generate", bundled.model_path(), "-p", "a", option, "foo")
    assert f"Invalid value for '{option}': 'foo' is none of {words}" in said
    assert "None" not in said


def test_options_list_the_policies_that_there_are():
    assert tuple(options.POLICIES) == ONLINE


@pytest.mark.parametrize("command", [["generate"], ["trace", "-o", "t.csv"]])
def test_resident_and_a_budget_together_are_refused(command: list[str]):
    name, *rest = command
    model = bundled.model_path()
    said = refusal(name, model, "-p", "a", *rest, "--resident", "--cache-mib", "1")
    assert "--cache-mib would change nothing" in said


@pytest.mark.parametrize(
    "command",
    [
        ["replay", "absent.csv", "--csv", "{no_folder}/t.csv"],
        ["replay", "absent.csv", "--csv", "{folder}"],
        ["trace", "absent.gguf", "-p", "a", "-o", "{no_folder}/t.csv"],
        ["generate", "absent.gguf", "-p", "a", "--metrics", "{folder}"],
        ["bench", "absent.gguf", "--out", "{file}"],
        ["bench", "absent.gguf", "--out", "{file}/deep/er"],
        ["prefill", "absent.gguf", "--out", "{file}"],
        ["device", "--measure", "-o", "{folder}"],
        ["run", "1", "-o", "{file}"],
        ["tour", "-o", "{file}"],
    ],
    ids=lambda command: " ".join(command[:1] + command[-1:]),
)
def test_where_a_result_cannot_be_written_nothing_is_computed(command: list[str], tmp_path: Path):
    """The other arguments are wrong as well, and nobody has looked at them yet."""
    (tmp_path / "file").write_text("")
    places = {"folder": tmp_path, "no_folder": tmp_path / "no", "file": tmp_path / "file"}
    said = refusal(*(part.format(**places) for part in command))
    assert "Invalid value for" in said
    assert "folder" in said


def test_generate_says_what_the_hot_list_did(tmp_path: Path):
    ask = ["generate", bundled.model_path(), "-p", "a", "-n", "4", "--hot-list", tmp_path / "hot"]
    first, second = labkit(*ask), labkit(*ask, "--json")
    assert "hot list: nothing was known of earlier runs" in " ".join(first.stderr.split())
    listed = json.loads(second.stdout)["hot_list"]
    assert listed["experts_of_earlier_runs"] > 0
    assert Path(listed["file"]).is_file()
