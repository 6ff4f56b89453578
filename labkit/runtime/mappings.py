"""How many mappings a process may have, of which moved pages take some: never more than half.

Pages that were moved are mappings of their own (`labkit.runtime.frames`). At the system's limit no
memory can be mapped any more, by nobody in the process: no thread starts, and llama.cpp ends it.
"""

from __future__ import annotations

import threading
from pathlib import Path

_USUAL = 65530

_lock = threading.Lock()
_taken = 0


def most_mappings() -> int:
    """What the system allows a process (vm.max_map_count)."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return _USUAL


def take_mappings(n: int) -> bool:
    """Set `n` mappings aside; False if all sessions together would have more than half."""
    global _taken
    with _lock:
        fits = _taken + n <= most_mappings() // 2
        _taken += n * fits
    return fits


def give_mappings(n: int) -> None:
    """What was set aside is not needed any more."""
    global _taken
    with _lock:
        _taken -= n
