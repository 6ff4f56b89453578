"""Pages that go round: from an evicted slice to a frame that is read into, and on to the next.

A read into fresh memory makes the kernel find and clear a page for every 4 KiB, which costs
several times the processor time of the read itself. So the pages of an evicted slice are moved,
not freed: `mremap` hands them from address to address without a copy.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque

from labkit.runtime.memory import PAGE, PageRange

_MAY_MOVE, _FIXED, _DONT_UNMAP = 1, 2, 4  # of mremap(2); the last is in Linux 5.7 and later


class Frame(PageRange):
    """Memory that one slice is read into before it goes to where it is used."""

    filled = False
    """Whether it holds pages already, of a slice that was evicted."""


class FramePool:
    """Frames for slices of at most `n_pages` pages. Safe between threads."""

    def __init__(self, n_pages: int) -> None:
        self._length = n_pages * PAGE
        self._filled: deque[Frame] = deque()
        self._empty: deque[Frame] = deque()
        self._all: list[Frame] = []

    @property
    def n_filled(self) -> int:
        """How many frames hold pages and wait for a read."""
        return len(self._filled)

    def take(self) -> Frame:
        """A frame, with pages if there is one."""
        for frames in (self._filled, self._empty):
            try:
                return frames.pop()
            except IndexError:
                pass
        return self._make()

    def take_empty(self) -> Frame:
        """A frame without pages."""
        try:
            return self._empty.pop()
        except IndexError:
            return self._make()

    def give(self, frame: Frame, *, filled: bool) -> None:
        """A frame comes back, with pages or without."""
        (self._filled if filled else self._empty).append(frame)

    def trim(self, n_kept: int) -> None:
        """Give the pages of all waiting frames but `n_kept` back to the system."""
        while len(self._filled) > n_kept:
            frame = self._filled.popleft()
            frame.drop(0, frame.length)
            self._empty.append(frame)

    def close(self) -> None:
        """Unmap all frames. No read is under way."""
        while self._all:
            self._all.pop().close()

    def _make(self) -> Frame:
        frame = Frame(self._length)
        self._all.append(frame)
        return frame


def move_pages(source: int, target: int, length: int) -> bool:
    """Move the pages at `source` to `target`, in place of what is there; `source` stays mapped.

    Both are private anonymous memory and page-aligned. False if the system does not do it (not
    Linux, too many mappings); nothing has happened then.
    """
    if not sys.platform.startswith("linux"):
        return False
    flags = _MAY_MOVE | _FIXED | _DONT_UNMAP
    return _mremap()(source, length, length, flags, target) == target


def _mremap():
    global _function
    if _function is None:
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_size_t, *[ctypes.c_size_t] * 3, ctypes.c_int, ctypes.c_size_t
        )
        _function = prototype(("mremap", ctypes.CDLL(None)))
    return _function


_function = None
