"""How long a token takes: compute from the bytes it passes through, reads from those it misses.

The model has few constants on purpose. A token computes for ``weight bytes / decode rate + layers x
fixed time``, and reads for ``missed bytes / (share x flash rate)``. Serially the two add up. Under
overlap the longer one counts whole, and of the shorter one what is not hidden. Where the file is
mapped and memory is short, page faults replace the reads, at a rate of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from labkit.device.profile import DeviceProfile

MIB = 2**20
GB = 1e9


@dataclass(frozen=True)
class Constants:
    """What a device does with a token; see `labkit.device.figures.FIGURES` for each."""

    decode_gb_s: float
    read_share_pct: float = 100.0
    hidden_pct: float = 0.0
    layer_ms: float = 0.0
    fault_mib_s: float = float("nan")

    @classmethod
    def of(cls, profile: DeviceProfile) -> Constants:
        """The constants of a profile; `DeviceError` where the decode rate is missing."""
        given = {
            name: value
            for name in ("read_share_pct", "hidden_pct", "layer_ms", "fault_mib_s")
            if (value := profile.get(name)) is not None
        }
        return cls(profile.need("decode_gb_s"), **given)


@dataclass(frozen=True)
class TokenTime:
    """Seconds of a token; scalars or arrays. `wall_s` is compute plus what reads cost on top."""

    compute_s: np.ndarray
    read_s: np.ndarray
    wall_s: np.ndarray

    @property
    def exposed_s(self) -> np.ndarray:
        """Wall time lost to reads."""
        return self.wall_s - self.compute_s


def token_time(
    constants: Constants,
    *,
    weight_mib: float | np.ndarray,
    layers: float | np.ndarray,
    read_mib: float | np.ndarray = 0.0,
    flash_mib_s: float | np.ndarray = float("inf"),
    overlapped: bool | np.ndarray = False,
) -> TokenTime:
    """The time of one generated token.

    Args:
        weight_mib: weights that computing a token passes through, dense and routed.
        layers: layers, for the fixed time.
        read_mib: expert bytes that a token has to read.
        flash_mib_s: the device's rate at the size and lanes of these reads.
        overlapped: whether reads run beside compute.
    """
    compute = np.asarray(weight_mib) * MIB / GB / constants.decode_gb_s
    compute = compute + np.asarray(layers) * constants.layer_ms / 1000
    read = np.asarray(read_mib) / (flash_mib_s * constants.read_share_pct / 100)
    shorter = np.minimum(compute, read)
    hidden = np.where(overlapped, shorter * constants.hidden_pct / 100, 0.0)
    return TokenTime(compute, read, compute + read - hidden)


def fault_time(
    constants: Constants,
    *,
    weight_mib: float | np.ndarray,
    layers: float | np.ndarray,
    fault_mib: float | np.ndarray,
) -> TokenTime:
    """The time of a token whose missing weights come in by page fault, which waits for each."""
    compute = token_time(constants, weight_mib=weight_mib, layers=layers).compute_s
    read = np.where(np.asarray(fault_mib) > 0, np.asarray(fault_mib) / constants.fault_mib_s, 0.0)
    return TokenTime(compute, read, compute + read)
