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

    def admit(
        self, wanted: Sequence[Entry], entry_bytes: int, keep: Collection[Entry] = ()
    ) -> Lookup:
        """Bring in distinct entries of one layer ahead of their use, which this is not.

        They take the place of what the policy would drop, but of none of `keep` (what is in use),
        of `wanted`, or of what was brought in before and still awaits its layer. The budget holds:
        as many come in, in their order, as fit then. `hits` are those already there, `misses` those
        that now count as resident; the others appear nowhere.
        """
        ...

    def discard(self, entry: Entry) -> None:
        """Forget an entry whose bytes never arrived."""
        ...

    def evict(self) -> Entry | None:
        """Drop the entry that would go next; None when there is none."""
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
        self._unused: set[Entry] = set()  # admitted, and not used since
        self._awaited: set[Entry] = set()  # those of them whose layer has not asked since

    def request(self, layer: int, experts: Iterable[int], entry_bytes: int) -> Lookup:
        """See `CachePolicy.request`."""
        return self.lookup([(layer, expert) for expert in dict.fromkeys(experts)], entry_bytes)

    def lookup(self, wanted: Sequence[Entry], entry_bytes: int) -> Lookup:
        """See `CachePolicy.lookup`."""
        sizes = self._sizes
        self._begin(wanted)
        # What an earlier batch held beyond the budget goes before this one looks.
        over = self.resident_bytes > self.budget_bytes
        evicted = self._make_room(self.budget_bytes, []) if over else []
        hits = [entry for entry in wanted if entry in sizes]
        if self._unused and wanted:
            self._meet(wanted[0][0], hits)
        elif hits:
            self._use(hits)
        if len(hits) == len(wanted):
            return Lookup(hits, [], evicted)
        misses = [entry for entry in wanted if entry not in sizes]
        nbytes = len(misses) * entry_bytes
        if self.resident_bytes + nbytes > self.budget_bytes:
            evicted += self._make_room(self.budget_bytes - nbytes, hits)
        for entry in misses:
            sizes[entry] = entry_bytes
        self.resident_bytes += nbytes
        self._add(misses)
        return Lookup(hits, misses, evicted)

    def admit(
        self, wanted: Sequence[Entry], entry_bytes: int, keep: Collection[Entry] = ()
    ) -> Lookup:
        """See `CachePolicy.admit`."""
        return self.admit_within(self.budget_bytes, wanted, entry_bytes, keep)

    def admit_within(
        self, limit: int, wanted: Sequence[Entry], entry_bytes: int, keep: Collection[Entry]
    ) -> Lookup:
        """`admit` with at most `limit` bytes resident afterwards, or what was before."""
        sizes = self._sizes
        hits = [entry for entry in wanted if entry in sizes]
        kept = {entry for entry in keep if entry in sizes}.union(hits, self._awaited)
        room = limit - sum(sizes[entry] for entry in kept)
        new = [entry for entry in wanted if entry not in sizes][: max(room // entry_bytes, 0)]
        if not new:
            return Lookup(hits, [], [])
        evicted = self._shrink(limit - len(new) * entry_bytes, kept)
        for entry in new:
            sizes[entry] = entry_bytes
        self.resident_bytes += len(new) * entry_bytes
        self._admit(new)
        self._unused.update(new)
        self._awaited.update(new)
        return Lookup(hits, new, evicted)

    def discard(self, entry: Entry) -> None:
        """See `CachePolicy.discard`."""
        if entry in self._sizes:
            self._forget(entry)
            self.resident_bytes -= self._sizes.pop(entry)
            self._unused.discard(entry)
            self._awaited.discard(entry)

    def evict(self) -> Entry | None:
        """See `CachePolicy.evict`."""
        dropped = self._shrink(self.resident_bytes - 1, ())
        return dropped[0] if dropped else None

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def _meet(self, layer: int, hits: list[Entry]) -> None:
        """Count the uses of a batch of `layer`, for which some entries were admitted ahead."""
        used = [entry for entry in hits if entry not in self._unused]
        if used:
            self._use(used)
        if len(used) < len(hits):
            first = [entry for entry in hits if entry in self._unused]
            self._use_first(first)
            self._unused.difference_update(first)
        self._awaited = {entry for entry in self._awaited if entry[0] != layer}

    def _make_room(self, limit: int, kept: list[Entry]) -> list[Entry]:
        """`_shrink`, dropping what awaits its layer only when nothing else is left."""
        if not self._awaited:
            return self._shrink(limit, kept)
        evicted = self._shrink(limit, self._awaited.union(kept))
        return evicted + self._shrink(limit, kept)

    def _shrink(self, limit: int, kept: Collection[Entry]) -> list[Entry]:
        """Drop entries, but none of `kept`, until at most `limit` bytes are resident."""
        evicted = []
        resident, sizes = self.resident_bytes, self._sizes
        while resident > limit and len(sizes) > len(kept):
            entry = self._victim(kept)
            resident -= sizes.pop(entry)
            evicted.append(entry)
        self.resident_bytes = resident
        if self._unused:
            self._unused.difference_update(evicted)
            self._awaited.difference_update(evicted)
        return evicted

    def _begin(self, wanted: Sequence[Entry]) -> None:  # noqa: B027 - most need not know
        """A batch asks for `wanted`; called before anything else happens."""

    @abstractmethod
    def _use(self, entries: list[Entry]) -> None:
        """Entries of the batch that were resident."""

    @abstractmethod
    def _add(self, entries: list[Entry]) -> None:
        """Entries of the batch that were not resident and now are."""

    def _admit(self, entries: list[Entry]) -> None:
        """Entries that were brought in ahead of any use."""
        self._add(entries)

    def _use_first(self, entries: list[Entry]) -> None:
        """Entries of the batch that were admitted ahead of it and are used for the first time."""
        self._use(entries)

    @abstractmethod
    def _victim(self, kept: Collection[Entry]) -> Entry:
        """The entry to drop next; it exists, and is taken out of the policy's own order."""

    @abstractmethod
    def _forget(self, entry: Entry) -> None:
        """Take an entry, whose size is still known, out of the policy's own order."""
