"""Policies that rank entries by their uses: LFU, LRFU, and the optimum that knows those to come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from labkit.policy.base import Entry
from labkit.policy.ranked import EntryRanking, Ranked

_CLOCK_BITS = 48  # more uses than any run has


class Uses(EntryRanking):
    """How often an entry was used, and among equals how lately."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[Entry, int] = {}
        self._clock = 0

    def learn(self, wanted: Sequence[Entry], choices: Sequence[int] = ()) -> None:
        """See `Ranking.learn`."""
        ranks, uses, clock = self.ranks, self._uses, self._clock
        for entry in wanted:
            clock += 1
            uses[entry] = used = uses.get(entry, 0) + 1
            # In one number, uses and below them the time of the last one.
            ranks[entry] = ((used << _CLOCK_BITS) + clock, entry)
        self._clock = clock

    def unasked(self) -> float:
        """See `EntryRanking.unasked`."""
        return 0


class FadingUses(EntryRanking):
    """Uses that fade: each is worth half after `half_life` more batches of the entry's layer.

    The rank is the logarithm of the sum, as of the beginning: what fades alike keeps its order, so
    only what is used has its rank changed.
    """

    def __init__(self, half_life: float = 8.0) -> None:
        super().__init__()
        self._half_life = half_life
        self._batches: dict[int, int] = {}

    def learn(self, wanted: Sequence[Entry], choices: Sequence[int] = ()) -> None:
        """See `Ranking.learn`."""
        ranks, layer = self.ranks, wanted[0][0]
        age = self._batches[layer] = self._batches.get(layer, 0) + 1
        now = age / self._half_life
        for entry in wanted:
            if entry in ranks:  # log2(2**before + 2**now)
                before = ranks[entry][0]
                ranks[entry] = (now + math.log2(1 + 2.0 ** (before - now)), entry)
            else:
                ranks[entry] = (now, entry)

    def unasked(self) -> float:
        """See `EntryRanking.unasked`."""
        return -math.inf


class Future(EntryRanking):
    """How soon an entry is needed again.

    Args:
        next_uses: for every batch to come, for each of its distinct entries, the number of the
            next batch that wants it, or any larger number if none does. See `next_uses`.
    """

    def __init__(self, next_uses: Iterable[Sequence[int]]) -> None:
        super().__init__()
        self._coming = iter(next_uses)
        self._batch = -1

    def learn(self, wanted: Sequence[Entry], choices: Sequence[int] = ()) -> None:
        """See `Ranking.learn`.

        Raises:
            ValueError: the batch is not in the future that this knows.
        """
        self._batch += 1
        coming = next(self._coming, None)
        if coming is None:
            raise ValueError(f"batch {self._batch} is not in the future that Belady was given")
        for entry, number in zip(wanted, coming, strict=True):
            self.ranks[entry] = (-number, entry)

    def unasked(self) -> float:
        """See `EntryRanking.unasked`: what has never been used may be needed at once."""
        return -self._batch


class LFU(Ranked):
    """The entry with the fewest uses goes first; among equals the one used longest ago.

    Uses are counted from the start and survive an eviction, so a new entry does not lose its past.
    """

    def __init__(self, budget_bytes: int, uses: Uses | None = None) -> None:
        super().__init__(budget_bytes, uses or Uses(), shared=uses is not None)


class LRFU(Ranked):
    """Uses count, but fade: each is worth half after `half_life` more tokens (Lee et al., 2001).

    Time is counted in batches of the entry's own layer, which is in tokens, and a prompt is one of
    them: however long, it weighs no more than a generated token. The default was chosen on traces
    of the bundled model, whose texts change often.
    """

    def __init__(
        self, budget_bytes: int, uses: FadingUses | None = None, *, half_life: float = 8.0
    ) -> None:
        super().__init__(budget_bytes, uses or FadingUses(half_life), shared=uses is not None)


class Belady(Ranked):
    """The optimum: what is needed again last goes first. It must know the future, so it is offline.

    No policy hits more when all entries are of one size (Belady, 1966). With sizes that differ
    the true optimum is hard to find; this one still ranks by time alone.
    """

    def __init__(self, budget_bytes: int, future: Future, *, shared: bool = False) -> None:
        super().__init__(budget_bytes, future, shared=shared)

    def _use(self, entries: list[Entry]) -> None:
        self._push(entries)
        if len(self._heap) > 4 * len(self._sizes) + 1000:
            self._rebuild()  # uses that have passed would pile up below the ones to come


def next_uses(batches: Sequence[Sequence[Entry]]) -> list[list[int]]:
    """For each batch and each of its entries, the number of the next batch that wants it.

    An entry that no later batch wants gets the number of batches.
    """
    coming: dict[Entry, int] = {}
    never = len(batches)
    result: list[list[int]] = [[]] * never
    for number in range(never - 1, -1, -1):
        wanted = batches[number]
        result[number] = [coming.get(entry, never) for entry in wanted]
        for entry in wanted:
            coming[entry] = number
    return result
