"""Address ranges for weights: reserved whole, committed by reading, given back by page.

A window is as large as a whole tensor, but only the pages of experts that were read cost memory.
Each address has the same offset within a page as the file offset that it stands for, so that whole
blocks of a file can be read straight to where the weights are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from labkit.errors import BudgetError, StreamingRefusedError

PAGE = mmap.PAGESIZE
BLOCK = 4096  # direct I/O unit that labkit relies on; the reader checks the file system's word

_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of madvise(2), since Linux 4.14

# Python 3.13 names this flag; Linux has always had it.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform.startswith("linux") else 0)


class PageRange:
    """Anonymous memory of `length` bytes, a multiple of the page size, of which none is there yet.

    Args:
        length: bytes to reserve.
        huge: take huge pages where the system has them, for a range that is filled as a whole. A
            direct read names each page to the disk, and with fewer names large reads go faster.

    Raises:
        BudgetError: the system refuses to reserve the range.
        StreamingRefusedError: this platform cannot reserve memory without committing it.
    """

    def __init__(self, length: int, *, huge: bool = False) -> None:
        if sys.platform == "win32":
            raise StreamingRefusedError(
                "Streaming needs memory that is reserved first and committed page by page, which "
                "labkit does on Linux and macOS only. Open the model with resident=True."
            )
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            self._map = mmap.mmap(-1, length, flags=flags)
        except OSError as error:
            raise BudgetError(
                f"The system does not reserve {length / 2**20:.0f} MiB of addresses for expert "
                f"weights: {error}. Look at vm.overcommit_memory and `ulimit -v`."
            ) from error
        if sys.platform.startswith("linux"):
            # A forked child finds zeros here and shares nothing: no page is copied because two
            # processes have it, and no direct read that is under way ends in the child's copy.
            with contextlib.suppress(OSError):
                self._map.madvise(_WIPE_ON_FORK)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            # A huge page commits neighbours that perhaps nobody asked for; some kernels have none.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        self.length = length
        self.memory = memoryview(self._map)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.base = ctypes.addressof(anchor)
        del anchor

    def drop(self, start: int, stop: int) -> None:
        """Give the pages of bytes [start, stop), both page-aligned, back to the system."""
        if stop <= start:
            return
        try:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # It is locked: mapped while another session of this process loaded its model, which
            # locks all new memory for a moment (`labkit.runtime.native`).
            length = ctypes.c_size_t(stop - start)
            ctypes.CDLL(None).munlock(ctypes.c_void_p(self.base + start), length)
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def resident_bytes(self) -> int:
        """Bytes of this range that the kernel holds in memory (mincore). Linux only.

        Where something was looked at that is not there, as after a read that failed, the kernel
        shows its one page of zeros: it counts here, though it takes no memory of its own.
        """
        pages = ctypes.create_string_buffer(self.length // PAGE)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(self.base), ctypes.c_size_t(self.length), pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore failed")
        return int((np.frombuffer(pages.raw, np.uint8) & 1).sum()) * PAGE

    def close(self) -> None:
        """Unmap. The caller has made sure that nothing uses this memory any more.

        A read that is stuck has a view of its own, with which the memory stays until it ends.
        """
        self.memory.release()
        with contextlib.suppress(BufferError):
            self._map.close()


class Window:
    """Memory that stands for bytes of a file from `start`, which is page-aligned, on.

    Args:
        start: the file offset of the window's first byte.
        pages: the range of memory.
        at: where in `pages` the window begins, page-aligned.
    """

    whole_pages = False
    """Whether a read into it must fill whole pages even where the file is not read directly."""

    def __init__(self, start: int, pages: PageRange, at: int = 0) -> None:
        self.start = start
        self.pages = pages
        self._at = at

    def address(self, offset: int) -> int:
        """Where the byte at file `offset` lies in memory."""
        return self.pages.base + self._at + offset - self.start

    def view(self, start: int, stop: int) -> memoryview:
        """Writable memory for file bytes [start, stop); may reach to the window's last page."""
        return self.pages.memory[self._at + start - self.start : self._at + stop - self.start]

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """`view`, in one piece."""
        return [self.view(start, stop)]

    def landed(self, whole: bool) -> None:
        """A read into the window ended; `whole` if it brought all bytes."""


