"""Policies that look at how long ago an entry was used: LRU, and LRU in two segments."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from labkit.policy.base import Cache, Entry


class LRU(Cache):
    """The entry that was used longest ago goes first."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self._order: OrderedDict[Entry, int] = OrderedDict()
        self._sizes = self._order

    def _use(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._order.move_to_end(entry)

    def _add(self, entries: list[Entry]) -> None:
        pass  # a new key of an ordered dict is its newest

    def _victim(self, kept: Collection[Entry]) -> Entry:
        for entry in self._order:
            if entry not in kept:
                return entry
        raise AssertionError("more entries than are kept, so one can go")

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
        for entry in entries:
            if entry in self._protected:
                self._protected.move_to_end(entry)
            else:
                del self._probation[entry]
                self._protected[entry] = None
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

    def _victim(self, kept: Collection[Entry]) -> Entry:
        for segment in (self._probation, self._protected):
            for entry in segment:
                if entry not in kept:
                    self._forget(entry)
                    return entry
        raise AssertionError("more entries than the batch keeps, so one can go")

    def _forget(self, entry: Entry) -> None:
        if entry in self._protected:
            del self._protected[entry]
            self._protected_bytes -= self._sizes[entry]
        else:
            del self._probation[entry]
