"""`ExpertPart`: one projection of a layer in memory, and `Spares`: slices whose pages are free.

A read into fresh memory makes the kernel find and clear a page for every 4 KiB, which costs
several times the processor time of the read itself. So the pages of an evicted slice stay where
they are until the read of another slice takes them: `mremap` hands them from address to address.
"""

from __future__ import annotations

from labkit.gguf_map import ExpertTensor
from labkit.runtime.frames import FramePool
from labkit.runtime.mappings import give_mappings, take_mappings
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
        is_moved: whether its slices have their pages moved: they are large enough, and the system
            allows the process so many mappings.
    """

    def __init__(
        self, tensor: ExpertTensor, window: ExpertWindow, spares: Spares, frames: FramePool
    ) -> None:
        self.tensor = tensor
        self.window = window
        self.spares = spares
        self.frames = frames
        # Each core that was ever moved is a mapping, and what lies between two of them another.
        self._n_mappings = 2 * window.n_expert
        is_large = window.core_bytes >= _WORTH_MOVING * PAGE
        self.is_moved = is_large and take_mappings(self._n_mappings)

    def close(self) -> None:
        """Unmap its window. Called once."""
        self.window.close()
        if self.is_moved:
            give_mappings(self._n_mappings)


Slice = tuple[ExpertPart, int]
"""A part and an expert."""


class Spares:
    """Evicted slices whose pages are still in place, at most one for each read that is due.

    Not safe between threads.
    """

    def __init__(self) -> None:
        self._slices: dict[Slice, None] = {}
        self._due: set[Slice] = set()

    def __len__(self) -> int:
        return len(self._slices)

    @property
    def surplus(self) -> int:
        """How many spares no read that is due can use; negative for reads without one."""
        return len(self._slices) - len(self._due)

    def expect(self, wanted: Slice) -> bool:
        """A slice is to be read; whether it is a spare itself, and so is none any more."""
        self._due.add(wanted)
        return self._slices.pop(wanted, self) is None

    def begin(self, wanted: Slice) -> Slice | None:
        """The read of a slice begins; a spare to take the pages of, if there is one."""
        self._due.discard(wanted)
        return self.take()

    def add(self, gone: Slice) -> bool:
        """A slice is not needed any more; whether it is a spare for a read now."""
        was_due = gone in self._due  # its read was withdrawn
        self._due.discard(gone)
        if was_due or self.surplus >= 0:
            return False
        self._slices[gone] = None
        return True

    def take(self) -> Slice | None:
        """Any spare, to take its pages; None if there is none."""
        return self._slices.popitem()[0] if self._slices else None

    def discard_layer(self, layer: int) -> None:
        """Strike all slices of a layer off."""
        for part, expert in [s for s in self._slices if s[0].tensor.layer == layer]:
            del self._slices[part, expert]
