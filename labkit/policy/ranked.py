"""The cache that drops the entry of lowest rank, and what its rankings share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from labkit.policy.base import Cache, Entry

Rank = tuple[float, Entry]
"""What an entry is worth, with its name: one tuple for as long as the rank stands."""


class EntryRanking(ABC):
    """A `Ranking` that gives each entry a rank, also when no cache holds it.

    Attributes:
        ranks: of every entry that was asked for.
    """

    def __init__(self) -> None:
        self.ranks: dict[Entry, Rank] = {}

    @abstractmethod
    def learn(self, wanted: Sequence[Entry], choices: Sequence[int] = ()) -> None:
        """See `Ranking.learn`."""

    @abstractmethod
    def unasked(self) -> float:
        """The rank of an entry that nobody has asked for."""


class Ranked(Cache):
    """The entry of the lowest rank goes first; a heap finds it.

    A rank may grow unseen by the heap, which is put right when the entry comes to its top; when one
    falls, the entry is pushed again.

    Args:
        ranking: of this cache alone, or with `shared` that of several.
    """

    def __init__(self, budget_bytes: int, ranking: EntryRanking, *, shared: bool) -> None:
        super().__init__(budget_bytes)
        self._own_ranking = None if shared else ranking
        self._ranking = ranking
        self._ranks = ranking.ranks
        self._heap: list[Rank] = []

    def _use(self, entries: list[Entry]) -> None:
        pass  # the ranking knows

    def _add(self, entries: list[Entry]) -> None:
        self._push(entries)

    def _admit(self, entries: list[Entry]) -> None:
        for entry in entries:
            if entry not in self._ranks:
                self._ranks[entry] = (self._ranking.unasked(), entry)
        self._push(entries)

    def _push(self, entries: Iterable[Entry]) -> None:
        heap, ranks = self._heap, self._ranks
        for entry in entries:
            heappush(heap, ranks[entry])

    def _victims(self, kept: Collection[Entry]) -> Generator[Entry]:
        heap, ranks, sizes = self._heap, self._ranks, self._sizes
        aside: list[Rank] = []
        try:
            while True:
                top = heap[0]
                entry = top[1]
                if entry not in sizes:
                    heappop(heap)
                elif top is not ranks[entry]:
                    heapreplace(heap, ranks[entry])
                elif entry in kept:
                    aside.append(heappop(heap))
                else:
                    heappop(heap)
                    yield entry
        finally:
            for rank in aside:
                heappush(heap, rank)

    def _forget(self, entry: Entry) -> None:
        self._rebuild(without=entry)

    def _rebuild(self, without: Entry | None = None) -> None:
        """Make the heap anew, with each resident entry once."""
        self._heap = [self._ranks[entry] for entry in self._sizes if entry != without]
        heapify(self._heap)
