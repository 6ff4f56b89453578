"""What every cache policy shares: the bookkeeping in bytes, and the rules of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

Entry = tuple[int, int]
"""(layer, expert): the unit that a cache holds, with all its projections."""


class Lookup(NamedTuple):
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

    def lookup(self, wanted: Sequence[Entry], entry_bytes: int) -> Lookup:
        """`request` for entries of one layer that are already distinct."""
        ...

    def discard(self, entry: Entry) -> None:
        """Forget an entry whose bytes never arrived."""
        ...

    def __contains__(self, entry: Entry) -> bool: ...


class Cache(ABC):
    """A cache with everything but an opinion on what goes first.

    A subclass says what a use means (`_use`), what a new entry means (`_add`) and which entry goes
    (`_victim`). A budget of 0 keeps nothing at all.

    Raises:
        ValueError: the budget is negative.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"a cache budget of {budget_bytes} bytes is negative")
        self.budget_bytes = budget_bytes
        self.resident_bytes = 0
        self._sizes: dict[Entry, int] = {}

    def request(self, layer: int, experts: Iterable[int], entry_bytes: int) -> Lookup:
        """See `CachePolicy.request`."""
        return self.lookup([(layer, expert) for expert in dict.fromkeys(experts)], entry_bytes)

    def lookup(self, wanted: Sequence[Entry], entry_bytes: int) -> Lookup:
        """See `CachePolicy.lookup`."""
        sizes = self._sizes
        self._begin(wanted)
        # What an earlier batch held beyond the budget goes before this one looks.
        over = self.resident_bytes > self.budget_bytes
        evicted = self._shrink(self.budget_bytes, ()) if over else []
        hits = [entry for entry in wanted if entry in sizes]
        if hits:
            self._use(hits)
        if len(hits) == len(wanted):
            return Lookup(hits, [], evicted)
        misses = [entry for entry in wanted if entry not in sizes]
        nbytes = len(misses) * entry_bytes
        if self.resident_bytes + nbytes > self.budget_bytes:
            evicted += self._shrink(self.budget_bytes - nbytes, hits)
        for entry in misses:
            sizes[entry] = entry_bytes
        self.resident_bytes += nbytes
        self._add(misses)
        return Lookup(hits, misses, evicted)

    def discard(self, entry: Entry) -> None:
        """See `CachePolicy.discard`."""
        if entry in self._sizes:
            self._forget(entry)
            self.resident_bytes -= self._sizes.pop(entry)

    def evict(self) -> Entry | None:
        """Drop the entry that the policy would drop next; None when there is none."""
        dropped = self._shrink(self.resident_bytes - 1, ())
        return dropped[0] if dropped else None

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def _shrink(self, limit: int, kept: Collection[Entry]) -> list[Entry]:
        """Drop entries, but none of `kept`, until at most `limit` bytes are resident."""
        evicted = []
        resident, sizes = self.resident_bytes, self._sizes
        while resident > limit and len(sizes) > len(kept):
            entry = self._victim(kept)
            resident -= sizes.pop(entry)
            evicted.append(entry)
        self.resident_bytes = resident
        return evicted

    def _begin(self, wanted: Sequence[Entry]) -> None:  # noqa: B027 - most need not know
        """A batch asks for `wanted`; called before anything else happens."""

    @abstractmethod
    def _use(self, entries: list[Entry]) -> None:
        """Entries of the batch that were resident."""

    @abstractmethod
    def _add(self, entries: list[Entry]) -> None:
        """Entries of the batch that were not resident and now are."""

    @abstractmethod
    def _victim(self, kept: Collection[Entry]) -> Entry:
        """The entry to drop next; it exists, and is taken out of the policy's own order."""

    @abstractmethod
    def _forget(self, entry: Entry) -> None:
        """Take an entry, whose size is still known, out of the policy's own order."""
