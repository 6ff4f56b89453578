"""Cache policies: which expert entries stay when a layer asks for more than the budget holds.

A policy does the bookkeeping only, in bytes, and knows no file and no memory. So one
implementation serves the live `ExpertStreamSource` and the replay of a trace alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

Entry = tuple[int, int]
"""(layer, expert): the unit that a cache holds, with all its projections."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What one batch of one layer found: entries already there, to be read, and to be dropped."""

    hits: list[Entry]
    misses: list[Entry]
    evicted: list[Entry]


class CachePolicy(Protocol):
    """The bookkeeping of a cache of expert entries."""

    budget_bytes: int
    resident_bytes: int

    def request(self, layer: int, experts: Iterable[int], entry_bytes: int) -> Lookup:
        """Look up the distinct `experts` of one layer's batch, each of `entry_bytes`.

        On return the misses count as resident and the evicted entries do not. Entries of this
        batch are never evicted, so a batch larger than the budget exceeds it until the next one.
        """
        ...

    def discard(self, entry: Entry) -> None:
        """Forget an entry whose bytes never arrived."""
        ...

    def __contains__(self, entry: Entry) -> bool: ...


class LRU:
    """The entry that was used longest ago goes first. A budget of 0 keeps nothing at all."""

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"a cache budget of {budget_bytes} bytes is negative")
        self.budget_bytes = budget_bytes
        self.resident_bytes = 0
        self._sizes: OrderedDict[Entry, int] = OrderedDict()

    def request(self, layer: int, experts: Iterable[int], entry_bytes: int) -> Lookup:
        """See `CachePolicy.request`."""
        wanted = [(layer, expert) for expert in dict.fromkeys(experts)]
        # What an earlier batch held beyond the budget goes before this one looks.
        evicted = self._make_room(0)
        hits = [entry for entry in wanted if entry in self._sizes]
        misses = [entry for entry in wanted if entry not in self._sizes]
        for entry in hits:
            self._sizes.move_to_end(entry)
        evicted += self._make_room(len(misses) * entry_bytes, keep=len(hits))
        for entry in misses:
            self._sizes[entry] = entry_bytes
        self.resident_bytes += len(misses) * entry_bytes
        return Lookup(hits, misses, evicted)

    def discard(self, entry: Entry) -> None:
        """See `CachePolicy.discard`."""
        self.resident_bytes -= self._sizes.pop(entry, 0)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def _make_room(self, nbytes: int, keep: int = 0) -> list[Entry]:
        """Drop the oldest entries until `nbytes` more fit, but not the newest `keep`."""
        evicted = []
        while self.resident_bytes + nbytes > self.budget_bytes and len(self._sizes) > keep:
            entry, size = self._sizes.popitem(last=False)
            self.resident_bytes -= size
            evicted.append(entry)
        return evicted
