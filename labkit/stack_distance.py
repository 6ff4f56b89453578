"""Stack distances: how much else was used since an entry was used last.

An LRU cache hits exactly where the distance fits in it, so one pass gives its hits for every
budget at once (Mattson et al., 1970). The sequence is cut into blocks: within a block a count of
earlier and smaller values, before it one sorted list of when each entry was used last. So time
grows with the length of the sequence, and little memory is needed beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_BLOCK = 2**15  # lookups: what the passes over a block touch stays in the processor's cache


def stack_distance(
    entries: np.ndarray, sizes: np.ndarray | None = None, batches: np.ndarray | None = None
) -> np.ndarray:
    """The total size of all different entries used between each use of an entry and its last one.

    Args:
        entries: (n,) ids, not below 0, in the order of their use; distinct within a batch.
        sizes: (n,) of each, the same whenever an entry is named; default 1.
        batches: (n,) number of the batch, not falling; default: each is a batch of its own. A batch
            asks for all its entries before it uses any, and then uses them in their order.

    Returns (n,) int64; -1 where an entry comes first.
    """
    n = len(entries)
    sizes = np.ones(n, np.int64) if sizes is None else np.asarray(sizes, np.int64)
    asks = np.arange(n) if batches is None else _first_of_batch(batches)
    names, ids = np.unique(entries, return_inverse=True)
    last = np.full(len(names), -1)  # use of each entry before the block
    weight = np.zeros(len(names), np.int64)
    result = np.full(n, -1)
    for start, stop in _blocks(asks, n):
        own, size, ask = ids[start:stop], sizes[start:stop], asks[start:stop]
        before = _previous(own, last, start)
        used = np.r_[0, np.cumsum(size)]
        # Of what the block used in between, count each entry where it came first: there its own
        # previous use lies at or before ours. Up to our previous use that is always so.
        inside = earlier_not_greater(before, size) - _earlier_in_batch(before, size, ask - start)
        inside -= used[np.maximum(before + 1 - start, 0)]
        # And what was used before the block, after our previous use, and not yet again.
        order = np.argsort(last, kind="stable")
        after = np.r_[np.cumsum(weight[order][::-1])[::-1], 0]
        outside = after[np.searchsorted(last[order], before, side="right")]
        result[start:stop] = np.where(before < 0, -1, inside + outside)
        last[own] = np.arange(start, stop)
        weight[own] = size
    return result


def earlier_not_greater(values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """For each place i, the sum of weights (default 1) of the j < i with values[j] <= values[i].

    The ranks of the values are compared bit by bit, the highest first (a wavelet tree): where ranks
    agree so far, one with a 1 is greater than those with a 0. Equal values rank in their order.
    """
    n = len(values)
    weights = np.ones(n, np.int64) if weights is None else np.asarray(weights, np.int64)
    rank = np.empty(n, np.int64)
    rank[np.argsort(values, kind="stable")] = np.arange(n)
    place, sums = np.arange(n), np.zeros(n, np.int64)
    for bit in reversed(range(max(n - 1, 0).bit_length())):
        # Ranks that agree above the bit stand together, in the order of their places.
        upper = (rank >> bit & 1).astype(bool)
        start = rank >> (bit + 1) << (bit + 1)
        lower_weight = np.r_[0, np.cumsum(np.where(upper, 0, weights))]
        sums += np.where(upper, lower_weight[:-1] - lower_weight[start], 0)
        lowers = np.cumsum(~upper)
        lowers_before = lowers - ~upper - np.r_[0, lowers][start]
        middle = np.minimum(start + (1 << bit), n)
        here = np.arange(n)
        goes = np.where(upper, middle + here - start - lowers_before, start + lowers_before)
        moved = np.empty(n, np.int64)
        moved[goes] = here
        rank, place, weights, sums = rank[moved], place[moved], weights[moved], sums[moved]
    result = np.empty(n, np.int64)
    result[place] = sums
    return result


def _first_of_batch(batches: np.ndarray) -> np.ndarray:
    """For each place, where its batch begins."""
    starts = np.flatnonzero(np.diff(batches, prepend=batches[:1] - 1))
    return np.repeat(starts, np.diff(np.r_[starts, len(batches)]))


def _blocks(asks: np.ndarray, n: int) -> Iterator[tuple[int, int]]:
    """Ranges of about `_BLOCK` places that cut no batch."""
    start = 0
    while start < n:
        stop = start + _BLOCK
        if stop < n and (begin := int(asks[stop])) < stop:
            # The block ends with a batch: this one, if it began with the block.
            stop = begin if begin > start else int(np.searchsorted(asks, begin, side="right"))
        yield start, min(stop, n)
        start = stop


def _previous(ids: np.ndarray, last: np.ndarray, start: int) -> np.ndarray:
    """The place of each id's last earlier use, in the block that begins at `start` or before it."""
    order = np.argsort(ids, kind="stable")
    same = np.r_[False, ids[order][1:] == ids[order][:-1]]
    before = last[ids]
    again = np.flatnonzero(same)
    before[order[again]] = order[again - 1] + start
    return before


def _earlier_in_batch(before: np.ndarray, sizes: np.ndarray, asks: np.ndarray) -> np.ndarray:
    """For each place, the sizes of its batch's earlier entries whose last use was not later."""
    result = np.zeros(len(before), np.int64)
    starts = np.flatnonzero(np.diff(asks, prepend=-1))
    lengths = np.diff(np.r_[starts, len(asks)])
    for length in np.unique(lengths[lengths > 1]).tolist():
        places = starts[lengths == length][:, None] + np.arange(length)
        own, size = before[places], sizes[places]
        for here in range(1, length):
            counts = own[:, :here] <= own[:, here, None]
            result[places[:, here]] = np.where(counts, size[:, :here], 0).sum(axis=1)
    return result
