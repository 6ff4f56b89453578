"""What an expert cache finds: from a trace's replay, or by an assumption that is stated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from labkit.errors import TraceError

if TYPE_CHECKING:
    from labkit.replay import Demand

MIB = 2**20

SKEW = 6.0
"""Exponent of `assumed_hit_pct`: the middle of what the recorded runs show, 3 to 12."""
SKEW_LOW, SKEW_HIGH = 3.0, 12.0


@dataclass(frozen=True)
class HitRate:
    """A hit rate in decode, the range that it may lie in, and what it comes from."""

    hit_pct: float
    low_pct: float
    high_pct: float
    source: str


def assumed_hit_pct(
    cache_mib: float | np.ndarray,
    cycle_mib: float | np.ndarray,
    expert_mib: float | np.ndarray,
    skew: float = SKEW,
) -> np.ndarray:
    """The share of lookups that an LRU cache finds, if nothing is known of the routing.

    ``1 - (1 - cached share) ** skew``: skew 1 would be routing at random; recorded runs of
    fine-grained models lie between 3 and 12. Below the token cycle an LRU cache finds nothing.
    """
    share = np.clip(np.asarray(cache_mib, float) / expert_mib, 0, 1)
    found = 100 * (1 - (1 - share) ** skew)
    return np.where(np.asarray(cache_mib) < cycle_mib, np.where(share < 1, 0.0, 100.0), found)


def assumed_hits(cache_mib: float, cycle_mib: float, expert_mib: float) -> HitRate:
    """The assumption with its range."""
    middle, low, high = (
        float(assumed_hit_pct(cache_mib, cycle_mib, expert_mib, skew))
        for skew in (SKEW, SKEW_LOW, SKEW_HIGH)
    )
    return HitRate(middle, low, high, "assumed: no trace was given")


def replayed_hits(asked: Demand, cache_mib: float, policy: str = "lru") -> HitRate:
    """The hit rate of generated tokens that the trace would have had with this cache.

    Raises `TraceError` when the trace holds no generated token.
    """
    from labkit.replay import replay

    row = replay(asked, [cache_mib], [policy]).iloc[0]
    hit = float(row["hit_pct_decode"])
    if np.isnan(hit):
        raise TraceError(
            "The trace holds no generated token, so it says nothing about decode. Record one with "
            "`labkit trace MODEL -p TEXT -n 64 -o trace.csv`."
        )
    return HitRate(hit, hit, hit, f"replay of the trace ({policy})")
