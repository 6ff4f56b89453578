"""`ExpertMemory`: where expert slices live, how they get there and how they leave.

A slice is read straight to where llama.cpp computes from it. Where compute may come too early
(`userfaultfd`), it is read into a frame first and then put there: its whole pages are moved, the
pages at its ends, which neighbours share, are copied. So a page of a watched window is missing or
true, never half read, and a thread that comes too early for a page sleeps until it is there.

The pages of an evicted slice stay where they are until a read takes them, on its lane, so that no
read waits for the memory of others (`expert_part`).
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from labkit.errors import ResourceError
from labkit.gguf_map import ExpertTensor, GGUFMap
from labkit.policy.base import Entry
from labkit.runtime import ggml
from labkit.runtime.expert_part import ExpertPart, Slice, Spares
from labkit.runtime.frames import FramePool, move_pages
from labkit.runtime.fresh_pages import FreshPages
from labkit.runtime.landing import FrameLanding, Landing
from labkit.runtime.memory import PAGE, ExpertWindow, page_span
from labkit.runtime.reader import ReadRequest
from labkit.runtime.sleep_watch import SleepWatch
from labkit.runtime.userfault import UserFault


class ExpertMemory:
    """The windows of all expert tensors of a model.

    Args:
        gguf: the model's map; `require_streamable` has passed.
        userfault: lets compute sleep on missing pages, once `watch` has said so; None where whoever
            computes waits itself.
        huge: take huge pages, for a budget that holds every expert: none of them ever goes, and
            compute looks fewer pages up.

    Attributes:
        is_watched: whether compute may come before a slice, and sleeps on it until it is there.
        resident: entries whose slices are there or being read.
        landings: reads into watched memory that have not ended.
        orphaned: layers with zeros in place of a slice that nobody reads, since `forget_orphans`.
        is_lost: nobody knows any more what will be read.
        on_orphan: called on another thread when that happens, before the sleeper goes on.
        look_for_stuck: whether a read does not end; asked while somebody may sleep.
    """

    def __init__(
        self, gguf: GGUFMap, userfault: UserFault | None = None, *, huge: bool = False
    ) -> None:
        self.userfault = userfault
        self.is_watched = False
        self._huge = huge
        self._fresh = None if huge else FreshPages()
        self.resident: set[Entry] = set()
        self.landings: set[FrameLanding] = set()
        self.orphaned: set[int] = set()
        self.is_lost = False
        self.on_orphan: Callable[[], None] = lambda: None
        self.look_for_stuck: Callable[[], object] = lambda: None
        # Lanes take pages while the caller evicts: what is resident must not change between a
        # look at a page's neighbours and its going.
        self._lock = threading.Lock()
        self._watch: SleepWatch | None = None
        self._parts: dict[int, list[ExpertPart]] = {}
        self._sizes: dict[int, tuple[Spares, FramePool]] = {}
        try:
            for expert_tensor in gguf.expert_tensors:
                part = self._add(expert_tensor)
                self._parts.setdefault(expert_tensor.layer, []).append(part)
            self._by_address = sorted(self._all_parts(), key=lambda part: part.window.pages.base)
            self._bases = [part.window.pages.base for part in self._by_address]
            if userfault:
                self._watch = SleepWatch(userfault, self._is_coming, self._on_sleep, self._on_tick)
        except BaseException:
            self.close()
            raise

    def _add(self, expert_tensor: ExpertTensor) -> ExpertPart:
        nbytes = expert_tensor.slice_bytes
        offset, n_expert = expert_tensor.tensor.offset, expert_tensor.n_expert
        window = ExpertWindow(offset, nbytes, n_expert, huge=self._huge)
        if nbytes not in self._sizes:
            # A slice has at most one page before its core, and two after it.
            self._sizes[nbytes] = Spares(), FramePool(window.core_bytes // PAGE + 3)
        return ExpertPart(expert_tensor, window, *self._sizes[nbytes])

    def bind(self, addresses: dict[str, int]) -> None:
        """Point llama.cpp's expert tensors, by name, at the windows.

        Tensors that no graph uses (a second head that is not run) are in the file but not in
        `addresses`; they stay as they are.
        """
        for parts in self._parts.values():
            for part in parts:
                if address := addresses.get(part.tensor.tensor.name):
                    ggml.tensor_at(address).data = part.window.address(part.window.offset)

    def watch(self, on: bool) -> None:
        """Have compute sleep on what is missing from now on, or not. No read is under way.

        Needs `userfault`. Reads into memory that is not watched go straight to their place, which
        takes less time.

        Raises:
            ResourceError: the system refuses. Nothing is watched then.
        """
        if on == self.is_watched:
            return
        assert self.userfault
        with self._lock:
            self._trim()
            kept: dict[int, list[int]] = {layer: [] for layer in self._parts}
            for layer, expert in self.resident:
                kept[layer].append(expert)
            self.is_watched = False
            try:
                for part in self._all_parts():
                    self._watch_part(part, kept[part.tensor.layer], on)
            except OSError as error:
                for part in self._all_parts():
                    with contextlib.suppress(OSError):
                        self._watch_part(part, (), False)
                raise ResourceError(
                    "The system does not let labkit see who waits for the memory of experts: "
                    f"{error}. Open the model with overlap='serial' or 'pipeline'."
                ) from error
            self.is_watched = on

    def _watch_part(self, part: ExpertPart, kept: Sequence[int], on: bool) -> None:
        assert self.userfault
        pages = part.window.pages
        if on:
            # What lies beside the resident is not true: a graph that was to end, say, has looked at
            # what had not been read, and the system gave it zeros.
            part.window.release_all_but(kept)
            self.userfault.register(pages.base, pages.length)
        else:
            self.userfault.unregister(pages.base, pages.length)

    def requests(self, entries: Iterable[Entry], *, down: bool | None = None) -> list[ReadRequest]:
        """The reads that bring `entries`, in the order in which compute wants them.

        `down` picks the down projections or all others; None takes both.
        """
        wanted = sorted(entries)
        landing = FrameLanding if self.is_watched else Landing
        found = []
        for layer in dict.fromkeys(layer for layer, _ in wanted):
            for part in self._parts[layer]:
                if down is None or down == (part.tensor.projection == "down"):
                    found += [landing(self, part, e).request() for at, e in wanted if at == layer]
        return found

    def withdraw(self, requests: Iterable[ReadRequest]) -> None:
        """Reads that will not be done: nobody waits for what they would have brought."""
        self.landings.difference_update(request.target for request in requests)

    def evict(self, gone: Iterable[Entry], wanted: Iterable[Entry]) -> None:
        """Entries `gone` are not needed any more; the reads of `wanted`, to come, take pages.

        What no read can use goes back to the system at once; so it is for an entry in `gone`
        whose read is withdrawn.
        """
        gone, wanted = list(gone), list(wanted)
        with self._lock:
            self.resident.difference_update(gone)
            for part, expert in self._slices(wanted):
                if part.is_moved and part.spares.expect((part, expert)):
                    self._free(part, expert)  # wanted again before a read took its pages
            self.resident.update(wanted)
            for part, expert in self._slices(gone):
                if not part.is_moved or not part.spares.add((part, expert)):
                    self._free(part, expert)
            self._trim()

    def trim(self) -> None:
        """Give back pages that wait for a read which does not come."""
        with self._lock:
            self._trim()

    def take_pages(self, part: ExpertPart, expert: int, target: int) -> None:
        """The read of a slice begins: have its core at `target` lie in used pages, or new ones."""
        with self._lock:
            spare = part.spares.begin((part, expert))
            if spare:
                self._free(*spare, target)
        if not spare and self._fresh:
            self._fresh.move_to(target, part.window.core_bytes)

    def put(self, part: ExpertPart, expert: int, source: int) -> None:
        """Put a slice, whose pages lie at `source`, where it is used."""
        first, end = page_span(*part.window.span(expert))
        core, core_end = part.window.core(expert)
        to = part.window.address
        assert self.userfault
        assert self._watch
        if part.is_moved and move_pages(source + core - first, to(core), core_end - core):
            self.userfault.wake(to(core), core_end - core)
            self.userfault.fill(to(first), source, core - first)
            self.userfault.fill(to(core_end), source + core_end - first, end - core_end)
        else:
            self.userfault.fill(to(first), source, end - first)
        self._watch.arrived(to(first), to(end))

    def give_up(self, part: ExpertPart, expert: int) -> None:
        """A slice will not arrive: let whoever sleeps on it go on, in a graph that is to end.

        A neighbour that arrives later finds zeros in a page that both share: its layer is in doubt.
        """
        if self.userfault and self.is_watched:
            start, stop = page_span(*part.window.span(expert))
            if self.userfault.fill_zero(part.window.address(start), stop - start):
                with self._lock:
                    self.orphaned.add(part.tensor.layer)

    def let_sleepers_go(self) -> None:
        """From now on nobody waits for a slice: of what was asked for some may never be read.

        The graph is to end, and nothing is computed after it.
        """
        self.is_lost = True

    def slept_s(self) -> float:
        """Seconds since the last call in which at least one compute thread slept on a slice."""
        return self._watch.slept_s() if self._watch else 0.0

    def forget_orphans(self) -> set[int]:
        """Drop all that lies in layers which computed with what nobody read; those layers.

        Zeros were put there to wake a sleeper, and neighbours may share their pages.
        """
        with self._lock:
            layers, self.orphaned = self.orphaned, set()
            for layer in layers:
                self._forget(layer)
        return layers

    def resident_bytes(self) -> int:
        """Bytes of expert memory that the kernel holds (not our own sum); from any thread."""
        with self._lock:
            return sum(part.window.resident_bytes() for part in self._all_parts())

    def close(self) -> None:
        """Unmap. The model that computed from here is freed, and no read is under way."""
        if self._watch:
            self._watch.close()
            self._watch = None
        with self._lock:  # another thread may be counting what is there
            for part in self._all_parts():
                part.close()
            self._parts.clear()
        for _, frames in self._sizes.values():
            frames.close()
        self._sizes.clear()
        if self._fresh:
            self._fresh.close()
        if self.userfault:
            self.userfault.close()
            self.userfault = None

    def _all_parts(self) -> Iterator[ExpertPart]:
        for parts in self._parts.values():
            yield from parts

    def _part_at(self, address: int) -> tuple[ExpertPart, int]:
        """The part that an address lies in, and the file offset that it stands for."""
        part = self._by_address[bisect.bisect_right(self._bases, address) - 1]
        return part, part.window.start + address - part.window.pages.base

    def _is_coming(self, address: int) -> bool:
        if self.is_lost:
            return False
        part, offset = self._part_at(address)
        return any(part is one.part and one.covers(offset) for one in list(self.landings))

    def _on_sleep(self, address: int) -> None:
        """A thread sleeps on a page that nobody brings."""
        part, offset = self._part_at(address)
        page = address - address % PAGE
        assert self.userfault
        if self.userfault.fill_zero(page, PAGE):  # 0 if it came meanwhile
            with self._lock:
                self.orphaned.add(part.tensor.layer)
            self.on_orphan()
            for expert in part.window.experts_at(offset):
                self.give_up(part, expert)

    def _on_tick(self) -> bool:
        """Whether somebody may sleep; ends the sleep on reads that do not end."""
        if self.landings and (self.is_lost or self.look_for_stuck()):
            self.on_orphan()
            for landing in list(self.landings):
                self.give_up(landing.part, landing.expert)
        return bool(self.landings)

    def _trim(self) -> None:
        for spares, _ in self._sizes.values():
            while spares.surplus > 0 and (spare := spares.take()):
                self._free(*spare)

    def _forget(self, layer: int) -> None:
        self.resident -= {entry for entry in self.resident if entry[0] == layer}
        for spares, _ in self._sizes.values():
            spares.discard_layer(layer)
        for part in self._parts[layer]:
            pages = part.window.pages
            pages.drop(0, pages.length)
            if self.userfault and self.is_watched:
                self.userfault.register(pages.base, pages.length)

    def _slices(self, entries: Iterable[Entry]) -> Iterator[Slice]:
        for layer, expert in entries:
            for part in self._parts[layer]:
                yield part, expert

    def _free(self, part: ExpertPart, expert: int, target: int = 0) -> None:
        """Take the pages of a slice that is not resident: the core's to `target`, if given."""
        layer, window = part.tensor.layer, part.window
        start, stop = window.releasable(expert, lambda other: (layer, other) in self.resident)
        core, core_end = window.core(expert)
        length = window.core_bytes
        if target and move_pages(window.address(core), target, length):
            window.release(start, core)
            window.release(core_end, stop)
        else:
            window.release(start, stop)
        if (
            self.userfault and self.is_watched and part.is_moved
        ):  # moved pages brought a mapping that is not watched
            self.userfault.register(window.address(core), length)
