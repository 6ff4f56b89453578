"""How fast each path would be: decode with a band, the prompt, and loading."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.device.hits import HitRate
from labkit.device.plan import MMAP, OVERLAPPED, RESIDENT, Request
from labkit.device.speed import Constants, fault_time, token_time

if TYPE_CHECKING:
    from labkit.device.profile import DeviceProfile
    from labkit.sheet import ModelSheet

MIB = 2**20
FAULT_FACTOR = 6.0
"""Mapped runs without enough memory lie within this factor of their prediction, either way."""
DEFAULT_BAND_PCT = 30.0
READ_AHEAD_KIB = 128.0
"""What Linux reads ahead of a mapped file by default."""


@dataclass(frozen=True)
class Decode:
    """A decode rate with its band, and the bytes that a token waits for."""

    tok_s: float
    low_tok_s: float
    high_tok_s: float
    read_mib: float


class SpeedOf:
    """The speed of one model on one device, path by path."""

    def __init__(self, model: ModelSheet, device: DeviceProfile, request: Request) -> None:
        self.model, self.device, self.request = model, device, request
        self.constants = Constants.of(device)
        self.band = (device.get("band_pct") or DEFAULT_BAND_PCT) / 100
        self._cycle_mib = model.token_cycle_bytes / MIB
        self._work = {"weight_mib": model.token_bytes / MIB, "layers": model.n_layers}

    def resident(self) -> Decode:
        """Everything is in memory."""
        return self._banded(1 / float(token_time(self.constants, **self._work).wall_s), 0.0)

    def streamed(self, hit: HitRate, *, overlapped: bool) -> Decode:
        """Experts that are not in the cache are read."""
        flash = self._flash()
        rates = [
            1
            / float(
                token_time(
                    self.constants,
                    **self._work,
                    read_mib=self._missed_mib(pct),
                    flash_mib_s=flash,
                    overlapped=overlapped,
                ).wall_s
            )
            for pct in (hit.hit_pct, hit.low_pct, hit.high_pct)
        ]
        low, high = rates[1] / (1 + self.band), rates[2] * (1 + self.band)
        return Decode(rates[0], low, high, self._missed_mib(hit.hit_pct))

    def mapped(self, hit: HitRate) -> Decode:
        """The file is mapped, and the page cache holds part of it."""
        missed = self._missed_mib(hit.hit_pct)
        if not missed:
            return self.resident()
        if math.isnan(self.constants.fault_mib_s):
            return Decode(math.nan, math.nan, math.nan, missed)
        rate = 1 / float(fault_time(self.constants, **self._work, fault_mib=missed).wall_s)
        best = self.resident().tok_s
        return Decode(rate, rate / FAULT_FACTOR, min(rate * FAULT_FACTOR, best), missed)

    def load_s(self, path: str, memory_mib: float) -> float:
        """Reading what must be in memory, in large reads; NaN without flash rates.

        A mapped file is read when it is used, but llama.cpp asks for all of it at once.
        """
        if not self.device.flash:
            return math.nan
        return memory_mib / self.device.flash_mib_s(4096, self.request.lanes)

    def prefill_s(self, path: str, *, kept: bool) -> float:
        """Seconds of a prompt that nothing is in memory for; NaN without the device's prefill rate.

        A wide batch chooses nearly every expert, so each batch of the prompt reads them all, unless
        they are kept: then the first reads them, or loading did. Whole layers are read beside
        compute where reads overlap; else the two add up.
        """
        gflop_s = self.device.get("prefill_gflop_s")
        if gflop_s is None:
            return math.nan
        loaded = kept and path in (RESIDENT, MMAP)
        compute, read, done = 0.0, 0.0, 0
        while done < self.request.prompt_tokens:
            width = min(self.request.n_ubatch, self.request.prompt_tokens - done)
            compute += width * self.model.flops_per_token(done + width // 2) / (gflop_s * 1e9)
            if not (loaded or (kept and done)):
                read += self._batch_mib(width)
            done += width
        if not read:
            return compute
        if path == MMAP:
            return compute + read / self.device.flash_mib_s(READ_AHEAD_KIB, 1)
        waited = read / (self._flash() * self.constants.read_share_pct / 100)
        return max(compute, waited) if path == OVERLAPPED else compute + waited

    def _batch_mib(self, width: int) -> float:
        """Expert bytes that a batch chooses, if routing is even."""
        model = self.model
        chosen = 0.0
        for layer in model.moe_layers:
            share = model.experts_used[layer] / model.n_expert
            chosen += model.entry_bytes[layer] * model.n_expert * (1 - (1 - share) ** width)
        return chosen / MIB

    def _missed_mib(self, hit_pct: float) -> float:
        return self._cycle_mib * (1 - hit_pct / 100)

    def _flash(self) -> float:
        return self.device.flash_mib_s(self.model.slice_kib, self.request.lanes)

    def _banded(self, tok_s: float, read_mib: float) -> Decode:
        return Decode(tok_s, tok_s / (1 + self.band), tok_s * (1 + self.band), read_mib)
