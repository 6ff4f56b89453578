"""What this process has used: processor time, page faults, bytes read, memory, energy."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

try:
    import resource
except ImportError:  # Windows
    resource = None

from labkit.runtime.memory import process_memory

POWERCAP = Path("/sys/class/powercap")


class Usage(NamedTuple):
    """Sums since the process began; None is what this platform does not tell.

    Attributes:
        cpu_s: processor time of all threads.
        major_faults: page faults that had to wait for a disk.
        energy_j: joules that the processor packages took, as RAPL counts them, since the first
            call. It is the whole machine's figure: what else runs is in it.
    """

    cpu_s: float
    major_faults: int | None
    energy_j: float | None


def usage() -> Usage:
    """Read the counters. A few microseconds; RAPL, where it can be read, some more."""
    meter = _meter()
    energy_j = meter.read() if meter else None
    if resource is None:
        return Usage(time.process_time(), None, energy_j)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(used.ru_utime + used.ru_stime, used.ru_majflt, energy_j)


def peak_resident_bytes() -> int | None:
    """The most memory that this process has had resident, None where nobody keeps count."""
    peak = process_memory()["peak_rss"]
    if peak is None and resource:
        # Only Linux counts this in KiB, and there the figure above exists.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if peak is None:
        import psutil

        return getattr(psutil.Process().memory_info(), "peak_wset", None)
    return peak


def device_read_bytes() -> int | None:
    """Bytes that were read from storage for this process, page faults included. Linux only.

    Reads that the page cache or a memory file system answered are not in it.
    """
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"])


class EnergyMeter:
    """Sums RAPL's package counters, which wrap around every few minutes under load.

    Args:
        root: the directory of the kernel's powercap zones.

    Raises:
        OSError, ValueError: there is no package zone that this user can read.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._zones: list[tuple[int, int]] = []
        self._total_uj = 0
        try:
            for zone in sorted(root.glob("intel-rapl:*")):
                # intel-rapl:0 is a package; intel-rapl:0:1 is a part of it, counted there already.
                if zone.name.count(":") != 1 or "package" not in (zone / "name").read_text():
                    continue
                span = int((zone / "max_energy_range_uj").read_text())
                self._zones.append((os.open(zone / "energy_uj", os.O_RDONLY), span))
            if not self._zones:
                raise FileNotFoundError(f"no RAPL package in {root}")
            self._last = self._counters()
        except BaseException:
            self.close()
            raise

    def read(self) -> float | None:
        """Joules since the meter was made; None once a counter cannot be read."""
        try:
            now = self._counters()
        except (OSError, ValueError):
            return None
        for (_, span), before, after in zip(self._zones, self._last, now, strict=True):
            self._total_uj += after - before if after >= before else after - before + span
        self._last = now
        return self._total_uj / 1e6

    def close(self) -> None:
        """Close the counters' files."""
        while self._zones:
            os.close(self._zones.pop()[0])

    def _counters(self) -> list[int]:
        return [int(os.pread(fd, 32, 0)) for fd, _ in self._zones]


@functools.cache
def _meter() -> EnergyMeter | None:
    if sys.platform.startswith("linux"):
        # Since 2020 most kernels let the superuser alone read energy: a clock for side channels.
        with contextlib.suppress(OSError, ValueError):
            return EnergyMeter()
    return None
