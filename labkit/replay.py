"""Replay of a trace: what hit rate each cache policy would have had, at each budget.

The accounting is that of the live engine. A batch of one layer asks once for each distinct expert;
a prompt is one batch, a generated token another. Entries of the batch that asks are never evicted.
The policies are the live ones. The cache starts empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from labkit.demand import Demand, demand
from labkit.errors import BudgetError
from labkit.policy import POLICIES, Belady, CachePolicy, Echo, Forecast, make_policy, next_uses
from labkit.stack_distance import stack_distance
from labkit.trace import RouteTrace

__all__ = ["Demand", "budget_grid", "demand", "lru_curve", "replay", "replay_batches"]

MIB = 2**20


class _Run(NamedTuple):
    hits: np.ndarray
    evicted: np.ndarray
    peak_bytes: int


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
    future = next_uses(asked.batches) if "belady" in policies else []
    decode = asked.keys["phase"].to_numpy() == 1
    total, total_decode = int(asked.counts.sum()), int(asked.counts[decode].sum())
    rows = []
    for name in policies:
        runs = _run(asked, _policies(name, [budget for _, budget in budgets], asked, future, seed))
        for (budget_mib, _), run in zip(budgets, runs, strict=True):
            rows.append(
                {
                    "budget_mib": budget_mib,
                    "policy": name,
                    "hit_pct": _pct(run.hits.sum(), total),
                    "hit_pct_decode": _pct(run.hits[decode].sum(), total_decode),
                    "read_mib": float(((asked.counts - run.hits) * asked.sizes).sum() / MIB),
                    "peak_resident_mib": run.peak_bytes / MIB,
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
    future = next_uses(asked.batches) if policy == "belady" else []
    _, budget = _budget_bytes(budget_mib)
    (run,) = _run(asked, _policies(policy, [budget], asked, future, seed))
    misses = asked.counts - run.hits
    return asked.keys.assign(
        phase=asked.keys["phase"].map({0: "prefill", 1: "decode"}),
        hits=run.hits,
        misses=misses,
        evicted=run.evicted,
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
    """`n` evenly spaced budgets in MiB, the last of which holds all entries that are asked for."""
    return [asked.used_bytes * part / n / MIB for part in range(1, n + 1)]


def _run(asked: Demand, policies: list[CachePolicy]) -> list[_Run]:
    """Take all policies through the batches in step."""
    hits = [[] for _ in policies]
    evicted = [[] for _ in policies]
    peaks = [0] * len(policies)
    each = list(zip(range(len(policies)), policies, hits, evicted, strict=True))
    layers, choices = asked.keys["layer"].tolist(), asked.choices
    for number, (batch, size) in enumerate(zip(asked.batches, asked.sizes.tolist(), strict=True)):
        tokens = choices[number].tolist() if number in choices else None
        for place, policy, hit, gone in each:
            if tokens is None:
                found, missed, dropped = policy.lookup(batch, size)
            else:
                found, missed, dropped = policy.request(layers[number], tokens, size)
            hit.append(len(found))
            gone.append(len(dropped))
            if missed and policy.resident_bytes > peaks[place]:
                peaks[place] = policy.resident_bytes
    found = zip(hits, evicted, peaks, strict=True)
    return [_Run(np.array(h, np.int64), np.array(e, np.int64), peak) for h, e, peak in found]


def _policies(
    name: str, budgets: list[int], asked: Demand, future: list[list[int]], seed: int
) -> list[CachePolicy]:
    """The policy at each budget."""
    if name == "belady":
        return [Belady(budget, future) for budget in budgets]
    if name == "echo":  # what it expects does not depend on the budget
        layers = len(asked.entry_bytes)
        forecast = Forecast(layers)
        return [Echo(budget, layers, forecast) for budget in budgets]
    return [make_policy(name, budget, asked.entry_bytes, seed=seed) for budget in budgets]


def _budget_bytes(budget_mib: float) -> tuple[float, int]:
    if not budget_mib >= 0:
        raise BudgetError(f"A cache of {budget_mib} MiB makes no sense; 0 turns it off.")
    return float(budget_mib), int(min(budget_mib * MIB, 2**62))


def _pct(part: np.ndarray | int, whole: int):
    return 100 * part / whole if whole else part * float("nan")
