"""Replay of a trace: what hit rate each cache policy would have had, at each budget.

The accounting is that of the live engine. A batch of one layer asks once for each distinct expert;
a prompt is one batch, a generated token another. Entries of the batch that asks are never evicted.
The policies are the live ones. The cache starts empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from labkit.demand import Demand, demand
from labkit.errors import BudgetError
from labkit.policy import POLICIES, CachePolicy, Entry, Ranking, make_policy, make_ranking
from labkit.stack_distance import stack_distance
from labkit.trace import RouteTrace

__all__ = ["Demand", "budget_grid", "demand", "lru_curve", "replay", "replay_batches"]

MIB = 2**20


class _Part(NamedTuple):
    """What one cache found in the batches of one chunk."""

    place: int
    batches: slice
    misses: np.ndarray
    evicted: np.ndarray
    peak_bytes: int


class _Notes(NamedTuple):
    """The batches of a chunk that changed what one cache holds."""

    number: list[int]
    misses: list[int]
    evicted: list[int]
    resident_bytes: list[int]


def replay(
    trace: RouteTrace | Demand,
    budgets_mib: Iterable[float],
    policies: Sequence[str] = POLICIES,
    *,
    seed: int = 0,
) -> pd.DataFrame:
    """The hit rate of every policy at every budget.

    Args:
        trace: a trace that knows its entries' bytes, or `demand` of one.
        budgets_mib: budgets for expert weights, in MiB; 0 turns the cache off.
        policies: names out of `labkit.policy.POLICIES`.
        seed: of the policy "random".

    Returns one row per budget and policy, with columns budget_mib, policy, hit_pct (over all
    lookups), hit_pct_decode (over those of generated tokens), read_mib, peak_resident_mib (above
    budget_mib only where a single batch was). A rate of no lookups is NaN.

    Raises:
        BudgetError: a budget below 0.
        ValueError: an unknown policy.
        TraceError: see `demand`.
    """
    asked = trace if isinstance(trace, Demand) else demand(trace)
    budgets = [_budget_bytes(budget) for budget in budgets_mib]
    decode = asked.keys["phase"].to_numpy() == 1
    total, total_decode = int(asked.counts.sum()), int(asked.counts[decode].sum())
    rows = []
    for name in policies:
        found = np.zeros((len(budgets), 3), np.int64)  # misses, those of decode, bytes
        peaks = [0] * len(budgets)
        for part in _run(asked, name, [budget for _, budget in budgets], seed):
            misses = part.misses
            in_decode = misses[decode[part.batches]].sum()
            read_bytes = (misses * asked.sizes[part.batches]).sum()
            found[part.place] += (misses.sum(), in_decode, read_bytes)
            peaks[part.place] = max(peaks[part.place], part.peak_bytes)
        for (budget_mib, _), (misses, in_decode, nbytes), peak in zip(
            budgets, found.tolist(), peaks, strict=True
        ):
            rows.append(
                {
                    "budget_mib": budget_mib,
                    "policy": name,
                    "hit_pct": _pct(total - misses, total),
                    "hit_pct_decode": _pct(total_decode - in_decode, total_decode),
                    "read_mib": nbytes / MIB,
                    "peak_resident_mib": peak / MIB,
                }
            )
    by_budget = [row for start in range(len(budgets)) for row in rows[start :: len(budgets) or 1]]
    columns = ["budget_mib", "policy", "hit_pct", "hit_pct_decode", "read_mib", "peak_resident_mib"]
    return pd.DataFrame(by_budget, columns=columns)


def replay_batches(
    trace: RouteTrace | Demand, budget_mib: float, policy: str = "lru", *, seed: int = 0
) -> pd.DataFrame:
    """What each batch of each layer found under one policy: where the misses are.

    Returns one row per batch, with columns turn, phase ("prefill" or "decode"), step (the first
    token's), layer, hits, misses, evicted, read_bytes. Errors as in `replay`.
    """
    asked = trace if isinstance(trace, Demand) else demand(trace)
    _, budget = _budget_bytes(budget_mib)
    misses, evicted = np.zeros((2, len(asked.counts)), np.int64)
    for part in _run(asked, policy, [budget], seed):
        misses[part.batches], evicted[part.batches] = part.misses, part.evicted
    return asked.keys.assign(
        phase=asked.keys["phase"].map({0: "prefill", 1: "decode"}),
        hits=asked.counts - misses,
        misses=misses,
        evicted=evicted,
        read_bytes=misses * asked.sizes,
    )


def lru_curve(trace: RouteTrace | Demand) -> pd.DataFrame:
    """The LRU hit rate at every budget at once, from stack distances.

    A row for every budget at which the rate changes: columns budget_mib, hit_pct, hit_pct_decode,
    read_mib, the first at budget 0. The policy itself differs by a few lookups, because within one
    batch it takes what it found for older than what it had to read: by 0.01 points on a trace of a
    big model, by half a point where the budget holds only a few batches.
    """
    asked = trace if isinstance(trace, Demand) else demand(trace)
    ids, sizes = asked.ids, np.repeat(asked.sizes, asked.counts)
    between = stack_distance(ids, sizes, np.repeat(np.arange(len(asked.counts)), asked.counts))
    needs = np.where(between < 0, -1, between + sizes)
    decode = np.repeat(asked.keys["phase"].to_numpy() == 1, asked.counts)
    order = np.argsort(needs, kind="stable")[int((needs < 0).sum()) :]
    found = needs[order]
    last = np.flatnonzero(np.r_[np.diff(found) != 0, True]) if len(found) else order
    hits, hits_decode = np.arange(1, len(found) + 1)[last], np.cumsum(decode[order])[last]
    saved = np.cumsum(sizes[order])[last]
    return pd.DataFrame(
        {
            "budget_mib": np.r_[0, found[last]] / MIB,
            "hit_pct": _pct(np.r_[0, hits], len(ids)),
            "hit_pct_decode": _pct(np.r_[0, hits_decode], int(decode.sum())),
            "read_mib": (sizes.sum() - np.r_[0, saved]) / MIB,
        }
    )


def budget_grid(asked: Demand, n: int = 16) -> list[float]:
    """`n` evenly spaced budgets in MiB, the last of which holds all entries that are asked for.

    Just 0 if nothing is asked for.
    """
    if not asked.used_bytes:
        return [0.0]
    return [asked.used_bytes * part / n / MIB for part in range(1, n + 1)]


def _run(asked: Demand, policy: str, budgets: list[int], seed: int) -> Iterator[_Part]:
    """Take the policy through the batches at every budget, chunk by chunk."""
    future = asked.next_uses() if policy == "belady" else None
    sizes = asked.entry_bytes
    ranking = make_ranking(policy, len(sizes), future)
    caches = [make_policy(policy, budget, sizes, seed=seed, ranking=ranking) for budget in budgets]
    # One cache after another keeps near what each touches; those that share a ranking go in step.
    each = list(enumerate(caches))
    groups = [[one] for one in each] if ranking is None else [each]
    start = 0
    for chunk in asked.chunks():
        batches = slice(start, start + len(chunk))
        for group in groups:
            yield from _step(asked, batches, chunk, group, ranking)
        start = batches.stop


def _step(
    asked: Demand,
    batches: slice,
    chunk: list[list[Entry]],
    caches: list[tuple[int, CachePolicy]],
    ranking: Ranking | None,
) -> Iterator[_Part]:
    """Take some caches through a chunk of batches in step."""
    each = [(place, cache, cache.lookup, _Notes([], [], [], [])) for place, cache in caches]
    sizes, choices = asked.sizes[batches].tolist(), asked.choices
    for number, (batch, size) in enumerate(zip(chunk, sizes, strict=True), batches.start):
        if ranking:
            ranking.learn(batch, choices[number].tolist() if number in choices else ())
        for _, cache, lookup, notes in each:
            _, misses, evicted = lookup(batch, size)
            if misses or evicted:
                at, missed, gone, resident = notes
                at.append(number)
                missed.append(len(misses))
                gone.append(len(evicted))
                resident.append(cache.resident_bytes)
    for place, _, _, (at, missed, gone, resident) in each:
        counts = np.zeros((2, len(chunk)), np.int64)
        counts[:, np.array(at, np.int64) - batches.start] = missed, gone
        yield _Part(place, batches, counts[0], counts[1], max(resident, default=0))


def _budget_bytes(budget_mib: float) -> tuple[float, int]:
    if not budget_mib >= 0:
        raise BudgetError(f"A cache of {budget_mib} MiB makes no sense; 0 turns it off.")
    return float(budget_mib), int(min(budget_mib * MIB, 2**62))


def _pct(part: np.ndarray | int, whole: int):
    return 100 * part / whole if whole else part * float("nan")
