"""Policies of plain queues, cheap to keep: S3-FIFO, and a random choice as the baseline."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Collection, Generator

from labkit.policy.base import Cache, Entry

_MOST = 3  # uses that S3-FIFO counts


class S3FIFO(Cache):
    """Three first-in-first-out queues (Yang et al., 2023).

    New entries enter a small queue of a tenth of the budget. What was used twice by the time it
    gets to its end moves to the main queue; the rest goes, and its name is remembered: if it
    returns soon, it enters the main queue at once. In the main queue every use buys another round.
    """

    def __init__(self, budget_bytes: int, small_share: float = 0.1) -> None:
        super().__init__(budget_bytes)
        self._small_limit = int(budget_bytes * small_share)
        self._small_bytes = 0
        self._small: deque[Entry] = deque()
        self._main: deque[Entry] = deque()
        self._uses: dict[Entry, int] = {}  # since it came to its queue, at most `_MOST`
        self._ghosts: OrderedDict[Entry, None] = OrderedDict()

    def _use(self, entries: list[Entry]) -> None:
        uses = self._uses
        for entry in entries:
            if (used := uses[entry]) < _MOST:
                uses[entry] = used + 1

    def _add(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._uses[entry] = 0
            if entry in self._ghosts:
                del self._ghosts[entry]
                self._main.append(entry)
            else:
                self._small.append(entry)
                self._small_bytes += self._sizes[entry]

    def _use_first(self, entries: list[Entry]) -> None:
        pass  # as new as if it had come with this use

    def _victims(self, kept: Collection[Entry]) -> Generator[Entry]:
        small, main, uses, sizes = self._small, self._main, self._uses, self._sizes
        spared = 0  # of the main queue, one after the other, because they are kept
        while True:
            if small and (self._small_bytes > self._small_limit or spared == len(main)):
                entry = small.popleft()
                self._small_bytes -= sizes[entry]
                if uses[entry] > 1 or entry in kept:
                    uses[entry] = 0
                    main.append(entry)
                    continue
                self._ghosts[entry] = None
                if len(self._ghosts) > len(sizes):
                    self._ghosts.popitem(last=False)
            else:
                entry = main.popleft()
                if entry in kept:
                    spared += 1
                    main.append(entry)
                    continue
                if uses[entry]:
                    spared = 0
                    uses[entry] -= 1
                    main.append(entry)
                    continue
            del uses[entry]
            yield entry

    def _forget(self, entry: Entry) -> None:
        del self._uses[entry]
        if entry in self._small:
            self._small.remove(entry)
            self._small_bytes -= self._sizes[entry]
        else:
            self._main.remove(entry)


class Random(Cache):
    """Any entry goes, each as likely as the next; `seed` fixes which."""

    def __init__(self, budget_bytes: int, seed: int = 0) -> None:
        super().__init__(budget_bytes)
        self._random = random.Random(seed).random
        self._entries: list[Entry] = []
        self._place: dict[Entry, int] = {}

    def _use(self, entries: list[Entry]) -> None:
        pass

    def _add(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._place[entry] = len(self._entries)
            self._entries.append(entry)

    def _victims(self, kept: Collection[Entry]) -> Generator[Entry]:
        while True:
            entry = self._entries[int(self._random() * len(self._entries))]
            if entry not in kept:
                self._forget(entry)
                yield entry

    def _forget(self, entry: Entry) -> None:
        place, last = self._place.pop(entry), self._entries.pop()
        if last != entry:
            self._entries[place] = last
            self._place[last] = place
