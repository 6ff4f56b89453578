"""Charts of a benchmark: their titles say what the tables hold, and they are drawn."""

from __future__ import annotations

import pandas as pd
import pytest

from labkit import charts
from labkit.charts import token_time


@pytest.fixture
def table() -> pd.DataFrame:
    """A summary of three cases that ran and one that did not."""
    nan = float("nan")
    rows = [
        ("mmap", "mmap", "ok", 500.0, nan, nan, nan, nan, 2.0, 480.0, 600.0, 960.0,
         8.0, 1.0, 900.0),
        ("serial", "stream-serial", "ok", 100.0, 50.0, 40.0, 10.0, 40.0, 10.0, 90.0, 140.0, 170.0,
         0.4, 0.5, 12.0),
        ("uffd", "stream-userfaultfd", "ok", 80.0, 60.0, 10.0, 10.0, 40.0, 12.5, 78.0, 95.0, 117.0,
         0.4, 0.6, 12.0),
        ("resident", "resident", "out of memory", *[nan] * 12),
    ]  # fmt: skip
    columns = ["case", "kind", "status", "wall_ms", "compute_ms", "wait_ms", "manage_ms", "read_ms",
               "decode_tok_s", "p50_ms", "p95_ms", "p99_ms", "open_s", "prefill_s",
               "load_read_mib"]  # fmt: skip
    found = pd.DataFrame(rows, columns=columns)
    return found.assign(n_tokens=4, first_token_s=found["open_s"] + found["prefill_s"])


@pytest.fixture
def tokens() -> pd.DataFrame:
    rows = [
        (1, case, i, i < 1, wall, wall * 0.5, wall * 0.4, wall * 0.1, i * 1.5)
        for case in ("mmap", "serial", "uffd")
        for i, wall in enumerate((50.0, 80.0, 90.0, 360.0 if case == "serial" else 100.0))
    ]
    columns = ["round", "case", "index", "warmup", "wall_ms", "compute_ms", "wait_ms", "manage_ms",
               "read_mib"]  # fmt: skip
    found = pd.DataFrame(rows, columns=columns)
    stock = found["case"] == "mmap"
    found.loc[stock, ["compute_ms", "wait_ms", "manage_ms", "read_mib"]] = float("nan")
    return found


def words(chart) -> str:
    assert charts.png(chart.to_dict())[:4] == b"\x89PNG"
    return charts.finding(chart).replace("\u00a0", " ").replace("\u2011", "-")


def drawn(chart) -> pd.DataFrame:
    """The rows of the chart's longest table."""
    return pd.DataFrame(max(chart.to_dict()["datasets"].values(), key=len))


def test_where_time_goes(table: pd.DataFrame) -> None:
    chart = token_time.where_time_goes(table)
    assert words(chart) == (
        "uffd stands still for reads in 12 % of a token's 80.0 ms, serial in 40 % of 100.0 ms"
    )
    parts = drawn(chart)
    assert parts.groupby("case")["ms"].sum().to_dict() == {"mmap": 500, "serial": 100, "uffd": 80}
    assert parts.loc[parts["case"] == "mmap", "part"].tolist() == [
        "not split: compute and page faults"
    ]


def test_parts_that_nobody_measured_have_no_colour_in_the_legend(table: pd.DataFrame) -> None:
    spec = token_time.where_time_goes(table[table["case"] != "mmap"]).to_dict()
    assert "not split" not in str(spec["layer"][0]["encoding"]["color"]["scale"]["domain"])


def test_token_by_token(tokens: pd.DataFrame) -> None:
    chart = token_time.token_by_token(tokens, ["serial", "uffd"])
    assert words(chart) == (
        "The slowest token, number 4 of serial, took 360.0 ms, 4.0 x the median of its case; "
        "it read 4.5 MiB"
    )


def test_latency_distribution(tokens: pd.DataFrame, table: pd.DataFrame) -> None:
    chart = token_time.latency_distribution(tokens[~tokens["warmup"]], table)
    assert words(chart) == (
        "mmap has the longest tail: p99 960.0 ms is 2.0 x its median (uffd: 1.5 x)"
    )
    assert "fewer than 100" in str(chart.to_dict()["title"]["subtitle"])


def test_exposed_wait(table: pd.DataFrame) -> None:
    assert words(token_time.exposed_wait(table)) == (
        "uffd hides 75 % of its reading behind compute: of 40.0 ms a token 10.0 ms are exposed"
    )
    assert "nothing to hide" in words(token_time.exposed_wait(table.assign(read_ms=0.0)))
    assert "nothing to hide" in words(token_time.exposed_wait(table[:1]))


def test_cold_start(table: pd.DataFrame) -> None:
    assert words(token_time.cold_start(table)) == (
        "serial has its first token after 900.0 ms, the earliest; mmap after 9.00 s, 10.0 x as long"
    )
    assert words(token_time.cold_start(table[:1])).startswith("mmap has its first token")


def test_without_a_streamed_case_the_title_says_so(table: pd.DataFrame) -> None:
    assert words(token_time.where_time_goes(table[:1])) == "No streamed case ran to its end"
    for chart in (token_time.where_time_goes, token_time.cold_start):
        assert words(chart(table[3:])) == "No case ran to its end"


def test_without_a_token_there_is_a_chart_all_the_same(tokens: pd.DataFrame) -> None:
    assert (
        words(token_time.token_by_token(tokens, ["none"])) == "No token of these cases was measured"
    )
