"""What this machine offers, found out by trying; every function answers on any platform."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

#: Numbers of the system call `userfaultfd` by machine name.
_USERFAULTFD = {"x86_64": 323, "aarch64": 282, "arm64": 282, "riscv64": 282, "ppc64le": 364}
_UFFD_USER_MODE_ONLY = 1
_UFFDIO_API = 0xC018AA3F
_UFFD_API = 0xAA
_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a huge number


@dataclass(frozen=True)
class MemoryLimit:
    """The tightest memory limit that a cgroup sets: bytes, bytes in use, and the file it is in.

    Page cache counts in a cgroup's usage but gives way to an allocation, so it is left out here.
    """

    limit_bytes: int
    used_bytes: int
    source: Path


def cgroup_memory_limit(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> MemoryLimit | None:
    """The tightest limit on this process among its cgroup and the ones above it, v1 or v2.

    None where no cgroup sets a limit and on systems without cgroups.
    """
    limits = []
    for directory, limit_file, used_file in _memory_cgroups(root, own):
        limit = _read_number(directory / limit_file)
        if limit is not None and limit < _NO_LIMIT:
            used = max(0, (_read_number(directory / used_file) or 0) - _page_cache(directory))
            limits.append(MemoryLimit(limit, used, directory / limit_file))
    return min(limits, key=lambda limit: limit.limit_bytes, default=None)


def usable_memory_bytes() -> int:
    """Memory that a new allocation can take now: what the system has left, within the limit."""
    available = psutil.virtual_memory().available
    limit = cgroup_memory_limit()
    return available if limit is None else min(available, limit.limit_bytes - limit.used_bytes)


def addresses_left_bytes() -> int | None:
    """Addresses that this process may still map under `ulimit -v`; None where nothing limits it."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):  # Windows, or no /proc
        return None
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - pages * resource.getpagesize())


def open_userfaultfd() -> int:
    """A descriptor of `userfaultfd` for faults of user code, which needs no privilege.

    Raises:
        OSError: the system has none for us; the text says why.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, f"{platform.system()} has no userfaultfd")
    number = _USERFAULTFD.get(platform.machine())
    if number is None:
        raise OSError(
            errno.ENOSYS,
            f"the number of this system call on {platform.machine()} is not known to labkit",
        )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    flags = os.O_CLOEXEC | os.O_NONBLOCK | _UFFD_USER_MODE_ONLY
    fd = libc.syscall(ctypes.c_long(number), ctypes.c_int(flags))
    if fd < 0:
        code = ctypes.get_errno()
        name = errno.errorcode.get(code, code)
        raise OSError(code, f"the kernel refuses it ({name}: {os.strerror(code)})")
    request = (ctypes.c_uint64 * 3)(_UFFD_API, 0, 0)
    if libc.ioctl(ctypes.c_int(fd), ctypes.c_ulong(_UFFDIO_API), request) != 0:
        code = ctypes.get_errno()
        os.close(fd)
        raise OSError(code, f"its handshake fails ({os.strerror(code)})")
    return fd


def userfaultfd_problem() -> str | None:
    """Why `userfaultfd` cannot be used here, or None where the kernel gave one and answered."""
    try:
        os.close(open_userfaultfd())
    except OSError as error:
        return error.strerror
    return None


def file_system_of(path: Path) -> str:
    """Name of the file system that holds `path`, such as "ext4"; "unknown" where none is told."""
    path = path.resolve()
    best, name = -1, "unknown"
    for partition in psutil.disk_partitions(all=True):
        mount = Path(partition.mountpoint)
        depth = len(mount.parts)
        if depth >= best and path.is_relative_to(mount):
            best, name = depth, partition.fstype or name
    return name


def _memory_cgroups(root: Path, own: Path) -> list[tuple[Path, str, str]]:
    """(directory, limit file, usage file) of each memory cgroup from the process's to the root."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            base, files = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, files = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        directory = base / name.lstrip("/")
        # In a container the path may be the host's; then only the mounted root is visible.
        found += [(d, *files) for d in (directory, *directory.parents) if d.is_relative_to(base)]
    return found


def _page_cache(cgroup: Path) -> int:
    """Bytes of files that this cgroup and those below it hold in memory."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
    kinds = ("inactive_file", "active_file")
    # v1 counts the groups below under names of their own, v2 always includes them.
    return sum(counts.get(f"total_{kind}", counts.get(kind, 0)) for kind in kinds)


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
