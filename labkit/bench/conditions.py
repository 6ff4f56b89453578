"""What a benchmark could not control, in sentences: a reader judges the figures by it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import psutil

from labkit.gguf_map import GGUFMap
from labkit.host import cgroup_memory_limit, file_system_of

try:
    import resource
except ImportError:  # Windows
    resource = None

_MEMORY_FILE_SYSTEMS = frozenset(("tmpfs", "ramfs"))


class Share:
    """The cores' time from its making on: what other processes, and the host, took of it."""

    def __init__(self) -> None:
        self._times, self._own_s = psutil.cpu_times(), _children_s()

    def taken_pct(self) -> tuple[float | None, float] | None:
        """Percent that other processes took (None where children are not counted) and the host.

        Children count once they have ended. None when no time has passed.
        """
        now = psutil.cpu_times()
        spent = {name: getattr(now, name) - getattr(self._times, name) for name in now._fields}
        # Linux counts guests within user time, and waiting for a disk is not work.
        total = sum(v for name, v in spent.items() if not name.startswith("guest"))
        if total <= 0:
            return None
        stolen = spent.get("steal", 0.0)
        idle = spent["idle"] + spent.get("iowait", 0.0) + stolen
        own = _children_s() - self._own_s
        others = max(0.0, 100 * (total - idle - own) / total) if resource else None
        return others, 100 * stolen / total


class Watch:
    """Looks at the machine from its making to `notes`.

    Args:
        gguf: the model that is measured.
        limited: whether the runs have a memory limit of their own.
    """

    def __init__(self, gguf: GGUFMap, *, limited: bool) -> None:
        self._gguf = gguf
        self._limited = limited
        self._runs: list[dict[str, Any]] = []
        self._share = Share()

    def add(self, run: dict[str, Any]) -> None:
        """Take a run's row."""
        self._runs.append(run)

    def notes(self) -> list[str]:
        """The sentences, in the order in which a reader would ask."""
        found = [
            *self._processor(),
            _frequency(),
            *self._memory(),
            *self._page_cache(),
            *_read_ahead(self._gguf.paths[0]),
        ]
        notes = (run.get("swap_note") for run in self._runs)
        return [*found, *dict.fromkeys(note for note in notes if note)]

    def _processor(self) -> list[str]:
        taken = self._share.taken_pct()
        if taken is None:
            return []
        others, stolen = taken
        notes = []
        if others is not None:
            worst = max((run.get("others_pct") or 0.0 for run in self._runs), default=0.0)
            notes.append(
                f"The {psutil.cpu_count() or 1} cores were not reserved: other processes took "
                f"{others:.0f} % of their time during the benchmark (in the worst run "
                f"{worst:.0f} %), and no process was tied to a core."
            )
        if stolen >= 0.5:
            notes.append(
                f"This is a virtual machine, and its host took {stolen:.1f} % of the cores' time."
            )
        return notes

    def _memory(self) -> list[str]:
        if self._limited:
            return []
        outer = cgroup_memory_limit()
        if outer is not None:
            return [
                f"A memory limit of {outer.limit_bytes / 2**20:,.0f} MiB was there already "
                f"({outer.source}); it holds for this benchmark and its processes together."
            ]
        return [
            "There was no memory limit: after a first reading the page cache can hold the whole "
            "model, and mmap is then as good as resident."
        ]

    def _page_cache(self) -> list[str]:
        if not hasattr(os, "posix_fadvise"):
            return ["This system cannot be asked to drop a file from its page cache: cold starts "
                    "may have been warm."]  # fmt: skip
        kind = file_system_of(self._gguf.paths[0])
        if kind in _MEMORY_FILE_SYSTEMS:
            return [
                f"The model lies on {kind}, in memory: its pages cannot be dropped, are charged to "
                "whoever wrote them, and a mapped file never waits. mmap does not feel a memory "
                "limit there, and the ratios to it say nothing about a disk."
            ]
        left = [run["cached_pct"] for run in self._runs if run.get("cached_pct") is not None]
        if not left:
            return ["Whether the page cache had dropped the model before a run cannot be seen."]
        if max(left) > 1:
            return [
                f"Up to {max(left):.0f} % of the model stayed in the page cache when a run began "
                "(another process maps it?): cold starts were warmer than cold."
            ]
        return []


def _children_s() -> float:
    """Processor time of the processes that were started here and have ended."""
    if resource is None:
        return 0.0
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _frequency() -> str:
    governor = None
    with contextlib.suppress(OSError):
        path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
        governor = path.read_text().strip()
    if governor is None:
        return "Neither the clock frequency nor the temperature of the processor can be seen here."
    return (
        f"Clock frequency and temperature were left to the system (governor {governor}); "
        "a processor that gets hot slows down."
    )


def _read_ahead(path: Path) -> list[str]:
    """How far the kernel reads ahead on this disk, which decides how good mmap is."""
    device = path.stat().st_dev
    with contextlib.suppress(OSError, ValueError, AttributeError):
        name = f"{os.major(device)}:{os.minor(device)}"
        kib = int(Path(f"/sys/class/bdi/{name}/read_ahead_kb").read_text())
        if kib > 128:
            return [
                f"The disk reads ahead {kib:,} KiB (128 is usual), which suits a mapped file that "
                "is read in order and hurts one that is read here and there."
            ]
    return []
