"""Exercises of `03_cache_curves`: the token cycle, a budget, a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.exercises.check import Verdict, check

if TYPE_CHECKING:
    import pandas as pd

    from labkit.demand import Demand


def asked_per_token(answer: Any, asked: Demand) -> Verdict:
    """MiB that one generated token asks for in all layers."""
    cycle_mib = asked.cycle_bytes / 2**20
    return check(
        answer,
        cycle_mib,
        tolerance=0.02 * cycle_mib,
        hint="Layers x experts per token x bytes of an entry: look at `asked.entry_bytes`.",
        because="A cache smaller than this forgets a layer before its next turn.",
    )


def half_of_the_hits(answer: Any, asked: Demand) -> Verdict:
    """A budget in MiB that gives LRU half of its best hit rate, within three points."""
    from labkit.replay import lru_curve

    whole = lru_curve(asked)
    half = whole["hit_pct"].iloc[-1] / 2

    def close(budget_mib: float) -> bool:
        rate = whole.loc[whole["budget_mib"] <= budget_mib, "hit_pct"].iloc[-1]
        return abs(rate - half) < 3

    return check(answer, close, hint="Where does the column hit_pct pass half of its last value?")


def best_below_the_cliff(answer: Any, cliff: pd.DataFrame) -> Verdict:
    """The online policy with most hits at the smallest budget of `cliff`, a table of `replay`."""
    from labkit.policy import ONLINE

    smallest = cliff[cliff["budget_mib"] == cliff["budget_mib"].min()]
    hits = smallest.set_index("policy")["hit_pct"][list(ONLINE)]
    return check(
        answer,
        lambda name: hits.max() - hits[name.strip().lower()] < 0.05,
        hint="Look along the first row of the table of the cliff; belady is not online.",
        because="Below the cycle it pays to hold on to something; above it, what is recent counts.",
    )
