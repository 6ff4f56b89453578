"""Policies that look at how long ago an entry was used: LRU, and LRU in two segments."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Generator

from labkit.policy.base import Cache, Entry


class LRU(Cache):
    """The entry that was used longest ago goes first."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self._sizes = self._order = OrderedDict[Entry, int]()

    def _use(self, entries: list[Entry]) -> None:
        move_to_end = self._order.move_to_end
        for entry in entries:
            move_to_end(entry)

    def _add(self, entries: list[Entry]) -> None:
        pass  # a new key of an ordered dict is its newest

    def _victims(self, kept: Collection[Entry]) -> Generator[Entry]:
        order = self._order
        while True:
            for entry in order:
                if entry not in kept:
                    break
            else:
                return
            yield entry  # the caller takes it out of the sizes, which are the order

    def _forget(self, entry: Entry) -> None:
        pass


class SegmentedLRU(Cache):
    """An entry must be used twice to count: a scan passes through and flushes nothing.

    New entries are on probation, from which the oldest goes first. A second use moves an entry to
    the protected segment, which holds at most `protected_share` of the budget; its oldest go back
    to probation. (Karedla, Love and Wherry, 1994.)
    """

    def __init__(self, budget_bytes: int, protected_share: float = 0.8) -> None:
        super().__init__(budget_bytes)
        self._limit = int(budget_bytes * protected_share)
        self._probation: OrderedDict[Entry, None] = OrderedDict()
        self._protected: OrderedDict[Entry, None] = OrderedDict()
        self._protected_bytes = 0

    def _use(self, entries: list[Entry]) -> None:
        protected = self._protected
        for entry in entries:
            if entry in protected:
                protected.move_to_end(entry)
            else:
                del self._probation[entry]
                protected[entry] = None
                self._protected_bytes += self._sizes[entry]
        while self._protected_bytes > self._limit:
            entry, _ = self._protected.popitem(last=False)
            self._protected_bytes -= self._sizes[entry]
            self._probation[entry] = None

    def _add(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._probation[entry] = None

    def _use_first(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._probation.move_to_end(entry)

    def _victims(self, kept: Collection[Entry]) -> Generator[Entry]:
        yield from _oldest(self._probation, kept)
        for entry in _oldest(self._protected, kept):
            self._protected_bytes -= self._sizes[entry]
            yield entry

    def _forget(self, entry: Entry) -> None:
        if entry in self._protected:
            del self._protected[entry]
            self._protected_bytes -= self._sizes[entry]
        else:
            del self._probation[entry]


def _oldest(order: OrderedDict[Entry, None], kept: Collection[Entry]) -> Generator[Entry]:
    """Take entries out of `order`, oldest first, but none of `kept`."""
    aside: list[Entry] = []
    try:
        while order:
            entry, _ = order.popitem(last=False)
            if entry in kept:
                aside.append(entry)
            else:
                yield entry
    finally:
        for entry in reversed(aside):
            order[entry] = None
            order.move_to_end(entry, last=False)
