"""A memory cgroup for a measured process: made, joined and always removed (v1 and v2)."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import BenchError

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_PREFIX = "labkit-bench-"
_number = itertools.count()


@dataclass(frozen=True)
class _Files:
    """What the two versions call the same things."""

    limit: str
    swap: str
    peak: str
    events: str


_FILES = {
    1: _Files(
        "memory.limit_in_bytes",
        "memory.memsw.limit_in_bytes",
        "memory.max_usage_in_bytes",
        "memory.oom_control",
    ),
    2: _Files("memory.max", "memory.swap.max", "memory.peak", "memory.events"),
}


@dataclass(frozen=True)
class MemoryCgroup:
    """A memory cgroup that this process made.

    Attributes:
        directory: where it is.
        version: of cgroups, 1 or 2.
        limit_bytes: what its processes may use together, their page cache counted.
        swap_note: empty where swap counts as well or there is none; else what could not be set.
    """

    directory: Path
    version: int
    limit_bytes: int
    swap_note: str = ""

    def add(self, pid: int) -> None:
        """Move a process in. Memory that it has already stays charged to where it was.

        Raises:
            BenchError: the kernel refuses.
        """
        try:
            (self.directory / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise BenchError(
                f"{self.directory}: process {pid} cannot be moved into this memory cgroup: "
                f"{error.strerror}. {_ADVICE}"
            ) from error

    def peak_bytes(self) -> int | None:
        """The most that was ever charged, page cache counted; None where no file says so."""
        try:
            return int((self.directory / _FILES[self.version].peak).read_text())
        except (OSError, ValueError):
            return None

    def oom_kills(self) -> int:
        """Processes that the kernel ended here because memory ran out."""
        with contextlib.suppress(OSError, ValueError):
            for line in (self.directory / _FILES[self.version].events).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return 0

    def remove(self) -> None:
        """End what still runs inside and remove the directory.

        Raises:
            BenchError: it cannot be removed within ten seconds.
        """
        # Page cache left behind would stay charged to the group above (version 1 alone has this).
        if (force := self.directory / "memory.force_empty").exists():
            with contextlib.suppress(OSError):
                force.write_text("0")
        until = time.monotonic() + 10
        while True:
            try:
                self.directory.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise BenchError(
                        f"{self.directory}: this memory cgroup cannot be removed: "
                        f"{error.strerror}. `rmdir` it when its processes are gone."
                    ) from error
            for pid in self._pids():
                with contextlib.suppress(OSError):
                    os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
            time.sleep(0.05)

    def _pids(self) -> list[int]:
        try:
            return [int(pid) for pid in (self.directory / "cgroup.procs").read_text().split()]
        except OSError:
            return []


_ADVICE = (
    "Run as root, or set the limit from outside, for example with `systemd-run --user --scope "
    "-p MemoryMax=1600M labkit bench ...` without --memory-limit-mib: labkit sees such a limit."
)


@contextlib.contextmanager
def memory_cgroup(
    limit_bytes: int, *, root: Path = ROOT, own: Path = OWN
) -> Iterator[MemoryCgroup]:
    """Make a cgroup with this limit, below this process's own where that can be, and remove it.

    Raises:
        BenchError: there are no memory cgroups, or this user cannot make one.
    """
    group = _make(limit_bytes, root, own)
    try:
        yield group
    finally:
        group.remove()


def why_not(*, root: Path = ROOT, own: Path = OWN) -> str | None:
    """Why no memory cgroup can be made here, None where one can: it is tried."""
    try:
        with memory_cgroup(1 << 30, root=root, own=own):
            return None
    except BenchError as error:
        return str(error)


def remove_stale(*, root: Path = ROOT, own: Path = OWN) -> list[Path]:
    """Remove the cgroups of benchmarks that were killed; returns what was removed."""
    removed = []
    for place, _ in _places(root, own):
        for directory in place.glob(f"{_PREFIX}*"):
            pid = directory.name.removeprefix(_PREFIX).partition("-")[0]
            if pid.isdecimal() and not _is_alive(int(pid)):
                with contextlib.suppress(OSError):
                    directory.rmdir()
                    removed.append(directory)
    return removed


def _make(limit_bytes: int, root: Path, own: Path) -> MemoryCgroup:
    reason = "this system has no memory cgroups"
    for place, version in _places(root, own):
        try:
            return _make_below(place, version, limit_bytes)
        except OSError as error:
            reason = f"{place}: {error.strerror or error}"
    raise BenchError(f"No memory cgroup can be made here: {reason}. {_ADVICE}")


def _make_below(place: Path, version: int, limit_bytes: int) -> MemoryCgroup:
    if version == 2 and "memory" not in (place / "cgroup.subtree_control").read_text().split():
        # Refused (EBUSY) where processes live in the group itself; one further up may allow it.
        (place / "cgroup.subtree_control").write_text("+memory")
    directory = place / f"{_PREFIX}{os.getpid()}-{next(_number)}"
    directory.mkdir()
    files = _FILES[version]
    try:
        (directory / files.limit).write_text(str(limit_bytes))
        swap = directory / files.swap
        note = ""
        try:
            swap.write_text(str(limit_bytes if version == 1 else 0))
        except OSError as error:
            note = f"swap is not limited ({error.strerror}): the process may use more than memory"
        return MemoryCgroup(directory, version, limit_bytes, note)
    except BaseException:
        directory.rmdir()
        raise


def _places(root: Path, own: Path) -> Iterator[tuple[Path, int]]:
    """Cgroups below which one may be made, with their version: the process's own, then above."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, version = root / "memory", 1
        elif controllers == "":
            base, version = (root / "unified" if (root / "unified").is_dir() else root), 2
        else:
            continue
        directory = base / name.lstrip("/")
        for place in (directory, *directory.parents):
            # In a container the name may be the host's; then only the mounted root is visible.
            if place.is_relative_to(base) and (place / "cgroup.procs").exists():
                yield place, version


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
