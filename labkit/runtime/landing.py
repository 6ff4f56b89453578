"""Where the read of one slice arrives: at its place, or in a frame from which it is put there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.runtime.expert_part import ExpertPart
from labkit.runtime.memory import PAGE, PageRange, page_span
from labkit.runtime.reader import ReadRequest

if TYPE_CHECKING:
    from labkit.runtime.expert_memory import ExpertMemory


class Landing:
    """A slice on its way straight to its place. Nobody computes with it before it is there."""

    __slots__ = ("_memory", "expert", "part")
    whole_pages = True  # so that a page is missing or true, should the window be watched later

    def __init__(self, memory: ExpertMemory, part: ExpertPart, expert: int) -> None:
        self._memory, self.part, self.expert = memory, part, expert

    def __str__(self) -> str:
        tensor = self.part.tensor
        return f"the {tensor.projection} projection of expert {self.expert} in layer {tensor.layer}"

    def request(self) -> ReadRequest:
        """The read that brings it."""
        start, stop = self.part.window.span(self.expert)
        return ReadRequest(self.part.tensor.tensor.shard, start, stop, self, self)

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        window = self.part.window
        if not self.part.is_moved:
            return [window.view(start, stop)]
        core, core_end = window.core(self.expert)
        self._memory.take_pages(self.part, self.expert, window.address(core))
        # In pieces, because the kernel looks pages up one by one from the first missing one on.
        return [window.view(*ends) for ends in ((start, core), (core, core_end), (core_end, stop))]

    def landed(self, whole: bool) -> None:
        """What did not come whole is not resident, and so is not used."""


class FrameLanding(Landing):
    """A slice on its way to a window where compute may wait for it."""

    __slots__ = ("_at", "_frame")

    def __init__(self, memory: ExpertMemory, part: ExpertPart, expert: int) -> None:
        super().__init__(memory, part, expert)
        self._frame: PageRange | None = None
        self._at = 0
        memory.landings.add(self)

    def covers(self, offset: int) -> bool:
        """Whether the byte at file `offset` lies in a page that this read brings."""
        start, stop = page_span(*self.part.window.span(self.expert))
        return start <= offset < stop

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        frame = self._frame = self.part.frames.take()
        if self.part.is_moved:
            # At most one page lies before the core, which so is at the same place in any frame.
            self._at = PAGE - (self.part.window.core(self.expert)[0] - start)
            self._memory.take_pages(self.part, self.expert, frame.base + PAGE)
        return [frame.memory[self._at : self._at + stop - start]]

    def landed(self, whole: bool) -> None:
        frame, self._frame = self._frame, None
        if whole and frame:
            self._memory.put(self.part, self.expert, frame.base + self._at)
        else:
            self._memory.give_up(self.part, self.expert)
        if frame:
            self.part.frames.give(frame)
        self._memory.landings.discard(self)
