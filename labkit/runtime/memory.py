"""Address ranges for expert weights: reserved whole, committed by reading, given back by page.

A window is as large as a whole expert tensor, but only the pages of experts that were read cost
memory. Each address has the same offset within a page as the file offset that it stands for, so
that whole blocks of a file can be read straight to where the weights are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from labkit.errors import BudgetError, StreamingRefusedError

PAGE = mmap.PAGESIZE
BLOCK = 4096  # direct I/O unit that labkit relies on; the reader checks the file system's word


class FileWindow:
    """Anonymous memory that stands for bytes [offset, offset + nbytes) of a file.

    Raises:
        BudgetError: the system refuses to reserve the range.
        StreamingRefusedError: this platform cannot reserve memory without committing it.
    """

    def __init__(self, offset: int, nbytes: int) -> None:
        if sys.platform == "win32":
            raise StreamingRefusedError(
                "Streaming needs memory that is reserved first and committed page by page, which "
                "labkit does on Linux and macOS only. Open the model with resident=True."
            )
        self.start = offset - offset % PAGE
        self._length = -(-(offset + nbytes - self.start) // PAGE) * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._map = mmap.mmap(-1, self._length, flags=flags)
        except OSError as error:
            raise BudgetError(
                f"The system does not reserve {self._length / 2**20:.0f} MiB of addresses for an "
                f"expert tensor: {error}. Look at vm.overcommit_memory and `ulimit -v`."
            ) from error
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            # A huge page would commit neighbours that nobody asked for; some kernels have none.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self._view = memoryview(self._map)
        anchor = ctypes.c_char.from_buffer(self._map)
        self._base = ctypes.addressof(anchor)
        del anchor

    def address(self, offset: int) -> int:
        """Where the byte at file `offset` lies in memory."""
        return self._base + offset - self.start

    def view(self, start: int, stop: int) -> memoryview:
        """Writable memory for file bytes [start, stop); may reach to the window's last page."""
        return self._view[start - self.start : stop - self.start]

    def release(self, start: int, stop: int) -> None:
        """Give the pages of file bytes [start, stop), both page-aligned, back to the system."""
        if stop > start:
            self._map.madvise(mmap.MADV_DONTNEED, start - self.start, stop - start)

    def resident_bytes(self) -> int:
        """Bytes of this window that the kernel holds in memory (mincore). Linux only."""
        pages = ctypes.create_string_buffer(self._length // PAGE)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(self._base), ctypes.c_size_t(self._length), pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore failed")
        return int((np.frombuffer(pages.raw, np.uint8) & 1).sum()) * PAGE

    def close(self) -> None:
        """Unmap. The caller has made sure that nothing computes from this memory any more."""
        self._view.release()
        self._map.close()


class ExpertWindow(FileWindow):
    """The window of one expert tensor: `n_expert` slices of `slice_bytes`, one after another."""

    def __init__(self, offset: int, slice_bytes: int, n_expert: int) -> None:
        super().__init__(offset, slice_bytes * n_expert)
        self.offset = offset
        self.slice_bytes = slice_bytes
        self.n_expert = n_expert

    def span(self, expert: int) -> tuple[int, int]:
        """File bytes [start, stop) of one expert's slice."""
        start = self.offset + expert * self.slice_bytes
        return start, start + self.slice_bytes

    def release_expert(self, expert: int, is_resident: Callable[[int], bool]) -> None:
        """Give back the pages of an expert, but none that a resident expert has bytes in.

        Slices are not page-aligned and may be smaller than a page, so the first and the last page
        can hold bytes of any number of neighbours.
        """
        start, stop = self.span(expert)
        first, last = start // PAGE, (stop - 1) // PAGE
        while first <= last and self._page_in_use(first, is_resident):
            first += 1
        while last > first and self._page_in_use(last, is_resident):
            last -= 1
        self.release(first * PAGE, (last + 1) * PAGE)

    def _page_in_use(self, page: int, is_resident: Callable[[int], bool]) -> bool:
        low = max(0, (page * PAGE - self.offset) // self.slice_bytes)
        high = min(self.n_expert - 1, (page * PAGE + PAGE - 1 - self.offset) // self.slice_bytes)
        return any(is_resident(expert) for expert in range(low, high + 1))


def process_memory() -> dict[str, int | None]:
    """Bytes of this process as the kernel counts them: now, at its peak, and by kind.

    Keys rss, peak_rss, anonymous, file. What the platform does not tell is None.
    """
    found: dict[str, int | None] = dict.fromkeys(("rss", "peak_rss", "anonymous", "file"))
    names = {"VmRSS": "rss", "VmHWM": "peak_rss", "RssAnon": "anonymous", "RssFile": "file"}
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import psutil

        found["rss"] = psutil.Process().memory_info().rss
        return found
    for line in status.splitlines():
        key, _, value = line.partition(":")
        if key in names:
            found[names[key]] = int(value.split()[0]) * 1024
    return found
