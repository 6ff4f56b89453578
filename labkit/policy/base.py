"""What every cache policy shares: the bookkeeping in bytes, and the rules of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Sequence
from typing import NamedTuple, Protocol

from labkit.errors import OptionError

Entry = tuple[int, int]
"""(layer, expert): the unit that a cache holds, with all its projections."""


_tuple = tuple.__new__  # half the time of a named tuple's own constructor


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

    def is_over(self, layer: int) -> bool:
        """Whether the next request of `layer` drops entries even if it finds all it asks for."""
        ...

    def __contains__(self, entry: Entry) -> bool: ...


class Ranking(Protocol):
    """An opinion on entries that hangs on what was asked for, and not on what a cache holds.

    So the caches of all budgets may share one. Whoever shares it teaches it: `learn` comes once
    before the lookups of each batch. A cache with a ranking of its own does that itself.
    """

    def learn(self, wanted: Sequence[Entry], choices: Sequence[int] = ()) -> None:
        """A batch asks for `wanted`, distinct entries of one layer.

        `choices` are the experts of each of its tokens, token by token, if there are several.
        """
        ...


class EntryNames(dict[int, dict[int, Entry]]):
    """The one tuple of each entry, by layer and expert: what is the same object is found sooner."""

    def __missing__(self, layer: int) -> dict[int, Entry]:
        self[layer] = names = _LayerNames()
        names.layer = layer
        return names

    def of(self, layer: int, experts: Iterable[int]) -> list[Entry]:
        """The distinct entries of one layer, in the order named."""
        return list(map(self[layer].__getitem__, dict.fromkeys(experts)))


class _LayerNames(dict[int, Entry]):
    layer: int

    def __missing__(self, expert: int) -> Entry:
        self[expert] = entry = (self.layer, expert)
        return entry


class Cache(ABC):
    """A cache with everything but an opinion on what goes first.

    A subclass says what a use means (`_use`), what a new entry means (`_add`) and which entries go
    (`_victims`). A budget of 0 keeps nothing at all.

    Raises:
        OptionError: the budget is negative.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise OptionError(f"a cache budget of {budget_bytes} bytes is negative")
        self.budget_bytes = budget_bytes
        self.resident_bytes = 0
        self._sizes: dict[Entry, int] = {}
        self._names = EntryNames()
        self._own_ranking: Ranking | None = None  # which nobody else teaches
        self._choices: Sequence[int] = ()  # of the batch's tokens, for the ranking
        self._unused: set[Entry] = set()  # admitted, and not used since
        self._awaited: set[Entry] = set()  # those of them whose layer has not asked since

    def request(self, layer: int, experts: Iterable[int], entry_bytes: int) -> Lookup:
        """See `CachePolicy.request`."""
        return self.lookup(self._names.of(layer, experts), entry_bytes)

    def lookup(self, wanted: Sequence[Entry], entry_bytes: int) -> Lookup:
        """See `CachePolicy.lookup`."""
        if self._own_ranking and wanted:
            self._own_ranking.learn(wanted, self._choices)
        # What an earlier batch held beyond the budget goes before this one looks.
        over = self.resident_bytes > self.budget_bytes
        evicted = self._make_room(self.budget_bytes, ()) if over else []
        sizes = self._sizes
        hits = [entry for entry in wanted if entry in sizes]
        if self._unused and wanted:
            self._meet(wanted[0][0], hits)
        elif hits:
            self._use(hits)
        new = len(wanted) - len(hits)
        if not new:
            return _tuple(Lookup, (hits, [], evicted))
        misses = [entry for entry in wanted if entry not in sizes] if hits else list(wanted)
        limit = self.budget_bytes - new * entry_bytes
        if self.resident_bytes > limit:
            evicted += self._make_room(limit, hits)
        self.resident_bytes += new * entry_bytes
        for entry in misses:
            sizes[entry] = entry_bytes
        self._add(misses)
        return _tuple(Lookup, (hits, misses, evicted))

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
        dropped = self.shrink(self.resident_bytes - 1)
        return dropped[0] if dropped else None

    def shrink(self, limit: int) -> list[Entry]:
        """Drop entries until at most `limit` bytes are resident, or none."""
        return self._shrink(limit, ())

    def is_over(self, layer: int) -> bool:
        """See `CachePolicy.is_over`."""
        return self.resident_bytes > self.budget_bytes

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

    def _make_room(self, limit: int, kept: Collection[Entry]) -> list[Entry]:
        """`_shrink`, dropping what awaits its layer only when nothing else is left."""
        if not self._awaited:
            return self._shrink(limit, kept)
        evicted = self._shrink(limit, self._awaited.union(kept))
        return evicted + self._shrink(limit, kept)

    def _shrink(self, limit: int, kept: Collection[Entry]) -> list[Entry]:
        """Drop entries, but none of `kept`, until at most `limit` bytes are resident."""
        evicted: list[Entry] = []
        resident, sizes, least = self.resident_bytes, self._sizes, len(kept)
        if resident <= limit or len(sizes) <= least:
            return evicted
        for entry in (victims := self._victims(kept)):
            evicted.append(entry)
            resident -= sizes.pop(entry)
            if resident <= limit or len(sizes) <= least:
                break
        victims.close()
        self.resident_bytes = resident
        if self._unused:
            self._unused.difference_update(evicted)
            self._awaited.difference_update(evicted)
        return evicted

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
    def _victims(self, kept: Collection[Entry]) -> Generator[Entry]:
        """The entries to drop, one after the other, but none of `kept`; closed when enough went.

        Each exists, and is taken out of the policy's own order; its size is known until the next.
        """

    @abstractmethod
    def _forget(self, entry: Entry) -> None:
        """Take an entry, whose size is still known, out of the policy's own order."""
