"""A share of the budget for every layer, with a policy of its own in each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from labkit.errors import OptionError
from labkit.policy.base import Cache, Entry, EntryNames, Lookup


class Partition:
    """Layers do not compete: each has a share of the budget in proportion to its entries' bytes.

    A share can be smaller than what one token needs of its layer, and what is in use cannot go. The
    budget then holds all the same: the missing room is taken from the layer that was used last
    before, because its next turn is the furthest away.

    Args:
        entry_bytes: bytes of an entry, by layer; every layer that will ask must be there.
        cache: makes the policy inside a layer from its share in bytes.
    """

    def __init__(
        self, budget_bytes: int, entry_bytes: Mapping[int, int], cache: Callable[[int], Cache]
    ) -> None:
        if budget_bytes < 0:
            raise OptionError(f"a cache budget of {budget_bytes} bytes is negative")
        self.budget_bytes = budget_bytes
        self.resident_bytes = 0
        total = sum(entry_bytes.values())
        self._layers = {
            layer: cache(budget_bytes * nbytes // total) for layer, nbytes in entry_bytes.items()
        }
        self._names = EntryNames()
        self._used: dict[int, None] = {}  # layers in the order of their last use

    def request(self, layer: int, experts: Iterable[int], entry_bytes: int) -> Lookup:
        """See `CachePolicy.request`."""
        return self.lookup(self._names.of(layer, experts), entry_bytes)

    def lookup(self, wanted: Sequence[Entry], entry_bytes: int) -> Lookup:
        """See `CachePolicy.lookup`."""
        if not wanted:
            return Lookup([], [], [])
        layer = wanted[0][0]
        own = self._layers[layer]
        self._used.pop(layer, None)
        if self.resident_bytes > self.budget_bytes:
            evicted = self._take(self.resident_bytes - self.budget_bytes)
        else:
            evicted = []
        before = own.resident_bytes
        found = own.lookup(wanted, entry_bytes)
        self.resident_bytes += own.resident_bytes - before
        evicted += found.evicted
        if self.resident_bytes > self.budget_bytes:
            evicted += self._take(self.resident_bytes - self.budget_bytes)
        self._used[layer] = None
        return found._replace(evicted=evicted) if evicted else found

    def admit(
        self, wanted: Sequence[Entry], entry_bytes: int, keep: Collection[Entry] = ()
    ) -> Lookup:
        """See `CachePolicy.admit`: it happens within the share of the layer."""
        if not wanted:
            return Lookup([], [], [])
        layer = wanted[0][0]
        own = self._layers[layer]
        self._used = {layer: None, **self._used}  # if it was not used yet, its turn comes first
        before = own.resident_bytes
        others = self.resident_bytes - before
        limit = min(own.budget_bytes, self.budget_bytes - others)
        found = own.admit_within(limit, wanted, entry_bytes, keep)
        self.resident_bytes += own.resident_bytes - before
        return found

    def discard(self, entry: Entry) -> None:
        """See `CachePolicy.discard`."""
        own = self._layers[entry[0]]
        before = own.resident_bytes
        own.discard(entry)
        self.resident_bytes += own.resident_bytes - before

    def evict(self) -> Entry | None:
        """See `CachePolicy.evict`: of the layer used last, whose next turn is the furthest away."""
        dropped = self._take(1)
        return dropped[0] if dropped else None

    def is_over(self, layer: int) -> bool:
        """See `CachePolicy.is_over`."""
        return self.resident_bytes > self.budget_bytes or self._layers[layer].is_over(layer)

    def __contains__(self, entry: Entry) -> bool:
        own = self._layers.get(entry[0])
        return own is not None and entry in own

    def __len__(self) -> int:
        return sum(map(len, self._layers.values()))

    def _take(self, nbytes: int) -> list[Entry]:
        """Free at least `nbytes` from the other layers, the one used last first."""
        evicted: list[Entry] = []
        if nbytes <= 0:
            return evicted
        limit = self.resident_bytes - nbytes
        for layer in reversed(self._used):
            own = self._layers[layer]
            before = own.resident_bytes
            evicted += own.shrink(before - (self.resident_bytes - limit))
            self.resident_bytes += own.resident_bytes - before
            if self.resident_bytes <= limit:
                break
        return evicted
