"""What an HTP would make of a model's requests: placement, memory, and the modelled pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.device import htp
from labkit.device.pipeline_closed import hiding_chunk
from labkit.device.pipeline_rates import Rates, rates_of
from labkit.device.pipeline_request import requests
from labkit.device.pipeline_work import LayerLoad, ModelledPrefill, model_prefill, read_layers
from labkit.device.plan import OVERLAPPED, RESIDENT, Request
from labkit.device.planner import plan
from labkit.device.profile import DeviceProfile
from labkit.sheet import ModelSheet
from labkit.sheet import sheet as make_sheet
from labkit.sheet.header import open_header


@dataclass(frozen=True)
class HtpPlan:
    """All figures but the placement are modelled.

    Attributes:
        ledger, layers: the model's sheet, and what its layers ask.
        placement: of a file's tensors (`labkit.device.htp.placement`); None for a shape, which has
            no types: the device is then taken to take everything.
        session_mib: the device's session limit.
        rates: of the device.
        prefill: the prompt through the two slots.
        hiding: the shortest chunk that hides the reads; None if none does.
        decode_tok_s: of the planner, on the CPU; None for a dense model.
        cpu_prefill_s: the same prompt on the CPU, by the planner; None where it cannot say.
    """

    ledger: ModelSheet
    layers: list[LayerLoad]
    placement: pd.DataFrame | None
    session_mib: float
    rates: Rates
    prefill: ModelledPrefill
    hiding: int | None
    decode_tok_s: float | None
    cpu_prefill_s: float | None

    def requests(self, outputs: Sequence[int]) -> pd.DataFrame:
        """Modelled requests (`labkit.device.pipeline_request.requests`); empty without decode."""
        if self.decode_tok_s is None:
            return pd.DataFrame()
        return requests(self.prefill.prefill_s, 1 / self.decode_tok_s, outputs)

    @property
    def arena(self) -> htp.Arena:
        """What two slots and the fixed weights take; by the file's bytes for a shape."""
        if self.placement is not None:
            return htp.arena(self.placement)
        slot = max((load.stream_bytes for load in self.layers), default=0.0)
        return htp.Arena(slot / 2**20, self.ledger.dense_bytes / 2**20)


def default_tokens(source: str | Path) -> int:
    """A prompt of 1024 tokens, or half of the model's context if that is shorter."""
    context = make_sheet(source).context_length
    return min(1024, max(1, context // 2)) if context else 1024


def within_context(source: str | Path, tokens: int) -> int:
    """`tokens`, or the longest prompt that leaves the model's context one token for the answer."""
    context = make_sheet(source).context_length
    return min(tokens, max(1, context - 1)) if context else tokens


def plan_htp(
    source: str | Path,
    device: DeviceProfile,
    *,
    tokens: int,
    chunk: int = 512,
    longest_tail: int = 31,
    slots: int = 2,
    changes: dict[str, Any] | None = None,
) -> HtpPlan:
    """Model a prompt of `tokens` tokens on a device with an HTP.

    Args:
        source: a GGUF file (its header is enough), or the name or JSON of a shape.
        device: a profile with rates of HTP, CPU and flash.
        chunk, longest_tail, slots: see `labkit.device.pipeline_work.model_prefill`. Rests of less
            than 32 tokens stay on the CPU unless told otherwise, as the recorded engine does it.
        changes: fields of `Rates` that take the place of the profile's.

    Raises:
        DeviceError: the profile lacks a figure.
        ModelFileError, SheetError, OptionError: see `read_layers` and `model_prefill`.
    """
    ledger, layers = read_layers(source)
    path = Path(source).expanduser()
    from_file = path.exists() and path.suffix.lower() != ".json"
    rates = replace(rates_of(device), **(changes or {}))
    made = model_prefill(layers, tokens, rates, chunk=chunk, slots=slots, longest_tail=longest_tail)
    decode, cpu = _by_planner(ledger, device, tokens) if ledger.is_moe else (None, None)
    return HtpPlan(
        ledger=ledger,
        layers=layers,
        placement=htp.placement(open_header(path)) if from_file else None,
        session_mib=device.get("htp_session_mib") or htp.SESSION_MIB[-1],
        rates=rates,
        prefill=made,
        hiding=hiding_chunk(layers, rates),
        decode_tok_s=decode,
        cpu_prefill_s=cpu,
    )


def _by_planner(
    ledger: ModelSheet, device: DeviceProfile, tokens: int
) -> tuple[float | None, float | None]:
    """Decode rate and CPU prefill of the whole model if it fits, else of the streamed one."""
    n_ctx = -(-(tokens + 128) // 256) * 256
    if ledger.context_length:
        n_ctx = max(min(n_ctx, ledger.context_length), tokens + 1)
    made = plan(ledger, device, request=Request(n_ctx, tokens, min(128, n_ctx - tokens)))
    row = made.path(RESIDENT)
    if not row.fits:
        row = made.path(OVERLAPPED)
    decode = row.decode_tok_s if row.decode_tok_s == row.decode_tok_s else None
    return decode, row.prefill_s if row.prefill_s == row.prefill_s else None
