"""What no implementation can beat: the roofline of a token, from rates alone.

A token needs operations, bytes from memory, and bytes from flash where they are not in memory.
Each divided by the device's rate is a time, and the longest of them is a lower bound. The ridge
point, operations a second over bytes a second, says from how many operations a byte on computing
is the limit instead of memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from labkit.errors import OptionError


@dataclass(frozen=True, slots=True)
class LatencyFloor:
    """Lower bounds on the time of one step, in seconds; NaN where a rate is not known.

    `compute_s` by operations, `dram_s` by bytes from memory, `flash_s` by bytes from flash (the
    three can overlap, so the longest is the bound).
    """

    compute_s: float
    dram_s: float
    flash_s: float

    @property
    def floor_s(self) -> float:
        """The longest of those that are known; NaN if none is."""
        known = [t for t in (self.compute_s, self.dram_s, self.flash_s) if not math.isnan(t)]
        return max(known, default=math.nan)

    @property
    def bound_by(self) -> str:
        """Which of them it is: "compute", "DRAM" or "flash"; "unknown" if none is known."""
        names = {"compute": self.compute_s, "DRAM": self.dram_s, "flash": self.flash_s}
        known = {name: t for name, t in names.items() if not math.isnan(t)}
        return max(known, key=lambda name: known[name], default="unknown")


def weight_bytes(n_params: float, bits: float) -> float:
    """Bytes of so many parameters: 1.3e9 at 4 bits are 650e6."""
    return n_params * bits / 8


def ridge_flop_per_byte(ops_per_s: float, bytes_per_s: float) -> float:
    """Operations a byte at which compute and memory take equally long: 30e12 / 68e9 = 441."""
    return _positive("operations a second", ops_per_s) / _positive("bytes a second", bytes_per_s)


def weight_intensity(bits: float, n_tokens: int = 1) -> float:
    """Operations per byte of weights: 2 a parameter and token, so 4 at 4 bits for one token."""
    return 2 * n_tokens / (bits / 8)


def time_floor_s(nbytes: float, bytes_per_s: float) -> float:
    """The least time to move so many bytes; NaN when the rate is NaN."""
    return nbytes / _positive("bytes a second", bytes_per_s)


def _positive(what: str, value: float) -> float:
    if not (value > 0 or math.isnan(value)):
        raise OptionError(f"{what} is {value!r}; a rate must be above 0")
    return value
