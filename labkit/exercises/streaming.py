"""Exercises of `04_streaming_decode`: waits, rates, tails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.exercises.check import Verdict, check

if TYPE_CHECKING:
    import pandas as pd


def _first_streamed(table: pd.DataFrame) -> pd.DataFrame:
    """The row of the first streamed case that ran; none if none did."""
    ran = table["kind"].str.startswith("stream") & (table["status"] == "ok")
    return table[ran].head(1)


def all_hidden(answer: Any, table: pd.DataFrame) -> Verdict:
    """Tokens a second without any exposed wait; `table` as of `labkit.bench.summary.summary`."""
    first = _first_streamed(table)
    tok_s = 1000 / (first["compute_ms"] + first["manage_ms"]).max()
    return check(
        answer,
        tok_s,
        tolerance=0.02 * tok_s,
        hint="What is left of wall_ms without wait_ms? And tokens a second are 1000 / "
        "milliseconds.",
        because="No overlap can do better than that on this machine, only a better cache can.",
    )


def rate_of_reads(answer: Any, table: pd.DataFrame) -> Verdict:
    """MiB a second while a read was under way."""
    first = _first_streamed(table)
    mib_s = 1000 * (first["read_mib"] / first["read_ms"]).max()
    return check(
        answer,
        mib_s,
        tolerance=0.02 * mib_s,
        hint="Divide read_mib by read_ms, and mind the unit.",
        because="Compare it with what your disk can do: small slices read slower than large ones.",
    )


def tokens_beyond_p99(answer: Any) -> Verdict:
    """Tokens to measure so that one lies beyond the p99."""
    return check(
        answer,
        lambda n: 100 <= n <= 101,
        hint="p99 leaves one in a hundred.",
        because="With fewer the p99 says next to nothing beyond the maximum.",
    )
