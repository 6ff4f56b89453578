"""A benchmark's summary as tables for a terminal, none wider than 80 characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table

from labkit.bench.result import BenchResult


def all_tables(result: BenchResult, table: pd.DataFrame) -> list[Table]:
    """Speed, a token's time, cold start and memory. `table` is the benchmark's `summary`."""
    base = result.facts["baseline"]
    rows = table.to_dict("records")
    return [_speed(rows, base), _token(rows), _start(rows, base)]


def _speed(rows: Sequence[dict[Any, Any]], base: str) -> Table:
    shown = _table(
        "Decode",
        f"x base: times as fast as {base}, with a 95 % bootstrap interval over rounds and tokens. "
        "Spread: largest minus smallest round, of the median. –: not measured.",
        ("cache\nMiB", "tok/s", "spread\n%", "times\nx base", "hits\n%"),
    )
    for row in rows:
        if row["status"] != "ok":
            shown.add_row(row["case"], "–", f"[red]{row['status']}[/red]")
            continue
        ratio, low, high = (row[f"speed_ratio{end}"] for end in ("", "_low", "_high"))
        interval = f"{ratio:.2f} \\[{low:.2f}, {high:.2f}]"
        known = ratio == ratio
        shown.add_row(
            row["case"],
            number(row["cache_mib"], 0),
            number(row["decode_tok_s"], 2),
            number(row["spread_pct"], 0),
            "1" if row["case"] == base else interval if known else "–",
            number(row["hit_pct"], 1),
        )
    return shown


def _token(rows: Sequence[dict[Any, Any]]) -> Table:
    shown = _table(
        "A token, in milliseconds",
        "p50 to p99 of all measured tokens, then means of the median round. Compute is what is "
        "left over of the wall time; wait is exposed: the graph stood still for reads.",
        ("p50", "p95", "p99", "compute", "wait", "cache\nwork", "read\nMiB"),
    )
    for row in (row for row in rows if row["status"] == "ok"):
        columns = ("p50_ms", "p95_ms", "p99_ms", "compute_ms", "wait_ms", "manage_ms")
        shown.add_row(
            row["case"], *(number(row[c], 1) for c in columns), number(row["read_mib"], 1)
        )
    return shown


def _start(rows: Sequence[dict[Any, Any]], base: str) -> Table:
    shown = _table(
        "Cold start and memory",
        f"Open plus prompt, the file dropped from the page cache before; base is {base}. Peak is "
        "the process's own memory; in brackets what its cgroup had, page cache included. Read is "
        "what storage gave while opening + for the prompt. Faults waited for a disk.",
        (
            "open\ns",
            "prompt\ns",
            "times\nx base",
            "read\nMiB",
            "peak\nMiB",
            "same\nbits",
            "faults\n/token",
        ),
    )
    for row in (row for row in rows if row["status"] == "ok"):
        peak = number(row["peak_rss_mib"], 0)
        if row["cgroup_peak_mib"] == row["cgroup_peak_mib"]:
            peak += f"\n({row['cgroup_peak_mib']:,.0f})"
        shown.add_row(
            row["case"],
            number(row["open_s"], 2),
            number(row["prefill_s"], 2),
            number(row["first_token_ratio"], 2),
            _read(row),
            peak,
            {True: "yes", False: "no"}.get(row["same_bits"], "–"),
            number(row["major_faults"], 1),
        )
    return shown


def _read(row: dict[Any, Any]) -> str:
    opening, whole = row["open_read_mib"], row["load_read_mib"]
    return f"{number(opening, 0)}\n+ {number(whole - opening, 0)}" if whole == whole else "–"


def _table(title: str, caption: str, columns: Iterable[str]) -> Table:
    shown = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )
    shown.add_column("case", overflow="fold", max_width=18)
    for name in columns:
        shown.add_column(name, justify="right", no_wrap=True)
    return shown


def number(value: float | None, digits: int) -> str:
    """A figure for people, without decimals from 1,000 on; a dash for one not measured."""
    return "–" if value is None or value != value else f"{value:,.{digits * (abs(value) < 1e3)}f}"
