"""`ExpertMemory`: where expert slices live, how they get there and how they leave.

A slice is read into a frame and then put where llama.cpp computes from it: its whole pages are
moved there, the pages at its ends, which neighbours share, are copied. So a page of a window is
missing or true, never half read. With `userfaultfd` a thread that comes too early for a page
sleeps until it is there.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Iterable, Iterator

from labkit.gguf_map import ExpertTensor, GGUFMap
from labkit.policy.base import Entry
from labkit.runtime import ggml
from labkit.runtime.frames import Frame, FramePool, move_pages
from labkit.runtime.memory import PAGE, ExpertWindow, page_span
from labkit.runtime.reader import ReadRequest
from labkit.runtime.sleep_watch import SleepWatch
from labkit.runtime.userfault import UserFault

_WORTH_MOVING = 8 * PAGE  # below, copying is as cheap as changing page tables


class ExpertMemory:
    """The windows of all expert tensors of a model, and the frames that slices arrive in.

    Args:
        gguf: the model's map; `require_streamable` has passed.
        userfault: have compute wait for missing pages; None where whoever computes waits itself.

    Attributes:
        resident: entries whose slices are there or being read.
        orphaned: layers that computed with a slice which nobody reads, since `forget_orphans`.
        on_orphan: called on another thread when that happens, before the sleeper goes on.
        look_for_stuck: whether a read does not end; asked while somebody may sleep.
    """

    def __init__(self, gguf: GGUFMap, userfault: UserFault | None = None) -> None:
        self.userfault = userfault
        self.resident: set[Entry] = set()
        self.orphaned: set[int] = set()
        self.on_orphan: Callable[[], None] = lambda: None
        self.look_for_stuck: Callable[[], object] = lambda: None
        self._landings: set[_Landing] = set()
        self._watch: SleepWatch | None = None
        self._parts: dict[int, list[_Part]] = {}
        self._pools: dict[int, FramePool] = {}
        try:
            for expert_tensor in gguf.expert_tensors:
                part = self._add(expert_tensor)
                self._parts.setdefault(expert_tensor.layer, []).append(part)
            self._by_address = sorted(self._all_parts(), key=lambda part: part.window.pages.base)
            self._bases = [part.window.pages.base for part in self._by_address]
            if userfault:
                self._watch = SleepWatch(userfault, self._on_sleep, self._on_tick)
        except BaseException:
            self.close()
            raise

    def _add(self, expert_tensor: ExpertTensor) -> _Part:
        nbytes = expert_tensor.slice_bytes
        window = ExpertWindow(expert_tensor.tensor.offset, nbytes, expert_tensor.n_expert)
        if self.userfault:
            self.userfault.register(window.pages.base, window.pages.length)
        n_pages = -(-nbytes // PAGE) + 1
        pool = self._pools.setdefault(n_pages, FramePool(n_pages))
        return _Part(expert_tensor, window, pool)

    def bind(self, addresses: dict[str, int]) -> None:
        """Point llama.cpp's expert tensors, by name, at the windows.

        Tensors that no graph uses (a second head that is not run) are in the file but not in
        `addresses`; they stay as they are.
        """
        for parts in self._parts.values():
            for part in parts:
                if address := addresses.get(part.tensor.tensor.name):
                    ggml.tensor_at(address).data = part.window.address(part.window.offset)

    def requests(self, entries: Iterable[Entry], *, down: bool | None = None) -> list[ReadRequest]:
        """The reads that bring `entries`, in the order in which compute wants them.

        `down` picks the down projections or all others; None takes both.
        """
        wanted = sorted(entries)
        found = []
        for layer in dict.fromkeys(layer for layer, _ in wanted):
            for part in self._parts[layer]:
                if down is None or down == (part.tensor.projection == "down"):
                    found += [part.request(self, e) for at, e in wanted if at == layer]
        return found

    def evict(self, gone: Iterable[Entry], wanted: Iterable[Entry]) -> None:
        """Take the pages of entries `gone`; keep as many as the reads of `wanted` can use."""
        gone, wanted = list(gone), list(wanted)
        self.resident.difference_update(gone)
        self.resident.update(wanted)
        if not gone:
            return
        room: dict[int, int] = {}
        for layer, _ in wanted:
            for part in self._parts[layer]:
                room[id(part.pool)] = room.get(id(part.pool), 0) + 1
        for entry in gone:
            for part in self._parts[entry[0]]:
                keep = part.pool.n_filled < room.get(id(part.pool), 0)
                self._take_pages(part, entry, keep)

    def trim(self) -> None:
        """Give back the pages of frames that wait for a read. No read is under way."""
        for pool in self._pools.values():
            pool.trim(0)

    def put(self, part: _Part, expert: int, frame: Frame, low: int) -> None:
        """Put a slice, whose file bytes from page `low` on are in `frame`, where it is used."""
        start, stop = page_span(*part.window.span(expert))
        inner, inner_stop = part.window.interior(expert)
        target = part.window.address
        if inner_stop - inner >= _WORTH_MOVING and move_pages(
            frame.base + inner - low, target(inner), inner_stop - inner
        ):
            if self.userfault:
                self.userfault.wake(target(inner), inner_stop - inner)
            self._copy(target(start), frame.base + start - low, inner - start)
            self._copy(target(inner_stop), frame.base + inner_stop - low, stop - inner_stop)
            part.pool.give(frame, filled=False)
        else:
            self._copy(target(start), frame.base + start - low, stop - start)
            part.pool.give(frame, filled=True)
        if self._watch:
            self._watch.arrived(target(start), target(stop))

    def give_up(self, part: _Part, expert: int, frame: Frame | None) -> None:
        """A slice will not arrive: let whoever sleeps on it go on, in a graph that is to end."""
        if self.userfault:
            start, stop = page_span(*part.window.span(expert))
            self.userfault.fill_zero(part.window.address(start), stop - start)
        if frame:
            part.pool.give(frame, filled=True)

    def slept_s(self) -> float:
        """Seconds since the last call in which at least one compute thread slept on a slice."""
        return self._watch.slept_s() if self._watch else 0.0

    def forget_orphans(self) -> set[int]:
        """Drop all that lies in layers which computed with what nobody read; those layers.

        Zeros were put there to wake a sleeper, and neighbours may share their pages.
        """
        layers, self.orphaned = self.orphaned, set()
        for layer in layers:
            self.resident -= {entry for entry in self.resident if entry[0] == layer}
            for part in self._parts[layer]:
                part.window.pages.drop(0, part.window.pages.length)
                if self.userfault:
                    self.userfault.register(part.window.pages.base, part.window.pages.length)
        return layers

    def resident_bytes(self) -> int:
        """Bytes of expert memory that the kernel holds (not our own sum)."""
        return sum(part.window.resident_bytes() for part in self._all_parts())

    def close(self) -> None:
        """Unmap. The model that computed from here is freed, and no read is under way."""
        if self._watch:
            self._watch.close()
            self._watch = None
        for part in self._all_parts():
            part.window.close()
        self._parts.clear()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        if self.userfault:
            self.userfault.close()
            self.userfault = None

    def _all_parts(self) -> Iterator[_Part]:
        for parts in self._parts.values():
            yield from parts

    def _on_sleep(self, address: int) -> None:
        """A thread sleeps on a page: see that somebody brings it."""
        part = self._by_address[bisect.bisect_right(self._bases, address) - 1]
        offset = part.window.start + address - part.window.pages.base
        if any(part is one.part and one.covers(offset) for one in list(self._landings)):
            return
        page = address - address % PAGE
        assert self.userfault
        if self.userfault.fill_zero(page, PAGE):  # 0 if it came meanwhile
            self.orphaned.add(part.tensor.layer)
            self.on_orphan()
            for expert in part.window.experts_at(offset):
                self.give_up(part, expert, None)

    def _on_tick(self) -> bool:
        """Whether somebody may sleep; ends the sleep on reads that do not end."""
        if self._landings and self.look_for_stuck():
            self.on_orphan()
            for landing in list(self._landings):
                self.give_up(landing.part, landing.expert, None)
        return bool(self._landings)

    def _take_pages(self, part: _Part, entry: Entry, keep: bool) -> None:
        layer, expert = entry
        window = part.window
        start, stop = window.releasable(expert, lambda other: (layer, other) in self.resident)
        inner, inner_stop = window.interior(expert)
        length = inner_stop - inner
        if length < _WORTH_MOVING:
            window.release(start, stop)
            return
        if keep:
            frame = part.pool.take_empty()
            keep = move_pages(window.address(inner), frame.base + PAGE, length)
            part.pool.give(frame, filled=keep)
        if keep:
            window.release(start, inner)
            window.release(inner_stop, stop)
        else:
            window.release(start, stop)
        if self.userfault:  # pages that were moved in brought a mapping that knows nothing of it
            self.userfault.register(window.address(inner), length)

    def _copy(self, target: int, source: int, length: int) -> None:
        if length <= 0:
            return
        if self.userfault:
            self.userfault.fill(target, source, length)
        else:
            ctypes.memmove(target, source, length)


class _Part:
    """One projection of a layer."""

    def __init__(self, tensor: ExpertTensor, window: ExpertWindow, pool: FramePool) -> None:
        self.tensor = tensor
        self.window = window
        self.pool = pool

    def request(self, memory: ExpertMemory, expert: int) -> ReadRequest:
        tensor = self.tensor
        what = f"the {tensor.projection} projection of expert {expert} in layer {tensor.layer}"
        landing = _Landing(memory, self, expert)
        return ReadRequest(tensor.tensor.shard, *self.window.span(expert), landing, what)


class _Landing:
    """Where the read of one slice arrives."""

    whole_pages = True

    def __init__(self, memory: ExpertMemory, part: _Part, expert: int) -> None:
        self.part, self.expert = part, expert
        self._memory = memory
        self._frame: Frame | None = None
        self._low = 0
        self._start, self._stop = page_span(*part.window.span(expert))
        memory._landings.add(self)

    def covers(self, offset: int) -> bool:
        """Whether the byte at file `offset` lies in a page that this read brings."""
        return self._start <= offset < self._stop

    def view(self, start: int, stop: int) -> memoryview:
        self._frame, self._low = self.part.pool.take(), start
        return self._frame.memory[: stop - start]

    def landed(self, whole: bool) -> None:
        frame, self._frame = self._frame, None
        if whole and frame:
            self._memory.put(self.part, self.expert, frame, self._low)
        else:
            self._memory.give_up(self.part, self.expert, frame)
        self._memory._landings.discard(self)
