"""Per-token figures: the table of steps, and `bmoe_metrics` CSV files, ours and BigMoeOnEdge's."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from labkit.bundled import model_path
from labkit.errors import MetricsError
from labkit.runtime import Generation, Session
from labkit.runtime.metrics_csv import CSV_COLUMNS, session_info, step_table, write_metrics
from labkit.runtime.metrics_reader import Metrics, MetricsWarning, read_metrics

# The first tokens and the summary of a run of BigMoeOnEdge 0.17 (docs/bench-data/2026-07-27-gpu-
# expert-slots/ab-cpu-stream.csv, Apache-2.0), shortened.
PEER = """\
# bmoe_metrics v1
# model=Qwen_Qwen3.6-35B-A3B-Q4_0.gguf arch=qwen35moe n_layer=40 n_expert=256 threads=4 n_ctx=2048
# moe_stream=1 cache_mb=2000 io_threads=4 o_direct=1 overlap=1 prefetch=0 dense_weights=anon
step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,cpu_ms,\
dense_resident_frac,turn,majflt_mib,cache_budget_mib,rss_mib
1,96,229.020,386.935,121.370,301957120,8.55,71.262,36.389,0,741.916,-1.000,0,0.00,2000.0,4218.1
2,96,212.566,352.790,115.507,272662528,15.25,62.913,34.146,0,687.159,-1.000,0,0.00,2000.0,4218.1
3,96,161.600,147.479,119.688,104521728,24.07,28.569,13.342,0,495.072,1.000,0,0.00,2000.0,4219.2
# summary tokens=96 s/tok=0.213 tok/s=4.689 cache_hit_pct=54.4 n_prompt=7 stall_s/tok=0.057
"""


@pytest.fixture(scope="module")
def runs() -> tuple[list[Generation], list[Generation], dict[str, object], dict[str, object]]:
    """Two turns streamed, one resident, and the preambles of both."""
    prompt = [5, 90, 300, 7, 41]
    with Session(model_path("main-q4_0"), cache_mib=1.0, overlap="serial") as session:
        streamed = [session.generate(prompt, 12), session.generate([9, 77], 5)]
        info = session_info(session, temp=0, seed=0, io_threads=4)
    with Session(model_path("main-q4_0"), resident=True) as session:
        resident = [session.generate(prompt, 4)]
        return streamed, resident, info, session_info(session)


def test_a_row_is_a_token_with_everything_that_its_step_knows(runs) -> None:
    steps = runs[0][0].steps
    table = step_table(steps)
    assert len(table) == len(steps) == 12
    assert table["position"].tolist() == [step.index for step in steps]
    assert table["token"].tolist() == [step.token for step in steps]
    assert np.allclose(table["wall_ms"], [1e3 * step.wall_s for step in steps])
    assert np.allclose(table["read_mib"] * 2**20, [step.bytes_read for step in steps])
    assert table["hits"].tolist() == [step.hits for step in steps]
    assert table["misses"].tolist() == [step.misses for step in steps]
    parts = table["compute_ms"] + table["wait_ms"] + table["manage_ms"]
    assert np.allclose(parts, table["wall_ms"])
    assert table["hit_pct"].between(0, 100).all()
    assert (table["cpu_ms"] > 0).all()
    assert (table["batch_tokens"] == 1).all()


def test_tokens_of_a_prompt_share_their_batch() -> None:
    with Session(model_path("main-q4_0"), cache_mib=1.0, n_ubatch=4) as session:
        session.generate(list(range(10, 20)), 1)
        table = step_table(session.prefill_steps)
    assert table["batch"].tolist() == [0] * 4 + [1] * 4 + [2] * 2
    assert table["batch_tokens"].tolist() == [4] * 8 + [2] * 2
    assert table.groupby("batch")["wall_ms"].nunique().max() == 1


def test_what_a_resident_run_does_not_measure_is_nan_and_an_empty_table_has_columns(runs) -> None:
    table = step_table(runs[1][0].steps)
    assert table["hit_pct"].isna().all()
    assert step_table([]).columns.tolist() == table.columns.tolist()


def test_round_trip(runs, tmp_path: Path) -> None:
    streamed, _, info, _ = runs
    path = tmp_path / "metrics.csv"
    write_metrics(path, streamed, info)
    found = read_metrics(path)
    assert found.version == 2
    assert found.info["arch"] == "deepseek"
    assert found.info["cache_mb"] == "1"
    assert found.info["seed"] == "0"
    assert found.rows.columns.tolist() == [c for c in CSV_COLUMNS if c in found.rows]
    steps = pd.concat([step_table(turn.steps) for turn in streamed], ignore_index=True)
    table = found.table()
    assert table["turn"].tolist() == [0] * 12 + [1] * 5
    assert table["step"].tolist() == [*range(1, 13), *range(1, 6)]
    for name in ("wall_ms", "wait_ms", "manage_ms", "cpu_ms"):
        assert np.allclose(table[name], steps[name], atol=6e-4), name
    assert np.allclose(table["compute_ms"], steps["compute_ms"].clip(lower=0), atol=6e-4)
    assert np.allclose(table["read_mib"], steps["read_mib"])
    turn = streamed[0]
    last = table[table["turn"] == 0]["hit_pct"].iloc[-1]
    assert last == pytest.approx(100 * (turn.hit_rate or 0), abs=1e-3)
    assert [summary["tokens"] for summary in found.summaries] == ["12", "5"]
    wall_s = sum(step.wall_s for step in turn.steps)
    assert float(found.summaries[0]["tok/s"]) == pytest.approx(12 / wall_s, rel=1e-4)
    assert int(found.summaries[0]["n_prompt"]) == 5


def test_a_resident_run_claims_no_cache(runs, tmp_path: Path) -> None:
    write_metrics(tmp_path / "r.csv", runs[1], runs[3])
    text = (tmp_path / "r.csv").read_text()
    found = read_metrics(tmp_path / "r.csv")
    assert found.info["moe_stream"] == "0"
    assert "cache_budget_mib" not in found.rows
    assert found.table()["hit_pct"].isna().all()
    assert "nan" not in text


def test_what_nobody_measured_is_not_in_the_file(runs, tmp_path: Path) -> None:
    turn = replace(runs[0][0])
    turn.steps = [replace(step, cpu_s=None, major_faults=None) for step in turn.steps]
    write_metrics(tmp_path / "m.csv", [turn], runs[2])
    found = read_metrics(tmp_path / "m.csv")
    assert not {"cpu_ms", "majflt", "majflt_mib"} & set(found.rows)
    assert found.table()["cpu_ms"].isna().all()
    assert "cpu_s/tok" not in found.summaries[0]


def test_a_turn_without_tokens_and_a_name_with_spaces(runs, tmp_path: Path) -> None:
    info = {**runs[2], "model": "my model.gguf"}
    write_metrics(tmp_path / "m.csv", [Generation(prompt_tokens=[1])], info)
    found = read_metrics(tmp_path / "m.csv")
    assert found.info["model"] == "my_model.gguf"
    assert found.rows.empty
    assert found.summaries[0]["tokens"] == "0"


def test_a_directory_that_is_not_there_is_a_clear_error(runs, tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="cannot be written"):
        write_metrics(tmp_path / "no" / "m.csv", [], {})


def test_the_peers_file_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, PEER)
    assert (found.version, found.overlap) == (1, True)
    assert found.info["n_expert"] == "256"
    table = found.table()
    assert table["wait_ms"].tolist() == [71.262, 62.913, 28.569]
    assert table["read_mib"].iloc[0] == pytest.approx(301957120 / 2**20)
    parts = table["compute_ms"] + table["wait_ms"] + table["manage_ms"]
    assert np.allclose(parts, table["wall_ms"], atol=0.01)
    assert found.rows["dense_resident_frac"].isna().tolist() == [True, True, False]
    assert found.rows["majflt"].tolist() == [0, 0, 0]  # measured, for the processor time is there
    assert found.summaries[0]["tok/s"] == "4.689"


def test_zeros_that_stand_for_not_measured_are_not_taken_for_zero(tmp_path: Path) -> None:
    found = read(tmp_path, "# bmoe_metrics v2\nstep,wall_ms,majflt,cpu_ms\n1,5,0,0\n2,5,0,0\n")
    assert found.rows["majflt"].isna().all()
    assert found.table()["cpu_ms"].isna().all()


@pytest.mark.parametrize("end", ["\r\n", "\n", "\r"])
def test_line_ends_and_a_byte_order_mark(tmp_path: Path, end: str) -> None:
    found = read(tmp_path, "\ufeff" + PEER.replace("\n", end))
    assert len(found.rows) == 3


def test_columns_in_any_order_and_unknown_ones(tmp_path: Path) -> None:
    found = read(tmp_path, "# bmoe_metrics v3\n\nnew_one,wall_ms,step\n7,1.5,1\n,2.5,2\n")
    assert found.table()["wall_ms"].tolist() == [1.5, 2.5]
    assert np.isnan(found.rows["new_one"].iloc[1])


def test_a_last_line_that_was_cut_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "cut.csv"
    path.write_text(PEER[: PEER.index("119.688")])
    with pytest.warns(MetricsWarning, match="line 7"):
        assert len(read_metrics(path).rows) == 2


HEAD = "# bmoe_metrics v2\nstep,wall_ms,io_ms\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("\n\n", "no bmoe_metrics CSV"),
        ("# route_trace v1\nturn,phase\n", "labkit replay"),
        ("# bmoe_metrics v99999999\n", "no bmoe_metrics CSV"),
        ("# bmoe_metrics v2\n", "no header"),
        ("# bmoe_metrics v2\nstep,io_ms\n1,2\n", "wall_ms is missing"),
        ("# bmoe_metrics v2\nstep,wall_ms,step\n", "there twice"),
        (HEAD + "1,2\n", "m.csv:3: 2 values for 3 columns"),
        (HEAD + "1,2,3,4\n", "4 values"),
        (HEAD + "1,,3\n", "wall_ms is ''"),
        (HEAD + "1,fast,3\n", "wall_ms is 'fast'"),
        (HEAD + "1,nan,3\n", "not a number"),
        (HEAD + "1,inf,3\n", "not a number"),
        (HEAD + "1,1e999,3\n", "not a number"),
        (HEAD + "1,-2,3\n", "cannot be negative"),
        (HEAD + "1.5,2,3\n", "whole number"),
        (HEAD + "1e300,2,3\n", "whole number"),
        (HEAD + "1,2," + "9" * 5000 + "\n", "not a number"),
    ],
)
def test_damaged_files_end_in_an_error_that_names_the_place(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(MetricsError, match=words):
        read(tmp_path, text)


def test_bytes_that_are_no_text_and_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_bytes(b"# bmoe_metrics v2\nstep,wall_ms\n1,\xff\xfe\n")
    with pytest.raises(MetricsError, match="cannot be read"):
        read_metrics(path)
    with pytest.raises(MetricsError, match="cannot be read"):
        read_metrics(tmp_path)
    with pytest.raises(MetricsError, match="cannot be read"):
        read_metrics(tmp_path / "absent.csv")
    with (tmp_path / "huge.csv").open("wb") as file:
        file.truncate(1 << 40)  # no block of it is on the disk
    with pytest.raises(MetricsError, match="too many"):
        read_metrics(tmp_path / "huge.csv")


def test_no_mutation_of_a_good_file_raises_anything_else(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    good = PEER.encode()
    path = tmp_path / "m.csv"
    read_ok = 0
    for _ in range(400):
        data = bytearray(good)
        for place in random.integers(len(data), size=random.integers(1, 6)):
            data[place] = random.integers(256)
        path.write_bytes(bytes(data[: random.integers(len(data)) + 1]))
        with warnings.catch_warnings(action="ignore", category=MetricsWarning):
            try:
                found = read_metrics(path)
            except MetricsError:
                continue
        found.table()
        read_ok += 1
    assert read_ok > 10


def read(folder: Path, text: str) -> Metrics:
    path = folder / "m.csv"
    path.write_bytes(text.encode())
    return read_metrics(path)


def test_generate_writes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    code = "import sys; sys.argv[0] = 'labkit'; from labkit.cli import main; main()"
    words = ["generate", str(model_path("main-q4_0")), "--tokens", "5,6,7", "-n", "6",
             "--cache-mib", "1", "--metrics", str(path), "--json"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout)
    found = read_metrics(path)
    assert len(found.rows) == 6
    assert found.info["moe_stream"] == "1"
    assert found.info["temp"] == "0"
    wall = found.table()["wall_ms"]
    assert plain["token_latency_ms"]["p50"] == pytest.approx(wall.median(), abs=1e-3)
    assert plain["ttft_s"] > 0
    assert plain["open_s"] > 0
