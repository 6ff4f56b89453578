"""Files that break while a session reads them, by the kernel and not by a patched function.

A reader's descriptor is replaced under it (dup2), so whatever way it reads, the system answers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

needs_linux = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="descriptors are found through /proc"
)


def descriptors(path: Path) -> list[int]:
    """Descriptors of this process that are open on `path`."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if link.readlink() == path:
                found.append(int(link.name))
    return found


def io_error(size: int) -> int:
    """A descriptor whose first `size` bytes the kernel refuses with EIO, as a broken disk does.

    They are this process's own memory at the lowest addresses, where nothing is.
    """
    lowest = int(Path("/proc/self/maps").read_text().partition("-")[0], 16)
    if lowest <= size:
        pytest.skip("this program lies at the lowest addresses of its memory")
    return os.open("/proc/self/mem", os.O_RDONLY)


def end_of_file(_: int) -> int:
    """A descriptor of a file that has ended before it began."""
    return os.open(os.devnull, os.O_RDONLY)


FAULTS: dict[str, Callable[[int], int]] = {"EIO": io_error, "end": end_of_file}
WORDS = {"EIO": "Input/output error", "end": "file ends at byte"}


@contextlib.contextmanager
def broken(path: Path, fault: str) -> Iterator[Callable[[], None]]:
    """Yields what breaks every descriptor of `path`; on leaving, it reads well again."""
    found = descriptors(path)
    assert found, f"nobody has {path} open"
    kept = {file: os.dup(file) for file in found}

    def now() -> None:
        other = FAULTS[fault](path.stat().st_size)
        for file in found:
            os.dup2(other, file)
        os.close(other)

    try:
        yield now
    finally:
        for file, copy in kept.items():
            os.dup2(copy, file)
            os.close(copy)
