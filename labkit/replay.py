"""Replay of a trace: what hit rate each cache policy would have had, at each budget.

The accounting is that of the live engine. A batch of one layer asks once for each distinct expert;
a prompt is one batch, a generated token another. Entries of the batch that asks are never evicted.
The policies are the live ones. The cache starts empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd

from labkit.errors import BudgetError, TraceError
from labkit.policy import POLICIES, Belady, CachePolicy, Entry, make_policy, next_uses
from labkit.stack_distance import bytes_to_hit
from labkit.trace import RouteTrace

MIB = 2**20


class _Run(NamedTuple):
    hits: list[int]
    misses: list[int]
    evicted: list[int]
    peak_bytes: int


@dataclass(frozen=True)
class Demand:
    """What a trace asks of a cache: one batch after another, each of one layer.

    Attributes:
        batches: (layer, expert) entries of each of B batches, distinct, in the order asked.
        keys: (B,) rows: turn, phase (0 prefill, 1 decode), step (the batch's first), layer.
        counts: (B,) entries in each batch.
        sizes: (B,) bytes of an entry of the batch's layer.
        entry_bytes: the same by layer.
    """

    batches: list[list[Entry]]
    keys: pd.DataFrame
    counts: np.ndarray
    sizes: np.ndarray
    entry_bytes: dict[int, int]

    @property
    def floor_bytes(self) -> int:
        """Bytes of the largest batch, which no budget can go below."""
        return int((self.counts * self.sizes).max(initial=0))

    @property
    def cycle_bytes(self) -> int:
        """The token cycle: bytes that a generated token asks for in all layers, on average.

        Below it an LRU cache over all layers finds next to nothing. 0 if nothing was generated.
        """
        decode = self.keys["phase"].to_numpy() == 1
        tokens = len(self.keys.loc[decode, ["turn", "step"]].drop_duplicates())
        return int((self.counts * self.sizes)[decode].sum() / max(tokens, 1))

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries that are asked for: with that budget nothing is read twice."""
        used = {entry for batch in self.batches for entry in batch}
        return sum(self.entry_bytes[layer] for layer, _ in used)


def demand(
    trace: RouteTrace,
    *,
    entry_bytes: Mapping[int, int] | int | None = None,
    ubatch: int | None = None,
) -> Demand:
    """Put a trace in the order in which its engine asked.

    Args:
        entry_bytes: bytes of an expert entry, by layer or for all; None takes the trace's own.
        ubatch: tokens of one prefill batch; None puts the whole prompt in one.

    Raises:
        TraceError: the trace does not know the size of its entries, and none was given.
    """
    table = trace.table
    phase = table["phase"].cat.codes.to_numpy()
    rows = pd.DataFrame(
        {"turn": table["turn"].to_numpy(), "phase": phase, "step": table["step"].to_numpy()}
    )
    first = rows["step"].groupby([rows["turn"], rows["phase"]]).transform("min").to_numpy()
    step = rows["step"].to_numpy()
    within = step - first
    batch = np.where(phase == 1, step, first if ubatch is None else step - within % ubatch)
    rows = rows.assign(
        step=batch, layer=table["layer"].to_numpy(), expert=table["expert"].to_numpy()
    )
    # Rows come by token; a prompt's batch goes by layer, its tokens and slots in order.
    order = np.lexsort((rows["layer"], batch, phase, rows["turn"]))
    rows = rows.iloc[order].drop_duplicates(ignore_index=True)
    keys = ["turn", "phase", "step", "layer"]
    changed = (rows[keys].diff().fillna(1) != 0).any(axis=1).to_numpy()
    starts = np.flatnonzero(changed)
    bounds = np.r_[starts, len(rows)].tolist()
    names = _Names()
    pairs = zip(rows["layer"].tolist(), rows["expert"].tolist(), strict=True)
    entries = [names[pair] for pair in pairs]
    by_layer = _sizes(trace, entry_bytes, rows["layer"].unique().tolist())
    layers = rows["layer"].to_numpy()[starts]
    return Demand(
        [entries[low:high] for low, high in pairwise(bounds)],
        rows.loc[starts, keys].reset_index(drop=True),
        np.diff(bounds),
        np.array([by_layer[layer] for layer in layers.tolist()], np.int64),
        by_layer,
    )


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
    for budget_mib, budget in budgets:
        for name in policies:
            run = _run(asked, _policy(name, budget, asked, future, seed))
            hits = np.array(run.hits, np.int64)
            rows.append(
                {
                    "budget_mib": budget_mib,
                    "policy": name,
                    "hit_pct": _pct(hits.sum(), total),
                    "hit_pct_decode": _pct(hits[decode].sum(), total_decode),
                    "read_mib": float(((asked.counts - hits) * asked.sizes).sum() / MIB),
                    "peak_resident_mib": run.peak_bytes / MIB,
                }
            )
    columns = ["budget_mib", "policy", "hit_pct", "hit_pct_decode", "read_mib", "peak_resident_mib"]
    return pd.DataFrame(rows, columns=columns)


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
    run = _run(asked, _policy(policy, budget, asked, future, seed))
    misses = np.array(run.misses, np.int64)
    return asked.keys.assign(
        phase=asked.keys["phase"].map({0: "prefill", 1: "decode"}),
        hits=np.array(run.hits, np.int64),
        misses=misses,
        evicted=np.array(run.evicted, np.int64),
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
    entries = np.array([entry for batch in asked.batches for entry in batch], np.int64)
    entries = entries.reshape(-1, 2)
    ids = entries[:, 0] * (int(entries[:, 1].max(initial=0)) + 1) + entries[:, 1]
    sizes = np.repeat(asked.sizes, asked.counts)
    needs = bytes_to_hit(ids, sizes, np.repeat(np.arange(len(asked.batches)), asked.counts))
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


class _Names(dict[Entry, Entry]):
    """One tuple per entry, however often it is named: a long trace holds references only."""

    def __missing__(self, entry: Entry) -> Entry:
        self[entry] = entry
        return entry


def _run(asked: Demand, policy: CachePolicy) -> _Run:
    hits, misses, evicted = [], [], []
    peak = 0
    lookup = policy.lookup
    for batch, size in zip(asked.batches, asked.sizes.tolist(), strict=True):
        found = lookup(batch, size)
        hits.append(len(found.hits))
        misses.append(len(found.misses))
        evicted.append(len(found.evicted))
        if policy.resident_bytes > peak:
            peak = policy.resident_bytes
    return _Run(hits, misses, evicted, peak)


def _policy(
    name: str, budget: int, asked: Demand, future: list[list[int]], seed: int
) -> CachePolicy:
    if name == "belady":
        return Belady(budget, future)
    return make_policy(name, budget, asked.entry_bytes, seed=seed)


def _budget_bytes(budget_mib: float) -> tuple[float, int]:
    if not budget_mib >= 0:
        raise BudgetError(f"A cache of {budget_mib} MiB makes no sense; 0 turns it off.")
    return float(budget_mib), int(min(budget_mib * MIB, 2**62))


def _sizes(
    trace: RouteTrace, entry_bytes: Mapping[int, int] | int | None, layers: list[int]
) -> dict[int, int]:
    if isinstance(entry_bytes, int):
        entry_bytes = dict.fromkeys(layers, entry_bytes)
    known = trace.entry_bytes if entry_bytes is None else entry_bytes
    for layer in layers:
        if known.get(layer, 0) <= 0:
            raise TraceError(
                f"The trace does not say how many bytes an expert of layer {layer} has, so a "
                "budget in MiB means nothing. Give entry_bytes: bytes of one expert's weights "
                "(all its projections), by layer or one number for all."
            )
    return {layer: known[layer] for layer in sorted(layers)}


def _pct(part: np.ndarray | int, whole: int):
    return 100 * part / whole if whole else part * float("nan")
