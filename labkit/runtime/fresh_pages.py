"""`FreshPages`: new memory whose pages lie side by side in physical memory too.

A direct read names every run of physical pages to the disk. Where memory is in use for a while, the
4 KiB pages that the kernel hands out one by one lie anywhere, so a slice is hundreds of runs, and
the read of it takes more than twice the time. Pages that were once part of a huge page stay
together, wherever they are moved.
"""

from __future__ import annotations

import ctypes
import threading

from labkit.runtime.frames import move_pages
from labkit.runtime.memory import PageRange

HUGE_PAGE = 1 << 21
_REGION = 32 * HUGE_PAGE


class FreshPages:
    """Hands out new pages, a huge page's worth at a time. Safe between threads.

    At most one huge page is in memory that nobody was given.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: PageRange | None = None
        self._next = self._filled = self._end = 0

    def move_to(self, target: int, length: int) -> bool:
        """Have the pages at [target, target + length) be new ones; False if that cannot be done."""
        with self._lock:
            if length > self._end - self._next:
                if length > _REGION:
                    return False
                self._begin_region()
            source, self._next = self._next, self._next + length
            while self._filled < self._next:
                ctypes.memset(self._filled, 0, 1)
                self._filled += HUGE_PAGE
            return move_pages(source, target, length)

    def close(self) -> None:
        """Give back what nobody was given."""
        with self._lock:
            region, self._region = self._region, None
            self._next = self._filled = self._end = 0
            if region:
                region.close()

    def _begin_region(self) -> None:
        if self._region:
            self._region.close()
        self._region = PageRange(_REGION + HUGE_PAGE, huge=True)
        self._next = self._filled = -(-self._region.base // HUGE_PAGE) * HUGE_PAGE
        self._end = self._next + _REGION
