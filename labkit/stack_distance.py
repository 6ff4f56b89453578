"""Stack distances: how much else was used since an entry was used last.

An LRU cache hits exactly where the distance fits in it, so one pass gives its hits for every
budget at once (Mattson et al., 1970). All in numpy: n log n comparisons, by sorting.
"""

from __future__ import annotations

import numpy as np


def previous_use(entries: np.ndarray) -> np.ndarray:
    """Index of the last earlier occurrence of each value of (n,) `entries`, -1 if there is none."""
    order = np.argsort(entries, kind="stable")
    same = np.r_[False, entries[order][1:] == entries[order][:-1]] if len(order) else order > 0
    before = np.full(len(entries), -1)
    before[order[same]] = order[np.flatnonzero(same) - 1]
    return before


def earlier_not_greater(values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """For each place i, the sum of weights (default 1) of the j < i with values[j] <= values[i].

    Blocks of growing width are sorted; each element of a right half adds up the left half's
    elements that sort before it. Equal values keep their order, so they count.
    """
    n = len(values)
    rank = np.empty(n, np.int64)
    rank[np.argsort(values, kind="stable")] = np.arange(n)
    weights = np.ones(n, np.int64) if weights is None else weights
    sums = np.zeros(n, np.int64)
    place = np.arange(n)
    order = place.copy()
    width = 1
    while width < n:
        # Halves are sorted already, which a stable sort of the joined blocks makes use of.
        block = order // (2 * width) * n
        merged = np.argsort(block + rank[order], kind="stable")
        order = order[merged]
        block = order // (2 * width)
        left = (order // width) % 2 == 0
        running = np.cumsum(np.where(left, weights[order], 0))
        start = np.searchsorted(block, block)
        passed = np.where(start > 0, running[start - 1], 0)
        sums[order] += np.where(left, 0, running - passed)
        width *= 2
    return sums


def bytes_to_hit(entries: np.ndarray, sizes: np.ndarray, batches: np.ndarray) -> np.ndarray:
    """The smallest LRU budget, in bytes, with which each lookup of a sequence of batches hits.

    It is the entry's own size and that of all different entries used after it, up to the batch
    that asks. Within a batch the one that was named later counts as used later.

    Args:
        entries: (n,) ids, distinct within a batch.
        sizes: (n,) bytes of each.
        batches: (n,) number of the batch, not falling.

    Returns (n,) bytes; -1 where an entry comes first, which hits with no budget at all.
    """
    n = len(entries)
    before = previous_use(entries)
    # Every batch asks for all its entries before it uses any: a sequence of 2n events.
    asks = np.arange(n) + np.searchsorted(batches, batches)
    uses = np.arange(n) + np.searchsorted(batches, batches, side="right")
    values, weights = np.empty(2 * n, np.int64), np.zeros(2 * n, np.int64)
    values[asks] = before
    values[uses] = before
    weights[uses] = sizes
    # What lies between has its own previous use at or before ours. Up to ours that is always so.
    total = np.r_[0, np.cumsum(sizes)]
    between = earlier_not_greater(values, weights)[asks] - total[before + 1]
    return np.where(before < 0, -1, between + sizes)