class FileWindow(Window):
    """A window with memory of its own for file bytes [offset, offset + nbytes)."""

    def __init__(self, offset: int, nbytes: int, *, huge: bool = False) -> None:
        start, stop = page_span(offset, offset + nbytes)
        super().__init__(start, PageRange(stop - start, huge=huge))

    def release(self, start: int, stop: int) -> None:
        """Give the pages of file bytes [start, stop), both page-aligned, back to the system."""
        self.pages.drop(start - self.start, stop - self.start)

    def resident_bytes(self) -> int:
        """Bytes that the kernel holds in memory."""
        return self.pages.resident_bytes()

    def close(self) -> None:
        """Unmap."""
        self.pages.close()


class ExpertWindow(FileWindow):
    """The window of one expert tensor: `n_expert` slices of `slice_bytes`, one after another."""

    def __init__(self, offset: int, slice_bytes: int, n_expert: int, *, huge: bool = False) -> None:
        super().__init__(offset, slice_bytes * n_expert, huge=huge)
        self.offset = offset
        self.slice_bytes = slice_bytes
        self.n_expert = n_expert
        self.core_bytes = max(0, (slice_bytes + 1) // PAGE - 1) * PAGE
        """Bytes of a slice's `core`, the same for every expert; 0 where slices are that small."""

    def span(self, expert: int) -> tuple[int, int]:
        """File bytes [start, stop) of one expert's slice."""
        start = self.offset + expert * self.slice_bytes
        return start, start + self.slice_bytes

    def core(self, expert: int) -> tuple[int, int]:
        """File bytes [start, stop) of whole pages that hold this slice and nothing else.

        However a slice lies to the pages, it has so many of them, so that those of one slice fit
        another; the pages before and after, three at most, may hold bytes of neighbours.
        """
        low = -(-(self.offset + expert * self.slice_bytes) // PAGE) * PAGE
        return low, low + self.core_bytes

    def releasable(self, expert: int, is_resident: Callable[[int], bool]) -> tuple[int, int]:
        """File bytes of the pages of an expert, but of none that a resident expert has bytes in.

        Slices are not page-aligned and may be smaller than a page, so the first and the last page
        can hold bytes of any number of neighbours.
        """
        start, stop = self.span(expert)
        first, last = start // PAGE, (stop - 1) // PAGE
        while first <= last and self._page_in_use(first, is_resident):
            first += 1
        while last > first and self._page_in_use(last, is_resident):
            last -= 1
        return first * PAGE, (last + 1) * PAGE

    def release_all_but(self, kept: Iterable[int]) -> None:
        """Give every page back that none of the experts in `kept` has bytes in."""
        at = self.start
        for expert in sorted(kept):
            first, end = page_span(*self.span(expert))
            self.release(at, first)
            at = end
        self.release(at, self.start + self.pages.length)

    def experts_at(self, offset: int) -> range:
        """The experts that have bytes in the page of file `offset`."""
        page = offset - offset % PAGE
        low = max(0, (page - self.offset) // self.slice_bytes)
        high = min(self.n_expert - 1, (page + PAGE - 1 - self.offset) // self.slice_bytes)
        return range(low, high + 1)

    def _page_in_use(self, page: int, is_resident: Callable[[int], bool]) -> bool:
        return any(map(is_resident, self.experts_at(page * PAGE)))


def page_span(start: int, stop: int) -> tuple[int, int]:
    """[start, stop) widened to whole pages."""
    return start - start % PAGE, -(-stop // PAGE) * PAGE


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
