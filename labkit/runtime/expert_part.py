"""`ExpertPart`: one projection of a layer in memory, and `Spares`: slices whose pages are free.

A read into fresh memory makes the kernel find and clear a page for every 4 KiB, which costs
several times the processor time of the read itself. So the pages of an evicted slice stay where
they are until the read of another slice takes them: `mremap` hands them from address to address.
"""

from __future__ import annotations

from labkit.gguf_map import ExpertTensor
from labkit.runtime.frames import FramePool
from labkit.runtime.memory import PAGE, ExpertWindow

_WORTH_MOVING = 8  # pages; below, clearing or copying is as cheap as changing page tables


class ExpertPart:
    """One projection of a layer.

    Args:
        tensor: what the file says of it.
        window: where it is computed from.
        spares: shared with all parts whose slices are as large.
        frames: shared likewise.

    Attributes:
        is_moved: whether its slices are large enough to have their pages moved.
    """

    def __init__(
        self, tensor: ExpertTensor, window: ExpertWindow, spares: Spares, frames: FramePool
    ) -> None:
        self.tensor = tensor
        self.window = window
        self.spares = spares
        self.frames = frames
        self.is_moved = window.core_bytes >= _WORTH_MOVING * PAGE


Slice = tuple[ExpertPart, int]
"""A part and an expert."""


class Spares:
    """Evicted slices whose pages are still in place, each for a read that is to come.

    Not safe between threads.
    """

    def __init__(self) -> None:
        self._slices: dict[Slice, None] = {}

    def __len__(self) -> int:
        return len(self._slices)

    def add(self, part: ExpertPart, expert: int) -> None:
        """The slice is not needed any more."""
        self._slices[part, expert] = None

    def take(self) -> Slice | None:
        """Any slice, to take its pages; None if there is none."""
        return self._slices.popitem()[0] if self._slices else None

    def discard(self, part: ExpertPart, expert: int) -> bool:
        """Strike the slice off; whether it was there."""
        return self._slices.pop((part, expert), self) is None

    def discard_layer(self, layer: int) -> None:
        """Strike all slices of a layer off."""
        for part, expert in [s for s in self._slices if s[0].tensor.layer == layer]:
            del self._slices[part, expert]
