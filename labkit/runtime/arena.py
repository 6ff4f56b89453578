"""`DeviceArena`: memory for whole layers of experts, used again and again."""

from __future__ import annotations

from labkit.gguf_map import ExpertTensor
from labkit.runtime.memory import PageRange, Window, page_span

N_SLOTS = 2
"""One that compute uses while the other is read into."""


class DeviceArena:
    """Two slots, each with room for the expert tensors of any one layer.

    On an accelerator this would be its own memory; here it is the processor's. The pages come as
    they are read into and stay until `release`.

    Args:
        layers: the expert tensors of each layer that takes turns in the slots.

    Raises:
        BudgetError: the system does not reserve the addresses.
    """

    def __init__(self, layers: list[list[ExpertTensor]]) -> None:
        self._slot_bytes = slot_bytes(layers)
        self._pages = PageRange(N_SLOTS * self._slot_bytes, huge=True)

    def windows(self, slot: int, tensors: list[ExpertTensor]) -> dict[str, Window]:
        """Where a layer's tensors lie in a slot, by name; each keeps its place within a page."""
        found = {}
        at = slot * self._slot_bytes
        for tensor in tensors:
            start, stop = _span(tensor)
            found[tensor.tensor.name] = Window(start, self._pages, at)
            at += stop - start
        return found

    def release(self) -> None:
        """Give the pages back to the system; the addresses stay."""
        self._pages.drop(0, self._pages.length)

    def close(self) -> None:
        """Unmap. No graph computes from here and no read is under way."""
        self._pages.close()


def slot_bytes(layers: list[list[ExpertTensor]]) -> int:
    """Bytes of a slot: the largest layer's expert tensors, each in whole pages."""
    return max(sum(stop - start for start, stop in map(_span, layer)) for layer in layers)


def _span(tensor: ExpertTensor) -> tuple[int, int]:
    return page_span(tensor.tensor.offset, tensor.tensor.offset + tensor.tensor.nbytes)
