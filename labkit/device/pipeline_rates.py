"""How fast the parts of a prefill pipeline work, given by hand or taken from a device profile."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from labkit.errors import OptionError

if TYPE_CHECKING:
    from labkit.device.profile import DeviceProfile

#: Whole layers are read in pieces of this size: the flash curve is flat from here on.
READ_KIB = 4096
_LANES = 4


@dataclass(frozen=True)
class Rates:
    """How fast things go. A rate of infinity costs no time.

    Attributes:
        read_gb_s: reading from flash, 1e9 bytes a second; infinity for weights in memory already.
        copy_gb_s: a copy in memory between reading and use; infinity where reads go straight in.
        layout_gb_s: changing the layout for the device; infinity where it computes from the file's.
        device_gflop_s: the device's real rate in wide products, 1e9 operations a second (a multiply
            and an addition are two). Far below what is advertised.
        cpu_gflop_s: the CPU's, for the tail and for what the device lacks.
        memory_gb_s: at which the device streams weights from memory; its compute takes at least
            that long.
        tile_tokens: the device computes for tokens in groups of this size; an expert that fewer
            tokens chose costs as much as a whole group.
        layer_ms: fixed time of a layer on the device, whatever its width.
        barrier_ms: handing a slot over.
        sync_ms: one operation that goes to the CPU, there and back, without its own time.
    """

    read_gb_s: float
    device_gflop_s: float
    cpu_gflop_s: float
    copy_gb_s: float = math.inf
    layout_gb_s: float = math.inf
    memory_gb_s: float = math.inf
    tile_tokens: int = 1
    layer_ms: float = 0.0
    barrier_ms: float = 0.0
    sync_ms: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            positive = item.name.endswith("_s") or item.name == "tile_tokens"
            if math.isnan(value) or value < 0 or (positive and value == 0):
                least = "more than 0" if positive else "0 or more"
                raise OptionError(f"{item.name} is {value}; it must be {least}")


def rates_of(profile: DeviceProfile, *, lanes: int = _LANES) -> Rates:
    """The rates of a device with an HTP, from its profile.

    The HTP's rate is that of whole prefills, so that padding to tiles and the fixed time of a layer
    are in it already. Layers are taken to be read in large pieces, straight to where they are used.

    Raises:
        DeviceError: the profile has no HTP rate, CPU prefill rate or flash curve.
    """
    memory = profile.get("dram_read_gb_s") or profile.get("dram_gb_s")
    return Rates(
        read_gb_s=profile.flash_mib_s(READ_KIB, lanes) * 2**20 / 1e9,
        device_gflop_s=profile.need("htp_prefill_gflop_s"),
        cpu_gflop_s=profile.need("prefill_gflop_s"),
        memory_gb_s=memory or math.inf,
        sync_ms=profile.get("htp_sync_ms") or 0.0,
    )
