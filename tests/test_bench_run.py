"""Whole benchmarks on a small model: real processes, real limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labkit.bench import cgroup
from labkit.bench.cases import parse_cases
from labkit.bench.report import bits_in_words
from labkit.bench.result import BenchResult
from labkit.bench.run import Event, Plan, _run_case, _State, run_bench
from labkit.bench.summary import identity
from labkit.bundled import model_path
from labkit.errors import BenchError, LabkitError, OptionError
from labkit.gguf_map import open_gguf

MAIN = "import sys; sys.argv[0] = 'labkit'; from labkit.cli import main; main()"

limits = pytest.mark.skipif(
    sys.platform != "linux" or cgroup.why_not() is not None,
    reason="this user cannot make a memory cgroup",
)


def plan(cases: str, **more) -> Plan:
    settings = {"rounds": 1, "n": 4, "warmup": 2, "threads": 1, **more}
    return Plan(model_path("main-q4_0"), tuple(parse_cases(cases.split(","), [1.0])), **settings)


@pytest.fixture(scope="module")
def result() -> BenchResult:
    seen: list[Event] = []
    kept: list[BenchResult] = []
    found = run_bench(
        plan("mmap,repack,resident,stream-serial,traced", rounds=2), seen.append, kept.append
    )
    assert len(seen) == 10
    assert [len(one.runs) for one in kept] == [5, 10]
    return found


def test_every_case_ran_in_every_round(result: BenchResult) -> None:
    assert result.runs["status"].tolist() == ["ok"] * 10, result.runs["reason"].tolist()
    assert result.runs.groupby("case").size().tolist() == [2] * 5
    assert len(result.tokens) == 10 * 6
    assert len(result.measured()) == 10 * 4


def test_all_cases_ran_the_same_tokens_and_gave_the_same_bits(result: BenchResult) -> None:
    tokens = result.tokens.groupby(["case", "round"])["token"].apply(tuple)
    assert tokens.nunique() == 1
    table = identity(result).set_index("case")
    assert table.loc["stream-serial", "same_bits"] is True
    assert table.loc["resident", "same_bits"] is True
    assert table["compared"].tolist() == [7] * 5  # the prompt's logits and six tokens'
    assert "4 cases gave the same logits" in bits_in_words(result)


def test_figures_are_there_and_what_is_not_measured_is_not_zero(result: BenchResult) -> None:
    runs = result.runs
    for name in ("open_s", "prefill_s", "first_token_s", "decode_tok_s"):
        assert (runs[name] > 0).all()
    assert (runs["first_token_s"] >= runs["open_s"]).all()
    assert runs["others_pct"].between(0, 100).all()
    assert runs.loc[runs["case"] == "mmap", "cache_mib"].isna().all()
    assert (runs.loc[runs["case"] == "stream-serial", "cache_mib"] == 1).all()
    tokens = result.measured()
    assert (tokens["cpu_ms"] > 0).all()
    mapped = tokens[tokens["case"] == "mmap"]
    assert mapped[["wait_ms", "hits", "read_mib"]].isna().to_numpy().all()
    streamed = tokens[tokens["case"] == "stream-serial"]
    assert (streamed["misses"] > 0).any()
    assert (streamed["wait_ms"] > 0).any()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts them")
def test_a_cold_start_reads_the_file_and_a_stream_not_all_of_it(result: BenchResult) -> None:
    if result.runs["cached_pct"].max() > 1:
        pytest.skip("the page cache of this file system cannot be dropped")
    read = result.runs.groupby("case")["load_read_mib"].median()
    assert read["resident"] == pytest.approx(result.facts["model_mib"], rel=0.15)
    assert read["stream-serial"] > 0


def test_more_rounds_go_on_where_the_first_ended(result: BenchResult, tmp_path: Path) -> None:
    result.save(tmp_path)
    cases = "mmap,repack,resident,stream-serial,traced"
    more = run_bench(plan(cases), earlier=BenchResult.load(tmp_path))
    assert sorted(more.runs["round"].unique()) == [1, 2, 3]
    assert more.tokens.groupby(["case", "round"])["token"].apply(tuple).nunique() == 1
    assert "4 cases gave the same logits" in bits_in_words(more)
    with pytest.raises(BenchError, match="its n is 4, now it is 5"):
        run_bench(plan(cases, n=5), earlier=result)


def test_a_session_follows_the_tokens_that_a_stock_run_chose() -> None:
    # As when the session that was to choose them had failed.
    settings = plan("mmap,stream-serial", n=8)
    gguf, state = open_gguf(settings.model), _State([5, 90, 300], 256)
    runs = [_run_case(settings, case, gguf, state) for case in settings.cases]
    tokens = [[row["token"] for row in rows] for _, rows in runs]
    assert tokens[0] == tokens[1]
    assert runs[0][0]["digests"] == runs[1][0]["digests"]


def test_time_that_is_up_ends_a_run_but_not_before_one_measured_token() -> None:
    found = run_bench(plan("stream-serial", n=1000, seconds=1e-3))
    assert found.runs["n_tokens"].tolist() == [1]


@limits
def test_a_limit_that_is_too_small_is_said_and_the_rest_goes_on() -> None:
    before = _groups()
    found = run_bench(plan("resident,stream-serial", memory_limit_mib=24))
    runs = found.runs.set_index("case")
    assert runs.loc["stream-serial", "status"] == "out of memory"
    assert "24 MiB" in str(runs.loc["stream-serial", "reason"])
    assert runs.loc["resident", "status"] == "ok"  # it holds the model whole: not under the limit
    assert found.tokens["case"].unique().tolist() == ["resident"]
    assert _groups() == before


@limits
def test_under_a_limit_that_is_large_enough_the_peak_is_told() -> None:
    found = run_bench(plan("stream-serial", memory_limit_mib=400))
    (peak,) = found.runs["cgroup_peak_mib"].tolist()
    assert 10 < peak <= 400
    assert found.runs["limit_mib"].tolist() == [400]


def test_a_model_without_a_tokenizer_gets_a_prompt_of_ids(synth_model) -> None:
    cases = tuple(parse_cases(["mmap", "stream-serial"], [None]))
    found = run_bench(Plan(synth_model("qwen3moe"), cases, rounds=1, n=3, warmup=1, threads=1))
    assert len(found.facts["prompt_tokens"]) == 24
    assert found.runs["status"].tolist() == ["ok", "ok"]
    assert identity(found)["same_bits"].tolist() == [True, True]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rounds": 0}, "rounds"),
        ({"n": 0}, "n is 0"),
        ({"warmup": -1}, "warmup"),
        ({"seconds": 0}, "seconds"),
        ({"baseline": "resident"}, "none of mmap"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(more: dict, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        plan("mmap", **more)


def test_no_model_no_benchmark(tmp_path: Path) -> None:
    with pytest.raises(LabkitError):
        run_bench(Plan(tmp_path / "none.gguf", tuple(parse_cases(["mmap"], [None]))))


# the command


def labkit(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAIN, "bench", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
    )


def test_the_command_shows_tables_a_verdict_and_what_comes_next(tmp_path: Path) -> None:
    words = [model_path("main-q4_0"), "--cases", "mmap,stream-serial", "--rounds", 1, "-n", 3,
             "--warmup", 1, "--threads", 1, "--out", tmp_path / "b"]  # fmt: skip
    done = labkit(*words)
    assert done.returncode == 0, done.stderr
    for part in ("tok/s", "treaming", "Bit identity", "Not controlled", "labkit run 4 -p"):
        assert part in done.stdout
    assert "round 1/1  mmap" in done.stderr
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        "bench.json", "tokens.csv", "runs.csv", "summary.csv", "report.txt"
    }  # fmt: skip
    again = labkit(*words, "--append", "--json")
    assert again.returncode == 0, again.stderr
    plain = json.loads(again.stdout)
    assert [row["rounds"] for row in plain["summary"]] == [2, 2]
    assert len({row["sha256"] for row in plain["logits_sha256"]}) == 1
    assert plain["not_controlled"]


def test_a_benchmark_of_which_nothing_ran_has_failed(tmp_path: Path) -> None:
    words = ["--cases", "traced", "--rounds", 1, "-n", 1, "--tokens", 10**6, "--out", tmp_path]
    done = labkit(model_path("main-q4_0"), *words)
    assert done.returncode == 1
    assert "Token id 1000000 does not exist" in " ".join(done.stdout.split())
    assert labkit(model_path("main-q4_0"), *words, "--json").returncode == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--cases", "mmapp"], 1, "no case 'mmapp'"),
        (["--cache-mib", "much"], 1, "no budget"),
        (["--append"], 2, "--out"),
        (["--memory-limit-mib", 5, "--memory-limit-pct", 5], 2, "one of the two"),
        (["--tokens", "1,x"], 2, "token ids"),
        (["--out", "/nowhere", "--append"], 1, "cannot be read"),
        (["--cases", "stream:policy=mru"], 1, "no policy 'mru'"),
    ],
)
def test_wrong_use_is_said_in_one_message(words: list, code: int, message: str) -> None:
    done = labkit(model_path("main-q4_0"), *words)
    assert done.returncode == code, done.stderr
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


@limits
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stopped_benchmark_leaves_neither_process_nor_cgroup(
    tmp_path: Path, number: signal.Signals
) -> None:
    before = _groups()
    words = ["--cases", "stream-serial", "--rounds", 50, "-n", 4, "--memory-limit-mib", 400,
             "--out", tmp_path / "b"]  # fmt: skip
    bench = subprocess.Popen(
        [sys.executable, "-c", MAIN, "bench", model_path("main-q4_0"), *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert bench.stderr is not None
    for line in bench.stderr:
        if line.startswith("round 2/50"):  # so the first is saved
            break
    bench.send_signal(number)
    bench.communicate()
    assert bench.returncode in (128 + signal.SIGTERM, 130, -signal.SIGKILL)
    if number == signal.SIGKILL:  # nothing can be tidied then: the process inside goes by itself,
        until = time.monotonic() + 60
        while _groups() != before and time.monotonic() < until:  # and the next bench tidies up
            cgroup.remove_stale()
            time.sleep(0.1)
    assert _groups() == before
    assert len(BenchResult.load(tmp_path / "b").runs) >= 1  # finished rounds are kept


def _groups() -> set[Path]:
    return {path for path in Path("/sys/fs/cgroup").rglob("labkit-bench-*") if path.is_dir()}
