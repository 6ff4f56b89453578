"""Policies that drop the entry of lowest rank: LFU, LRFU, and the optimum that knows the future."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import Any

from labkit.policy.base import Cache, Entry

_CLOCK = 2**48 - 1  # the low bits of a rank: when the entry was used last
_MOST_DOUBLINGS = 500  # of a weight before all are scaled back, far from what a float holds


class LFU(Cache):
    """The entry with the fewest uses goes first; among equals the one used longest ago.

    Uses are counted from the start and survive an eviction, so a new entry does not lose its past.
    """

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self._rank: dict[Entry, Any] = {}  # uses, then the time of the last one, in one number
        self._heap: list[tuple[Any, Entry]] = []  # ranks as they were when the entry was pushed
        self._clock = 0

    def _count(self, entries: list[Entry]) -> None:
        rank, clock = self._rank, self._clock
        for entry in entries:
            clock += 1
            rank[entry] = (rank.get(entry, 0) | _CLOCK) + 1 + clock  # one use more, and now
        self._clock = clock

    _use = _count

    def _add(self, entries: list[Entry]) -> None:
        self._count(entries)
        for entry in entries:
            heapq.heappush(self._heap, (self._rank[entry], entry))

    def _admit(self, entries: list[Entry]) -> None:
        for entry in entries:
            heapq.heappush(self._heap, (self._rank.setdefault(entry, 0), entry))

    def _victim(self, kept: Collection[Entry]) -> Entry:
        # A rank only grows, so one that is out of date is corrected when it comes to the top.
        heap, rank, sizes = self._heap, self._rank, self._sizes
        aside = []
        while True:
            known, entry = heap[0]
            if entry not in sizes:
                heapq.heappop(heap)
            elif known != rank[entry]:
                heapq.heapreplace(heap, (rank[entry], entry))
            elif entry in kept:
                aside.append(heapq.heappop(heap))
            else:
                heapq.heappop(heap)
                break
        for item in aside:
            heapq.heappush(heap, item)
        return entry

    def _forget(self, entry: Entry) -> None:
        self._heap = [item for item in self._heap if item[1] != entry]
        heapq.heapify(self._heap)


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
            self._heap = [(self._rank[entry], entry) for entry in self._sizes]
            heapq.heapify(self._heap)
            self._doublings += doublings
            doublings = 0.0
        self._weight = 2.0**doublings

    def _count(self, entries: list[Entry]) -> None:
        rank, weight = self._rank, self._weight
        for entry in entries:
            rank[entry] = rank.get(entry, 0.0) + weight

    _use = _count


class Belady(Cache):
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
        self._wanted: Sequence[Entry] = ()
        self._next: dict[Entry, int] = {}
        self._heap: list[tuple[int, Entry]] = []

    def _begin(self, wanted: Sequence[Entry]) -> None:
        self._batch += 1
        if self._batch >= len(self._next_uses):
            raise ValueError(f"batch {self._batch} is not in the future that Belady was given")
        self._wanted = wanted

    def _note(self, entries: list[Entry]) -> None:
        """Learn the next use of what was just used."""
        heap, coming = self._heap, self._next
        coming.update(zip(self._wanted, self._next_uses[self._batch], strict=True))
        for entry in entries:
            heapq.heappush(heap, (-coming[entry], entry))
        if len(heap) > 4 * len(self._sizes) + 1000:
            # Uses that have passed would pile up below the ones to come.
            self._heap = [(-coming[entry], entry) for entry in self._sizes]
            heapq.heapify(self._heap)

    _use = _note
    _add = _note

    def _admit(self, entries: list[Entry]) -> None:
        for entry in entries:  # what has never been used may be needed at once
            heapq.heappush(self._heap, (-self._next.setdefault(entry, self._batch), entry))

    def _victim(self, kept: Collection[Entry]) -> Entry:
        heap, coming, sizes = self._heap, self._next, self._sizes
        aside = []
        while True:
            item = heapq.heappop(heap)
            entry = item[1]
            if entry in kept:
                aside.append(item)
            elif entry in sizes and coming[entry] == -item[0]:
                break
        for item in aside:
            heapq.heappush(heap, item)
        return entry

    def _forget(self, entry: Entry) -> None:
        self._heap = [item for item in self._heap if item[1] != entry]
        heapq.heapify(self._heap)


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
