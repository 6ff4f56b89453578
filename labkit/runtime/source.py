"""`ExpertStreamSource`: the experts that a layer has chosen, there when it computes with them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from labkit.errors import ReadError
from labkit.gguf_map import GGUFMap
from labkit.policy import CachePolicy
from labkit.policy.base import Entry, Lookup
from labkit.runtime.expert_memory import ExpertMemory
from labkit.runtime.reader import Batch, FileReader
from labkit.runtime.reads_ahead import ReadAhead, ReadsAhead
from labkit.runtime.totals import Totals

Overlap = Literal["serial", "pipeline", "userfaultfd"]


@dataclass(slots=True)
class _Asked:
    batch: Batch
    entries: list[Entry]


class ExpertStreamSource:
    """Expert weights of one model, streamed into memory that llama.cpp computes from.

    Args:
        gguf: the model's map; `require_streamable` has passed.
        reader: opened on the same files.
        policy: decides what stays; its budget covers expert bytes alone.
        memory: where the experts live.

    Attributes:
        overlap: how compute waits. "serial": a layer begins when all its reads have ended.
            "pipeline": it begins without the down projections, and waits for them before it needs
            them. "userfaultfd": it begins at once and sleeps at a slice that is not there.
        down_stops: layers in which the graph stops again before the down projections, so that
            "pipeline" can wait for them there; in others it waits for all at once.
        totals: sums since opening.
        orphaned: layers of the last graph that computed with a slice nobody was reading.
    """

    def __init__(
        self, gguf: GGUFMap, reader: FileReader, policy: CachePolicy, memory: ExpertMemory
    ) -> None:
        self.policy = policy
        self.memory = memory
        self.overlap: Overlap = "serial"
        self.down_stops: frozenset[int] = frozenset()
        self.totals = Totals()
        self.orphaned: set[int] = set()
        self._reader = reader
        self._n_expert = gguf.n_expert
        self._entry_bytes = {layer: gguf.entry_bytes(layer) for layer in gguf.moe_layers}
        self._asked: list[_Asked] = []
        self._ahead = ReadsAhead(reader, memory)
        self._needed: list[ReadAhead] = []  # that a layer has met
        self._found: dict[int, set[int]] = {}  # by layer, experts seen since anything went
        self._uses: list[tuple[int, Collection[int]]] = []  # that the policy has not heard of
        self._busy_s = 0.0

    def has_all(self, layer: int, experts: Collection[int]) -> bool:
        """Whether `layer` may compute at once, for all of `experts` are there.

        A graph waits for this answer, so the policy hears of the use later; but before it decides
        anything. False where that would not do, though all may be there: `request` then knows.
        """
        found = self._found.get(layer)
        if found is None or self._asked or self._ahead:
            return False
        if not found.issuperset(experts):
            return False
        self._uses.append((layer, experts))
        return True

    def request(self, layer: int, experts: Collection[int]) -> Lookup:
        """Ask for the distinct `experts` of `layer`; reads of those that are missing begin.

        Raises:
            ReadError: a slice could not be read. None of the missing entries counts as resident.
        """
        begin = time.perf_counter()
        self._collect(0)
        waited_s = self.totals.wait_s
        if self._ahead and (wrong := self._ahead.take_back_wrong(layer, experts)):
            self._drop(wrong)
        if self._uses:
            self._tell_uses()
        lookup = self.policy.request(layer, experts, self._entry_bytes[layer])
        self.totals.hits += len(lookup.hits)
        self.totals.misses += len(lookup.misses)
        if self._ahead:
            met = self._ahead.meet(lookup.hits)
            self.totals.prefetch_hits += len(met)
            self._needed += met
        self._make_way(lookup)
        if lookup.misses:
            self._read(layer, lookup.misses)
        if self.policy.is_over(layer):
            self._found.clear()
        else:
            self._found.setdefault(layer, set()).update(experts)
        self.totals.manage_s += time.perf_counter() - begin - (self.totals.wait_s - waited_s)
        return lookup

    def wait(self, layer: int, lookup: Lookup) -> None:
        """Return when `layer` may compute with what it asked for. Raises ReadError."""
        needed, self._needed = self._needed, []
        if self.overlap == "userfaultfd":
            return
        for read in needed:
            self._finish(read.batch)
        if lookup.misses:
            self._collect(1 if self._splits(layer) else 0)

    def fetch(self, layer: int, experts: Collection[int]) -> Lookup:
        """`request`, then `wait`."""
        lookup = self.request(layer, experts)
        self.wait(layer, lookup)
        return lookup

    def wait_for_down(self, _layer: int) -> None:
        """Return when the down projections that were asked for are there ("pipeline")."""
        self._collect(0)

    def prefetch(self, layer: int, experts: Sequence[int], keep: Collection[Entry]) -> None:
        """Read entries that `layer` may ask for soon; nothing of `keep` goes for them."""
        begin = time.perf_counter()
        self._tell_uses()
        wanted = [(layer, expert) for expert in experts]
        if not all(entry in self.policy for entry in wanted):
            lookup = self.policy.admit(wanted, self._entry_bytes[layer], keep)
            self._make_way(lookup)
            for entry in lookup.misses:
                self._ahead.begin(entry, is_guess=True)
        self.totals.manage_s += time.perf_counter() - begin

    def preload(self, entries: Sequence[Entry]) -> None:
        """Read entries into an empty cache, as many of the first as fit; returns before they came.

        The first of `entries` are the last that the policy will drop.
        """
        fitting = [
            entry
            for entry in entries
            if self.policy.admit([entry], self._entry_bytes[entry[0]]).misses
        ]
        for entry in fitting:
            self.policy.discard(entry)
        for entry in reversed(fitting):
            self.policy.admit([entry], self._entry_bytes[entry[0]])
        self.memory.evict((), fitting)
        for entry in sorted(fitting):
            self._ahead.begin(entry, is_guess=False)

    def stop_reading_ahead(self) -> None:
        """Take back every read ahead that no lane has begun; nothing is computed any more."""
        self._ahead.take_back_all()

    def make_room(self, budget_bytes: int) -> None:
        """Drop what the policy would drop first until at most so many bytes are resident."""
        self.finish_reads()
        self._tell_uses()
        while self.policy.resident_bytes > budget_bytes and (entry := self.policy.evict()):
            self._ahead.forget([entry])
            self._evict([entry])
        self.memory.trim()

    def settle(self) -> None:
        """Call after each graph, whatever became of it: no read that it asked for is left.

        Raises:
            ReadError: one of them failed.
        """
        try:
            self._tell_uses()
            self._collect(0)
            if self._reader.stuck:  # it may have ended since, but compute was woken before
                raise self._reader.stuck
        finally:
            busy_s = self._reader.busy_s
            self.totals.read_s += busy_s - self._busy_s
            self._busy_s = busy_s
            self.totals.wait_s += self.memory.slept_s()
            self.orphaned = self._forget_orphans()

    def finish_reads(self) -> None:
        """Wait for all reads, those ahead of need as well. Raises ReadError."""
        self._collect(0)
        while reads := self._ahead.under_way:
            self._finish(reads[0].batch)
            self._sweep()

    def resident_bytes(self) -> int:
        """Bytes of expert memory that the kernel holds for this source (not our own sum)."""
        return self.memory.resident_bytes()

    def _make_way(self, lookup: Lookup) -> None:
        """Take the pages of what goes, once no read ahead of need is under way into them."""
        try:
            for entry in lookup.evicted if self._ahead else ():
                if read := self._ahead.lose(entry):
                    self._finish(read.batch)
        except ReadError:
            for entry in lookup.misses:
                self.policy.discard(entry)
            self._found.clear()
            self._evict(lookup.evicted)
            raise
        if lookup.misses or lookup.evicted:
            self._evict(lookup.evicted, lookup.misses)

    def _evict(self, gone: Sequence[Entry], wanted: Sequence[Entry] = ()) -> None:
        if gone:
            self._found.clear()
        self.memory.evict(gone, wanted)

    def _drop(self, entries: Sequence[Entry]) -> None:
        """What was to be read will not come."""
        for entry in entries:
            self.policy.discard(entry)
        self._evict(entries)

    def _tell_uses(self) -> None:
        """Tell the policy of the uses that `has_all` answered."""
        if self._uses:
            begin = time.perf_counter()
            uses, self._uses = self._uses, []
            for layer, experts in uses:
                lookup = self.policy.request(layer, experts, self._entry_bytes[layer])
                self.totals.hits += len(lookup.hits)
            self.totals.manage_s += time.perf_counter() - begin

    def _splits(self, layer: int) -> bool:
        return self.overlap == "pipeline" and layer in self.down_stops

    def _read(self, layer: int, entries: list[Entry]) -> None:
        if self._splits(layer):
            for down in (False, True):
                requests = self.memory.requests(entries, down=down)
                self._asked.append(_Asked(self._reader.submit(requests), entries))
        else:
            batch = self._reader.submit(self.memory.requests(entries))
            self._asked.append(_Asked(batch, entries))

    def _collect(self, n_left: int) -> None:
        """Wait for the reads that compute asked for; with userfaultfd it did so by itself."""
        self._sweep()
        while len(self._asked) > n_left:
            self._finish(self._asked[0].batch)
            self.totals.bytes_read += self._asked.pop(0).batch.bytes_read

    def _sweep(self) -> None:
        """Account for reads ahead that have ended. Raises ReadError, of one that failed."""
        if not self._ahead:
            return
        for read in self._ahead.ended():
            try:
                self._finish(read.batch)
            except ReadError as error:
                raise read.failure(error) from error.__cause__
            self._ahead.account(read)
            self.totals.bytes_read += read.batch.bytes_read
            self.totals.prefetch_bytes += read.batch.bytes_read

    def _finish(self, batch: Batch) -> None:
        begin = time.perf_counter()
        try:
            self._reader.finish(batch)
        except ReadError:
            self._forget_reads()
            raise
        finally:
            self.totals.wait_s += time.perf_counter() - begin

    def _forget_reads(self) -> None:
        """After a failure: nothing that was being read counts as resident."""
        reads = [(asked.batch, asked.entries) for asked in self._asked]
        reads += [(read.batch, [read.entry]) for read in self._ahead.forget_all()]
        self._asked, self._needed = [], []
        for batch, entries in reads:
            if not self._reader.drain(batch):
                return  # nothing is computed any more, so nothing that is forgotten matters
            self._drop(entries)
        self._forget_orphans()

    def _forget_orphans(self) -> set[int]:
        """Nothing of a layer counts as resident that lies where zeros were put; those layers."""
        layers = self.memory.forget_orphans()
        for layer in layers:
            self._found.clear()
            entries = [(layer, expert) for expert in range(self._n_expert)]
            for entry in entries:
                self.policy.discard(entry)
            self._ahead.forget(entries)
        return layers
