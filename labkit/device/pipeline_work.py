"""From a model and rates to the jobs of the two-slot pipeline: a modelled prefill.

A layer's time is counted, not measured: bytes over a rate, and operations over a rate. What the
model leaves out is named where it matters, and every table made of it says "modelled".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from labkit.architectures import ROUTED_EXPERT
from labkit.device.htp import CPU, handovers, placement
from labkit.device.pipeline import Job, Timeline, schedule
from labkit.device.pipeline_rates import Rates
from labkit.errors import OptionError
from labkit.sheet import sheet as make_sheet
from labkit.sheet.header import open_header

if TYPE_CHECKING:
    import pandas as pd

    from labkit.sheet import ModelSheet, Weight
    from labkit.sheet.attention import Attention

_MIB = 2**20


@dataclass(frozen=True)
class LayerLoad:
    """What one layer asks of a device.

    Attributes:
        layer: its number.
        stream_bytes: routed experts, all of them: what goes through a slot.
        layout_bytes: of these, what the device computes with, in the device's layout.
        fixed_bytes: all other weights of the layer, which stay in memory.
        fixed_weights, expert_weights: weights that a token multiplies on the device: outside the
            experts, and in one expert.
        cpu_fixed_weights, cpu_expert_weights: the same for what the device cannot take.
        n_expert, n_used: routed experts, and how many a token uses; 0 in a dense layer.
        attention: how it attends; None in a layer that does not.
        handovers: how often the device stops for the CPU.
    """

    layer: int
    stream_bytes: float = 0.0
    layout_bytes: float = 0.0
    fixed_bytes: float = 0.0
    fixed_weights: float = 0.0
    expert_weights: float = 0.0
    cpu_fixed_weights: float = 0.0
    cpu_expert_weights: float = 0.0
    n_expert: int = 0
    n_used: int = 0
    attention: Attention | None = None
    handovers: int = 0


def layers_of(sheet: ModelSheet, table: pd.DataFrame | None = None) -> list[LayerLoad]:
    """What the computed layers of a model ask.

    `table` is the `labkit.device.htp.placement` of its file: what a device cannot take then goes to
    the CPU. Without one (a published shape has no types) the device takes everything.
    """
    on_cpu: set[str] = set()
    device_mib: dict[str, float] = {}
    stops: dict[int, int] = {}
    if table is not None:
        on_cpu = set(table.loc[table["on"] == CPU, "tensor"])
        device_mib = dict(zip(table["tensor"], table["device_mib"], strict=True))
        stops = {int(layer): int(n) for layer, n in handovers(table).items()}  # type: ignore[arg-type]
    attention = {a.layer: a for a in sheet.attention}
    return [
        replace(
            _load(layer, [w for w in sheet.weights if w.layer == layer], on_cpu, device_mib),
            n_used=sheet.experts_used.get(layer, 0),
            attention=attention.get(layer),
            handovers=stops.get(layer, 0),
        )
        for layer in range(sheet.n_layers)
    ]


def read_layers(source: str | Path) -> tuple[ModelSheet, list[LayerLoad]]:
    """The sheet and the layers of a GGUF file, whose types decide what an HTP takes, or of a
    published shape (see `labkit.sheet.shape_names`), of which it takes everything.

    Raises:
        ModelFileError, SheetError: no such file or shape, or a damaged one.
    """
    ledger = make_sheet(source)
    path = Path(source).expanduser()
    if not path.exists() or path.suffix.lower() == ".json":
        return ledger, layers_of(ledger)
    return ledger, layers_of(ledger, placement(open_header(path)))


def _load(
    layer: int, weights: list[Weight], on_cpu: set[str], device_mib: dict[str, float]
) -> LayerLoad:
    routed = [w for w in weights if w.role == ROUTED_EXPERT]
    fixed = [w for w in weights if w.role != ROUTED_EXPERT]
    matrices = [w for w in fixed if w.multiplies]
    n_expert = routed[0].shape[2] if routed else 0

    def count(which: list[Weight], cpu: bool) -> float:
        return float(sum(w.n_params for w in which if (w.name in on_cpu) is cpu))

    return LayerLoad(
        layer=layer,
        stream_bytes=float(sum(w.nbytes for w in routed)),
        layout_bytes=sum(device_mib.get(w.name, w.nbytes / _MIB) * _MIB for w in routed),
        fixed_bytes=float(sum(w.nbytes for w in fixed)),
        fixed_weights=count(matrices, False),
        expert_weights=count(routed, False) / max(n_expert, 1),
        cpu_fixed_weights=count(matrices, True),
        cpu_expert_weights=count(routed, True) / max(n_expert, 1),
        n_expert=n_expert,
    )


def expert_rows(tokens: int, n_expert: int, n_used: int, tile: int = 1) -> float:
    """Rows that all experts of a layer compute together for `tokens` tokens, padded to tiles.

    Each token picks `n_used` of `n_expert` evenly, so an expert's tokens are binomial; each expert
    then rounds up to whole tiles. Real routing is uneven, which fills tiles better.
    """
    if not n_expert:
        return 0.0
    if tile <= 1:
        return float(tokens * n_used)
    counts = np.arange(tokens + 1)
    return float(
        n_expert * (_binomial(tokens, n_used / n_expert) * np.ceil(counts / tile)).sum()
    ) * (tile)


def experts_touched(tokens: int, n_expert: int, n_used: int) -> float:
    """Experts of a layer that `tokens` tokens use at least once, if each chooses evenly."""
    if not n_expert:
        return 0.0
    return n_expert * (1 - (1 - n_used / n_expert) ** tokens)


def compute_s(load: LayerLoad, tokens: int, past: int, rates: Rates) -> float:
    """Seconds of one layer for `tokens` tokens after `past` others, on the device."""
    rows = expert_rows(tokens, load.n_expert, load.n_used, rates.tile_tokens)
    padded = math.ceil(tokens / rates.tile_tokens) * rates.tile_tokens
    flop = 2 * (load.fixed_weights * padded + load.expert_weights * rows)
    if load.attention:
        flop += tokens * load.attention.flops(past + tokens // 2)
    read = load.fixed_bytes
    if load.n_expert:
        part = experts_touched(tokens, load.n_expert, load.n_used) / load.n_expert
        read += load.layout_bytes * part
    busy = max(flop / (1e9 * rates.device_gflop_s), read / (1e9 * rates.memory_gb_s))
    return busy + rates.layer_ms / 1e3


def fallback_s(load: LayerLoad, tokens: int, rates: Rates) -> float:
    """CPU seconds of what the device lacks in one layer."""
    flop = 2 * tokens * (load.cpu_fixed_weights + load.cpu_expert_weights * load.n_used)
    return flop / (1e9 * rates.cpu_gflop_s)


def device_job(load: LayerLoad, chunk: int, tokens: int, past: int, rates: Rates) -> Job:
    """One layer of one chunk on the device."""
    return Job(
        chunk=chunk,
        layer=load.layer,
        read_s=load.stream_bytes / (1e9 * rates.read_gb_s),
        copy_s=load.stream_bytes / (1e9 * rates.copy_gb_s),
        layout_s=load.layout_bytes / (1e9 * rates.layout_gb_s),
        compute_s=compute_s(load, tokens, past, rates),
        fallbacks=load.handovers,
        fallback_s=fallback_s(load, tokens, rates),
    )


def tail_job(load: LayerLoad, chunk: int, tokens: int, past: int, rates: Rates) -> Job:
    """One layer of the tail on the CPU, which reads the experts that these tokens touch."""
    part = experts_touched(tokens, load.n_expert, load.n_used) / max(load.n_expert, 1)
    on_cpu = replace(
        rates, device_gflop_s=rates.cpu_gflop_s, tile_tokens=1, memory_gb_s=math.inf, layer_ms=0.0
    )
    whole = replace(
        load,
        fixed_weights=load.fixed_weights + load.cpu_fixed_weights,
        expert_weights=load.expert_weights + load.cpu_expert_weights,
    )
    return Job(
        chunk=chunk,
        layer=load.layer,
        read_s=part * load.stream_bytes / (1e9 * rates.read_gb_s),
        compute_s=compute_s(whole, tokens, past, on_cpu),
        on_cpu=True,
    )


@dataclass(frozen=True)
class ModelledPrefill:
    """A prefill that was computed, not measured.

    Attributes:
        tokens, chunk: the prompt, and tokens of a chunk.
        tail: prompt tokens that the CPU did.
        timeline: who works when.
    """

    tokens: int
    chunk: int
    tail: int
    timeline: Timeline

    @property
    def prefill_s(self) -> float:
        """Seconds of the whole prompt; the first token of the answer follows at once."""
        return self.timeline.total_s

    @property
    def tok_s(self) -> float:
        """Prompt tokens a second."""
        return self.tokens / self.prefill_s


def model_prefill(
    layers: list[LayerLoad],
    tokens: int,
    rates: Rates,
    *,
    chunk: int = 512,
    slots: int = 2,
    longest_tail: int = 0,
) -> ModelledPrefill:
    """Schedule a prompt of `tokens` tokens.

    Args:
        chunk: tokens that go through all layers together. Each chunk prepares every layer anew.
        slots: see `labkit.device.pipeline.schedule`.
        longest_tail: a rest of at most this many tokens goes through the CPU, not the device.

    Raises:
        OptionError: a count that is none, or rates that are none.
    """
    for name, value in (("tokens", tokens), ("chunk", chunk)):
        if value < 1:
            raise OptionError(f"{name} is {value}; it must be 1 or more")
    if not layers:
        raise OptionError("the model has no layers, so there is nothing to compute")
    jobs: list[Job] = []
    tail = 0
    for number, past in enumerate(range(0, tokens, chunk)):
        width = min(chunk, tokens - past)
        on_cpu = width < chunk and width <= longest_tail
        make = tail_job if on_cpu else device_job
        jobs += [make(load, number, width, past, rates) for load in layers]
        tail += width if on_cpu else 0
    timeline = schedule(
        jobs, slots=slots, barrier_s=rates.barrier_ms / 1e3, sync_s=rates.sync_ms / 1e3
    )
    return ModelledPrefill(tokens, chunk, tail, timeline)


def _binomial(n: int, p: float) -> np.ndarray:
    """Probabilities of 0..n successes."""
    if p >= 1:
        return np.eye(n + 1)[n]
    log_factorial = np.cumsum(np.concatenate([[0.0], np.log(np.arange(1, n + 1))]))
    k = np.arange(n + 1)
    log_choose = log_factorial[n] - log_factorial[k] - log_factorial[n - k]
    return np.exp(log_choose + k * math.log(p) + (n - k) * math.log1p(-p))
