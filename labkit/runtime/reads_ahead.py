"""`ReadsAhead`: entries that are read before their layer asks, from the start of a read to its use.

An entry that was read ahead is *met* when its layer uses it. Until then its read may be taken back,
if no lane has begun it, and its place may be wanted for another entry.

A read that fails unmet is told once, by the first step that accounts for it, be it one that never
needs the entry: a disk that fails is news that must not wait for a layer to ask again. The error
names the entry, and says that nobody had asked for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from labkit.errors import ReadError
from labkit.policy.base import Entry
from labkit.runtime.expert_memory import ExpertMemory
from labkit.runtime.reader import Batch, FileReader, ReadRequest


@dataclass(slots=True, eq=False)
class ReadAhead:
    """The read of one entry: what was asked of the reader, and whether a layer waits for it."""

    entry: Entry
    requests: Sequence[ReadRequest]
    batch: Batch
    is_guess: bool  # taken back if its layer chooses otherwise
    is_met: bool = False

    def failure(self, error: ReadError) -> ReadError:
        """`error`, with which the read ended, for the step that tells it."""
        if self.is_met:
            return error
        return ReadError(
            f"{error} It was read ahead of need, since this step or an earlier one, and no layer "
            "had asked for it."
        )


class ReadsAhead:
    """Reads ahead of need. It knows no policy: whoever takes an entry back has that forget it.

    Args:
        reader: does the reads.
        memory: where they land.
    """

    def __init__(self, reader: FileReader, memory: ExpertMemory) -> None:
        self._reader = reader
        self._memory = memory
        self._under_way: list[ReadAhead] = []  # or ended, and not accounted for
        self._unmet: dict[Entry, ReadAhead] = {}

    def __bool__(self) -> bool:
        """Whether there is a read to account for, or an entry that was not met."""
        return bool(self._under_way or self._unmet)

    @property
    def under_way(self) -> Sequence[ReadAhead]:
        """Reads that were not accounted for (`account`), the oldest first."""
        return self._under_way

    def begin(self, entry: Entry, *, is_guess: bool) -> None:
        """Have an entry read once nothing urgent is left to read."""
        requests = self._memory.requests([entry])
        batch = self._reader.submit(requests, urgent=False)
        self._unmet[entry] = read = ReadAhead(entry, requests, batch, is_guess)
        self._under_way.append(read)

    def meet(self, entries: Iterable[Entry]) -> list[ReadAhead]:
        """Entries are used: the reads of those that were read ahead, urgent from now on."""
        met = [read for entry in entries if (read := self._unmet.pop(entry, None))]
        for read in met:
            read.is_met = True
            if self._reader.withdraw(read.batch):
                read.batch = self._reader.submit(read.requests)
        return met

    def take_back_wrong(self, layer: int, experts: Collection[int]) -> list[Entry]:
        """Guesses for `layer`, which chose `experts`, that were wrong and no lane has begun."""
        wrong = [
            read
            for read in self._under_way
            if read.is_guess and read.entry[0] == layer and read.entry[1] not in experts
        ]
        return [read.entry for read in wrong if self._take_back(read)]

    def take_back_all(self) -> None:
        """Take back every read that no lane has begun."""
        for read in list(self._under_way):
            self._take_back(read)

    def lose(self, entry: Entry) -> ReadAhead | None:
        """An entry goes unmet; its read, if that has begun and so must end before its pages go."""
        read = self._unmet.pop(entry, None)
        return None if read is None or self._take_back(read) else read

    def ended(self) -> list[ReadAhead]:
        """Reads that ended or failed and were not accounted for."""
        return [read for read in self._under_way if read.batch.done or read.batch.error]

    def account(self, read: ReadAhead) -> None:
        """A read is over; that its entry was not met stays known."""
        self._under_way.remove(read)

    def forget(self, entries: Iterable[Entry]) -> None:
        """Entries are not resident any more, and their reads have ended."""
        for entry in entries:
            self._unmet.pop(entry, None)

    def forget_all(self) -> list[ReadAhead]:
        """Begin anew; the reads that were not accounted for."""
        reads, self._under_way, self._unmet = self._under_way, [], {}
        return reads

    def _take_back(self, read: ReadAhead) -> bool:
        if not self._reader.withdraw(read.batch):
            return False
        self._memory.withdraw(read.requests)
        self._under_way.remove(read)
        self._unmet.pop(read.entry, None)
        return True
