"""The command line's own promises: quick help, one message for an error, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from notebook_factory import write_notebook

from labkit import __version__, bundled
from labkit.cli import COMMANDS
from labkit.cli.run import joined_pairs

MAIN = "import sys; sys.argv[0] = 'labkit'; from labkit.cli import main; main()"


def labkit(*args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_help_names_every_command():
    shown = labkit("--help")
    assert shown.returncode == 0
    for name in COMMANDS:
        assert f" {name} " in shown.stdout
        assert labkit(name, "--help").returncode == 0


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


def test_generate_takes_a_policy_and_refuses_one_that_it_does_not_know():
    wanted = ("generate", bundled.model_path(), "-p", "In the", "-n", "2", "--policy")
    assert labkit(*wanted, "echo").returncode == 0
    done = labkit(*wanted, "mru")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: there is no cache policy 'mru'; there are lru")
    assert "Traceback" not in done.stderr


def test_generate_shows_the_text_as_it_comes_and_all_of_it():
    wanted = ("generate", bundled.model_path(), "-p", "In the beginning", "-n", "8")
    shown = labkit(*wanted).stdout
    assert shown == json.loads(labkit(*wanted, "--json").stdout)["text"] + "\n"
