"""The page cache of a model's files: emptied before a cold start, and looked at afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_SPAN = 1 << 30


def drop(paths: Sequence[Path]) -> bool:
    """Ask the kernel to forget these files' pages; False where the platform has no way to ask.

    It is a wish: pages that are dirty, or that another process maps, stay, and a memory file
    system has nothing but its pages. `cached_pct` says what is left.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system that is mounted read-only
                os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return True


def cached_pct(paths: Sequence[Path]) -> float | None:
    """Share of these files' pages that are in memory (mincore); None where it cannot be told.

    The kernel tells a file's owner and those who may write it, and nobody else.
    """
    if not sys.platform.startswith("linux"):
        return None
    total = cached = 0
    for path in paths:
        if not os.access(path, os.W_OK) and path.stat().st_uid != os.getuid():
            return None
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for start in range(0, size, _SPAN):
                flags = _resident_pages(file.fileno(), start, min(_SPAN, size - start))
                if flags is None:
                    return None
                total += len(flags)
                cached += int(flags.sum())
    return 100.0 * cached / total if total else 0.0


def _resident_pages(fd: int, start: int, nbytes: int) -> np.ndarray | None:
    libc = ctypes.CDLL(None, use_errno=True)
    flags = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
    # Copy on write only so that ctypes gives the address; nothing is ever written.
    with mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY, offset=start) as view:
        anchor = ctypes.c_char.from_buffer(view)
        address = ctypes.addressof(anchor)
        del anchor
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), flags) != 0:
            return None
    return np.frombuffer(flags.raw, np.uint8) & 1
