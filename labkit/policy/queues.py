"""Policies of plain queues, cheap to keep: S3-FIFO, and a random choice as the baseline."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection

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
        self._small: OrderedDict[Entry, int] = OrderedDict()  # with the uses since it came
        self._main: OrderedDict[Entry, int] = OrderedDict()
        self._ghosts: OrderedDict[Entry, None] = OrderedDict()

    def _use(self, entries: list[Entry]) -> None:
        for entry in entries:
            queue = self._small if entry in self._small else self._main
            queue[entry] = min(queue[entry] + 1, _MOST)

    def _add(self, entries: list[Entry]) -> None:
        for entry in entries:
            if entry in self._ghosts:
                del self._ghosts[entry]
                self._main[entry] = 0
            else:
                self._small[entry] = 0
                self._small_bytes += self._sizes[entry]

    def _use_first(self, entries: list[Entry]) -> None:
        pass  # as new as if it had come with this use

    def _victim(self, kept: Collection[Entry]) -> Entry:
        while True:
            if self._small and (self._small_bytes > self._small_limit or not self._main):
                entry, uses = self._small.popitem(last=False)
                size = self._sizes[entry]
                self._small_bytes -= size
                if uses > 1 or entry in kept:
                    self._main[entry] = 0
                    continue
                self._ghosts[entry] = None
                if len(self._ghosts) > len(self._sizes):
                    self._ghosts.popitem(last=False)
                return entry
            entry, uses = self._main.popitem(last=False)
            if entry not in kept:
                if not uses:
                    return entry
                self._main[entry] = uses - 1
                continue
            self._main[entry] = uses
            if all(entry in kept for entry in self._main):
                # Only the small queue holds something that may go.
                entry = next(entry for entry in self._small if entry not in kept)
                self._forget(entry)
                return entry

    def _forget(self, entry: Entry) -> None:
        if entry in self._small:
            del self._small[entry]
            self._small_bytes -= self._sizes[entry]
        else:
            del self._main[entry]


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

    def _victim(self, kept: Collection[Entry]) -> Entry:
        while True:
            entry = self._entries[int(self._random() * len(self._entries))]
            if entry not in kept:
                self._forget(entry)
                return entry

    def _forget(self, entry: Entry) -> None:
        place, last = self._place.pop(entry), self._entries.pop()
        if last != entry:
            self._entries[place] = last
            self._place[last] = place
