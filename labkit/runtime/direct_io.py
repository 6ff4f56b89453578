"""Whether a file can be read past the page cache."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from labkit.errors import ReadError
from labkit.runtime.memory import BLOCK


def choose_direct_io(paths: Sequence[Path], wanted: bool | None) -> tuple[bool, str]:
    """Whether to read `paths` directly, and why; `wanted` None is where it can be done.

    Raises:
        ReadError: it is wanted and cannot be done.
    """
    if wanted is False:
        return False, "buffered reads were asked for"
    problem = next(filter(None, map(direct_io_problem, paths)), None)
    if problem is None:
        return True, "the file system takes direct reads"
    if wanted:
        raise ReadError(f"{problem} Open the model with direct_io=False or None.")
    return False, problem


def direct_io_problem(path: Path) -> str | None:
    """Why direct I/O cannot be used on `path`, or None where a direct read of it worked."""
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
        return "This platform has no direct I/O (O_DIRECT); reads go through the page cache."
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return f"{path}: this file system has no direct I/O; reads go through the page cache."
        raise ReadError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        with mmap.mmap(-1, BLOCK) as block, memoryview(block) as view:
            os.preadv(file, [view], 0)
    except OSError as error:
        return f"{path}: a direct read of {BLOCK} bytes fails ({error.strerror})."
    finally:
        os.close(file)
    return None
