"""Lower bounds on a token of a model on a device: see `labkit.sheet.bounds`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.errors import OptionError
from labkit.sheet.bounds import LatencyFloor, time_floor_s
from labkit.sheet.model_sheet import ModelSheet

if TYPE_CHECKING:
    from labkit.device import DeviceProfile


def latency_floor(
    model: ModelSheet,
    device: DeviceProfile,
    *,
    n_past: int = 0,
    hit_rate: float = 1.0,
    read_kib: float | None = None,
    lanes: int = 4,
) -> LatencyFloor:
    """Lower bounds on one token by the device's operations, DRAM and flash.

    Args:
        device: its advertised rates count, measured ones where there are no others.
        n_past: tokens of context that attention looks at.
        hit_rate: part of the expert uses that need no read from flash.
        read_kib: size of one read; by default one projection of one expert.
        lanes: reads under way at once.
    """
    if not 0 <= hit_rate <= 1:
        raise OptionError(f"hit_rate is {hit_rate!r}; it must be from 0 to 1")
    nan = float("nan")
    tops = device.get("tops")
    dram = device.get("dram_gb_s") or device.get("dram_read_gb_s")
    moved = model.token_bytes + model.kv_read_bytes(n_past)
    missed = (1 - hit_rate) * model.token_cycle_bytes
    flash = 0.0 if not missed else nan
    if missed and device.flash:
        rate = device.flash_mib_s(read_kib or model.slice_kib, lanes)
        flash = time_floor_s(missed, rate * 2**20)
    return LatencyFloor(
        model.flops_per_token(n_past) / (tops * 1e12) if tops else nan,
        time_floor_s(moved, dram * 1e9) if dram else nan,
        flash,
    )
