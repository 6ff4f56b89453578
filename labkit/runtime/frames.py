"""Frames: memory that a slice is read into before its pages go, without a copy, to where they
are used."""

from __future__ import annotations

import ctypes
import sys

from labkit.runtime.memory import PAGE, PageRange

_MAY_MOVE, _FIXED, _DONT_UNMAP = 1, 2, 4  # of mremap(2); the last is in Linux 5.7 and later


class FramePool:
    """Frames of `n_pages` pages, as many as are in use at once. Safe between threads."""

    def __init__(self, n_pages: int) -> None:
        self._length = n_pages * PAGE
        self._free: list[PageRange] = []
        self._all: list[PageRange] = []

    def take(self) -> PageRange:
        """A frame; what lies in it is of no use."""
        try:
            return self._free.pop()
        except IndexError:
            frame = PageRange(self._length)
            self._all.append(frame)
            return frame

    def give(self, frame: PageRange) -> None:
        """A frame comes back."""
        self._free.append(frame)

    def resident_bytes(self) -> int:
        """Bytes of all frames that the kernel holds in memory."""
        return sum(frame.resident_bytes() for frame in self._all)

    def close(self) -> None:
        """Unmap all frames. No read is under way."""
        while self._all:
            self._all.pop().close()
        self._free.clear()


def move_pages(source: int, target: int, length: int) -> bool:
    """Move the pages at `source` to `target`, in place of what is there; `source` stays mapped.

    Both are private anonymous memory and page-aligned. False if the system does not do it (not
    Linux, too many mappings); what lies at `source` is untouched then.
    """
    if not sys.platform.startswith("linux"):
        return False
    flags = _MAY_MOVE | _FIXED | _DONT_UNMAP
    return _mremap()(source, length, length, flags, target) == target


def _mremap():
    global _function
    if _function is None:
        # Called with the GIL held: it takes less time than getting the GIL back from other lanes,
        # and touches nothing that a thread could sleep on.
        prototype = ctypes.PYFUNCTYPE(
            ctypes.c_size_t, *[ctypes.c_size_t] * 3, ctypes.c_int, ctypes.c_size_t
        )
        _function = prototype(("mremap", ctypes.PyDLL(None)))
    return _function


_function = None
