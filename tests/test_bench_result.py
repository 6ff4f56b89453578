"""A benchmark's tables: saved and read again, summed up, and put into words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit.bench.report import bits_in_words, remarks, verdict
from labkit.bench.result import BENCH_FILE, TOKENS_FILE, BenchResult
from labkit.bench.summary import first_token_ratio, identity, speed_ratio, summary
from labkit.bench.tables import all_tables
from labkit.errors import BenchError

KINDS = {"mmap": "mmap", "mmap-random": "mmap-random", "resident": "resident",
         "repack": "repack", "stream-serial": "stream-serial",
         "stream-userfaultfd": "stream-userfaultfd"}  # fmt: skip


def made(
    wall_ms: dict[str, float],
    *,
    limit_mib: float | None = 400.0,
    digests: dict[str, list[str]] | None = None,
    failed: tuple[str, ...] = (),
    rounds: int = 3,
    seed: int = 0,
) -> BenchResult:
    """A result with these mean token times, as a benchmark of 1,000 MiB would give it."""
    random = np.random.default_rng(seed)
    runs: list[dict[str, Any]] = []
    tokens: list[dict[str, Any]] = []
    for number in range(1, rounds + 1):
        for place, (case, mean) in enumerate(wall_ms.items()):
            run = {"round": number, "place": place, "case": case, "kind": KINDS[case],
                   "limit_mib": None if case in ("resident", "repack") else limit_mib,
                   "status": "ok", "reason": None, "digests": []}  # fmt: skip
            runs.append(run)
            if case in failed:
                run |= {"status": "out of memory", "reason": "the limit is too small for it"}
                continue
            times = random.normal(mean, mean / 20, size=24)
            run |= {"first_token_s": mean / 100, "open_s": mean / 150, "prefill_s": mean / 300,
                    "n_tokens": 20, "decode_tok_s": 1e3 / times[4:].mean(), "peak_rss_mib": 500.0,
                    "cache_mib": 100.0 if case == "stream-serial" else None,
                    "digests": (digests or {}).get(case, ["a", "b", "c"])}  # fmt: skip
            for index, wall in enumerate(times):
                row = {"round": number, "case": case, "index": index, "warmup": index < 4,
                       "token": index, "wall_ms": wall, "cpu_ms": wall}  # fmt: skip
                if case == "stream-serial":
                    row |= {"compute_ms": 0.5 * wall, "wait_ms": 0.4 * wall,
                            "manage_ms": 0.1 * wall, "hits": 6, "misses": 2}  # fmt: skip
                tokens.append(row)
    facts = {
        "model": "m.gguf", "model_mib": 1000.0, "expert_mib": 900.0, "memory_limit_mib": limit_mib,
        "cases": [{"name": name, "kind": KINDS[name]} for name in wall_ms],
        "baseline": next(iter(wall_ms)), "n": 20, "notes": ["the disk was busy"],
        "prompt_tokens": [1, 2], "turns": [[3, 4]],
    }  # fmt: skip
    return BenchResult.of(facts, runs, tokens)


def by_case(result: BenchResult) -> dict[str, dict[str, Any]]:
    """Rows of the summary."""
    return {
        row["case"]: {str(k): v for k, v in row.items()}
        for row in summary(result).to_dict("records")
    }


def test_the_summary_says_what_went_in() -> None:
    rows = by_case(made({"mmap": 500.0, "stream-serial": 100.0}))
    mapped, streamed = rows["mmap"], rows["stream-serial"]
    assert streamed["speed_ratio"] == pytest.approx(5, rel=0.05)
    assert streamed["speed_ratio_low"] <= streamed["speed_ratio"] <= streamed["speed_ratio_high"]
    assert mapped["speed_ratio"] == 1
    assert streamed["wait_ms"] == pytest.approx(40, rel=0.05)
    assert streamed["hit_pct"] == 75
    assert streamed["first_token_ratio"] == pytest.approx(5)
    assert streamed["n_tokens"] == 60  # warm-up tokens are not measured
    assert np.isnan(mapped["wait_ms"])
    assert np.isnan(mapped["hit_pct"])
    parts = sum(streamed[name] for name in ("compute_ms", "wait_ms", "manage_ms"))
    assert parts == pytest.approx(streamed["wall_ms"])


def test_ratios_are_taken_over_the_rounds_and_tokens_that_both_had() -> None:
    result = made({"mmap": 500.0, "stream-serial": 100.0})
    late = (result.tokens["case"] == "mmap") & (result.tokens["round"] == 2)
    slow = (result.tokens["case"] == "stream-serial") & (result.tokens["round"] == 2)
    result.tokens.loc[slow, "wall_ms"] *= 1000
    cut = BenchResult(result.facts, result.runs, result.tokens[~late], result.digests)
    found = speed_ratio(cut, "mmap", "stream-serial")
    assert found is not None
    assert found.value == pytest.approx(5, rel=0.05)
    assert found.low > 4


def test_a_case_that_failed_is_said_and_takes_no_part() -> None:
    result = made({"mmap": 500.0, "stream-serial": 100.0}, failed=("mmap",))
    rows = by_case(result)
    assert rows["mmap"]["status"] == "out of memory"
    assert np.isnan(rows["mmap"]["decode_tok_s"])
    assert np.isnan(rows["stream-serial"]["speed_ratio"])
    assert np.isnan(first_token_ratio(result, "mmap", "stream-serial"))
    assert "No stock case" in verdict(result)
    assert any("limit is too small" in remark for remark in remarks(result))
    assert shown(result).count("out of memory") == 1


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"mmap": 500.0, "mmap-random": 300.0, "stream-serial": 100.0}, "is worth it here, with"),
        ({"mmap": 100.0, "stream-serial": 300.0}, "For speed streaming is not worth it"),
        ({"mmap": 100.0, "stream-serial": 100.0}, "no clear difference"),
        ({"stream-serial": 100.0}, "No stock case"),
        ({"mmap": 100.0}, "No streamed case"),
    ],
)
def test_the_verdict_is_plain(times: dict[str, float], words: str) -> None:
    assert words in verdict(made(times))


def test_the_verdict_holds_streaming_against_the_better_stock_way() -> None:
    text = verdict(made({"mmap": 900.0, "mmap-random": 300.0, "resident": 50.0,
                         "stream-serial": 100.0}))  # fmt: skip
    assert "400 MiB of memory for a model of 1,000 MiB" in text
    assert "mmap-random, the better stock way" in text
    assert "3.0" in text
    assert re.search(r"reaches about (49|50|51) % of that", text)
    assert "without a memory limit" in verdict(
        made({"mmap": 900.0, "stream-serial": 1.0}, limit_mib=None)
    )


def test_speeds_that_do_not_agree_with_their_ratio_are_called_doubtful() -> None:
    result = made({"mmap": 100.0, "stream-serial": 100.0})
    assert "before you believe it" not in verdict(result)
    # A busy machine: streaming is half as fast in two rounds, but not in the one of its own median.
    for case, factors in (("mmap", (1, 100, 10)), ("stream-serial", (2, 200, 1))):
        for number, factor in enumerate(factors, 1):
            for table, column, by in (
                (result.tokens, "wall_ms", factor),
                (result.runs, "decode_tok_s", 1 / factor),
            ):
                at = (table["case"] == case) & (table["round"] == number)
                table.loc[at, column] *= by
    text = verdict(result)
    assert "Repeat it with more rounds before you believe it." in text
    assert "rounds differ by up to" in text


def test_the_speed_with_the_whole_model_in_memory_is_an_estimate_with_its_spread() -> None:
    result = made({"mmap": 200.0, "stream-serial": 100.0, "resident": 7.0})
    assert re.search(
        r"With the whole model in memory it was about 1\d\d tokens a second \(its rounds differ by "
        r"\d+ %\); streaming reaches about 7 % of that",
        verdict(result),
    )
    assert not re.search(r"\d{3,}\.\d", verdict(result))  # no digits beyond what was measured


def test_equal_logits_are_said_to_be_equal_and_repack_is_explained() -> None:
    result = made({"mmap": 2.0, "stream-serial": 1.0, "repack": 1.0},
                  digests={"repack": ["x", "y", "z"]})  # fmt: skip
    text = bits_in_words(result)
    assert "2 cases gave the same logits, all 3 rows" in text
    assert "repack has other logits" in text
    assert "other kernels" in text
    assert "DIFFER" not in text


def test_other_logits_are_called_a_fault_and_the_token_is_named() -> None:
    result = made({"mmap": 2.0, "stream-serial": 1.0}, digests={"stream-serial": ["a", "b", "!"]})
    table = identity(result).set_index("case")
    assert table.loc["mmap", "same_bits"] is True
    assert table.loc["stream-serial", "same_bits"] is False
    assert table.loc["stream-serial", "differs_at"] == 2
    assert "DIFFER where they must not: stream-serial (from token 2 on)" in bits_in_words(result)
    assert any("DIFFER" in remark for remark in remarks(result))


def test_a_short_run_is_compared_as_far_as_it_goes() -> None:
    result = made({"mmap": 2.0, "stream-serial": 1.0}, digests={"mmap": ["a", "b"]})
    assert identity(result)["same_bits"].tolist() == [True, True]


def test_nothing_to_compare_is_neither_yes_nor_no() -> None:
    result = made({"mmap": 2.0}, failed=("mmap",))
    assert identity(result)["same_bits"].tolist() == [None]
    assert bits_in_words(result) == "Nothing could be compared bit for bit."


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    result = made({"mmap": 500.0, "stream-serial": 100.0, "repack": 9.0}, failed=("repack",))
    again = BenchResult.load(result.save(tmp_path / "b"))
    assert again.facts == result.facts
    assert again.digests == result.digests
    for one, other in ((again.runs, result.runs), (again.tokens, result.tokens)):
        assert one.columns.tolist() == other.columns.tolist()
        assert one.dtypes.tolist() == other.dtypes.tolist()
        assert one.equals(other)
    assert verdict(again) == verdict(result)


def test_a_token_that_decides_everything_is_pointed_at() -> None:
    result = made({"mmap": 5.0, "stream-serial": 1.0})
    assert not any("one token" in remark for remark in remarks(result))
    place = result.tokens.index[(result.tokens["case"] == "mmap") & (result.tokens["index"] == 9)]
    result.tokens.loc[place[0], "wall_ms"] = 4e5
    assert any("mmap: one token took 400.0 s" in remark for remark in remarks(result))
    tiny = made({"mmap": 0.05, "stream-serial": 0.01})
    tiny.tokens.loc[place[0], "wall_ms"] = 40.0
    assert any("mmap: one token took 40 ms" in remark for remark in remarks(tiny))


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BenchError, match="cannot be written"):
        made({"mmap": 1.0}).save(tmp_path / "file" / "b")


def change(directory: Path, **facts: Any) -> None:
    path = directory / BENCH_FILE
    content = json.loads(path.read_text())
    content |= facts
    path.write_text(json.dumps(content))


def test_damaged_directories_are_refused_with_the_file(tmp_path: Path) -> None:
    good = made({"mmap": 5.0, "stream-serial": 1.0})
    with pytest.raises(BenchError, match="labkit bench MODEL --out"):
        BenchResult.load(tmp_path / "nothing")
    for name, text in (
        (BENCH_FILE, ""),
        (BENCH_FILE, "[]"),
        (BENCH_FILE, "{"),
        (BENCH_FILE, "[" * 100_000),
        (BENCH_FILE, '{"format": "other"}'),
        (TOKENS_FILE, ""),
        (TOKENS_FILE, "round,case\n1,mmap\n"),
        (TOKENS_FILE, "round,case,index,warmup,wall_ms\n1,mmap,0,maybe,3\n"),
        (TOKENS_FILE, "round,case,index,warmup,wall_ms\n1,mmap,0,True,fast\n"),
        (TOKENS_FILE, "round,case,index,warmup,wall_ms\n1,mmap,0,True,\n"),
        (TOKENS_FILE, "round,case,index,warmup,wall_ms\n1,other,0,True,3\n"),
        (TOKENS_FILE, "round,case,index,warmup,wall_ms\n1.5,mmap,0,True,3\n1,2,3,4,5,6,7\n"),
    ):
        directory = good.save(tmp_path / "b")
        (directory / name).write_text(text)
        with pytest.raises(BenchError, match=r"b[/\\:]"):
            BenchResult.load(directory)
    directory = good.save(tmp_path / "b")
    (directory / TOKENS_FILE).write_bytes(b"\xff\xfe\x00,")
    with pytest.raises(BenchError):
        BenchResult.load(directory)


@pytest.mark.parametrize(
    "facts",
    [
        {"facts": None},
        {"facts": {"model": "m"}},
        {"runs": [{"round": 1}]},
        {"runs": {}},
        {"runs": [{"round": "one", "case": "mmap", "kind": "mmap", "status": "ok"}]},
    ],
)
def test_json_of_the_wrong_shape_is_refused(tmp_path: Path, facts: dict[str, Any]) -> None:
    directory = made({"mmap": 5.0}).save(tmp_path / "b")
    change(directory, **facts)
    with pytest.raises(BenchError):
        BenchResult.load(directory)


def test_tables_fit_a_terminal_of_80_characters() -> None:
    result = made({"mmap": 123456.0, "resident": 3.0, "stream-userfaultfd": 12345.0})
    result.runs["open_read_mib"], result.runs["load_read_mib"] = 4059.0, 7897.0
    result.runs["cgroup_peak_mib"] = 1618.0
    assert max(map(len, shown(result).splitlines())) <= 80
    assert "…" not in shown(result)
    assert shown(result).count("stream-userfaultfd") == 3  # whole, in every table


def shown(result: BenchResult) -> str:
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=80)
    for part in all_tables(result, summary(result)):
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]
