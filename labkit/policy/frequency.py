"""Policies that drop the entry of lowest rank: LFU, LRFU, and the optimum that knows the future."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from labkit.policy.base import Cache, Entry

_CLOCK = 2**48 - 1  # the low bits of LFU's rank: when the entry was used last
_MOST_DOUBLINGS = 500  # of a weight before all are scaled back, far from what a float holds


class _Ranked(Cache):
    """The entry of the lowest rank goes first; a heap finds it.

    A subclass keeps `_rank`, also of what is not resident. A rank may grow unseen by the heap,
    which is put right when the entry comes to its top; when one falls, the entry is pushed again.
    """

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self._rank: dict[Entry, Any] = {}
        self._heap: list[tuple[Any, Entry]] = []

    def _push(self, entries: Iterable[Entry]) -> None:
        heap, rank = self._heap, self._rank
        for entry in entries:
            heapq.heappush(heap, (rank[entry], entry))

    def _victim(self, kept: Collection[Entry]) -> Entry:
        heap, rank, sizes = self._heap, self._rank, self._sizes
        aside = []
        while True:
            known, entry = heap[0]
            now = rank[entry]
            if known < now and entry in sizes:
                heapq.heapreplace(heap, (now, entry))
                continue
            heapq.heappop(heap)
            if entry in kept:
                aside.append(entry)
            elif known == now and entry in sizes:  # else it has gone, or was pushed again since
                break
        if aside:
            self._push(aside)
        return entry

    def _forget(self, entry: Entry) -> None:
        self._rebuild(without=entry)

    def _rebuild(self, without: Entry | None = None) -> None:
        """Make the heap anew, with each resident entry once."""
        self._heap = [(self._rank[entry], entry) for entry in self._sizes if entry != without]
        heapq.heapify(self._heap)


class LFU(_Ranked):
    """The entry with the fewest uses goes first; among equals the one used longest ago.

    Uses are counted from the start and survive an eviction, so a new entry does not lose its past.
    """

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self._clock = 0

    def _count(self, entries: list[Entry]) -> None:
        rank, clock = self._rank, self._clock
        for entry in entries:
            clock += 1
            # Uses, and below them the time of the last one, in one number: one use more, and now.
            rank[entry] = (rank.get(entry, 0) | _CLOCK) + 1 + clock
        self._clock = clock

    _use = _count

    def _add(self, entries: list[Entry]) -> None:
        self._count(entries)
        self._push(entries)

    def _admit(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._rank.setdefault(entry, 0)
        self._push(entries)


class LRFU(LFU):
    """Uses count, but fade: each is worth half after `half_life` more tokens (Lee et al., 2001).

    Time is counted in batches of the entry's own layer, which is in tokens, and a prompt is one of
    them: however long, it weighs no more than a generated token. The default was chosen on traces
    of the bundled model, whose texts change often.
    """

    def __init__(self, budget_bytes: int, half_life: float = 8.0) -> None:
        super().__init__(budget_bytes)
        self._half_life = half_life
        self._batches: dict[int, int] = {}
        self._weight = 1.0  # of a use in this batch: older uses fade because newer ones weigh more
        self._doublings = 0.0  # taken out of all weights so far

    def _begin(self, wanted: Sequence[Entry]) -> None:
        if not wanted:
            return
        layer = wanted[0][0]
        age = self._batches[layer] = self._batches.get(layer, 0) + 1
        doublings = age / self._half_life - self._doublings
        if doublings > _MOST_DOUBLINGS:
            scale = 2.0**-doublings
            self._rank = {entry: rank * scale for entry, rank in self._rank.items()}
            self._rebuild()
            self._doublings += doublings
            doublings = 0.0
        self._weight = 2.0**doublings

    def _count(self, entries: list[Entry]) -> None:
        rank, weight = self._rank, self._weight
        for entry in entries:
            rank[entry] = rank.get(entry, 0.0) + weight

    _use = _count


class Belady(_Ranked):
    """The optimum: what is needed again last goes first. It must know the future, so it is offline.

    No policy hits more when all entries are of one size (Belady, 1966). With sizes that differ
    the true optimum is hard to find; this one still ranks by time alone.

    Args:
        next_uses: for every batch to come, for each of its distinct entries, the number of the
            next batch that wants it, or any larger number if none does. See `next_uses`.
    """

    def __init__(self, budget_bytes: int, next_uses: Sequence[Sequence[int]]) -> None:
        super().__init__(budget_bytes)
        self._next_uses = next_uses
        self._batch = -1

    def _begin(self, wanted: Sequence[Entry]) -> None:
        self._batch += 1
        if self._batch >= len(self._next_uses):
            raise ValueError(f"batch {self._batch} is not in the future that Belady was given")
        coming = self._next_uses[self._batch]
        self._rank.update(zip(wanted, map(operator.neg, coming), strict=True))
        self._push([entry for entry in wanted if entry in self._sizes])
        if len(self._heap) > 4 * len(self._sizes) + 1000:
            self._rebuild()  # uses that have passed would pile up below the ones to come

    def _use(self, entries: list[Entry]) -> None:
        pass

    def _add(self, entries: list[Entry]) -> None:
        self._push(entries)

    def _admit(self, entries: list[Entry]) -> None:
        for entry in entries:  # what has never been used may be needed at once
            self._rank.setdefault(entry, -self._batch)
        self._push(entries)


def next_uses(batches: Sequence[Sequence[Entry]]) -> list[list[int]]:
    """For each batch and each of its entries, the number of the next batch that wants it.

    An entry that no later batch wants gets the number of batches.
    """
    coming: dict[Entry, int] = {}
    never = len(batches)
    result: list[list[int]] = [[]] * never
    for number in range(never - 1, -1, -1):
        wanted = batches[number]
        result[number] = [coming.get(entry, never) for entry in wanted]
        for entry in wanted:
            coming[entry] = number
    return result
