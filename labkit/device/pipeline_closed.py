"""The two-slot pipeline as one formula, for layers that are alike: what a chart's sliders compute.

With equal layers each step takes the slower of preparing and computing; only the first preparation
and the last compute stand alone. `labkit.device.pipeline.schedule` is the exact form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from labkit.device.pipeline_rates import Rates
from labkit.device.pipeline_work import LayerLoad, compute_s, fallback_s

_UNIT = 1.0  # a device of 1e9 operations a second: its seconds are 1e9 operations


def chunk_table(
    layers: list[LayerLoad], tokens: int, chunks: Iterable[int], rates: Rates
) -> pd.DataFrame:
    """What the steps of a prompt of `tokens` tokens ask for, by chunk length.

    A step is one streamed layer of one chunk; a last chunk may be shorter, so its steps are apart.
    Columns: chunk, steps (of all chunks but the last), last_steps, step_bytes (prepared),
    step_gflop and last_gflop (computed on the device), step_cpu_s and last_cpu_s (hand-overs and
    what the device lacks), rest_gflop (layers that stream nothing, over the whole prompt). Of
    `rates` only the CPU's, the hand-overs' and the tile are used. Chunks longer than the prompt are
    the prompt. Figures of a step are means.
    """
    counted = replace(rates, device_gflop_s=_UNIT, memory_gb_s=math.inf, layer_ms=0.0)
    streamed = [load for load in layers if load.stream_bytes]
    others = [load for load in layers if not load.stream_bytes]
    rows = []
    for chunk in sorted({min(int(c), tokens) for c in chunks}):
        parts = [(past, min(chunk, tokens - past)) for past in range(0, tokens, chunk)]
        rows.append(
            {
                "chunk": chunk,
                "steps": (len(parts) - 1) * len(streamed),
                "last_steps": len(streamed),
                "step_bytes": _mean([load.stream_bytes for load in streamed]),
                "step_gflop": _gflop(streamed, parts[:-1], counted),
                "last_gflop": _gflop(streamed, parts[-1:], counted),
                "step_cpu_s": _cpu_s(streamed, parts[:-1], rates),
                "last_cpu_s": _cpu_s(streamed, parts[-1:], rates),
                "rest_gflop": sum(
                    compute_s(load, n, past, counted) for load in others for past, n in parts
                ),
            }
        )
    return pd.DataFrame(rows)


def closed_prefill_s(
    row: Mapping[Any, Any] | pd.Series, read_gb_s: float, device_gflop_s: float
) -> float:
    """Seconds of a prompt from a row of `chunk_table`, without copies and layout changes."""
    prepare = row["step_bytes"] / (1e9 * read_gb_s)
    compute = row["step_gflop"] / device_gflop_s + row["step_cpu_s"]
    last = row["last_gflop"] / device_gflop_s + row["last_cpu_s"]
    beside = row["steps"] * max(prepare, compute) + (row["last_steps"] - 1) * max(prepare, last)
    return prepare + beside + last + row["rest_gflop"] / device_gflop_s


def _gflop(loads: list[LayerLoad], parts: list[tuple[int, int]], counted: Rates) -> float:
    return _mean([compute_s(load, n, past, counted) for load in loads for past, n in parts])


def _cpu_s(loads: list[LayerLoad], parts: list[tuple[int, int]], rates: Rates) -> float:
    return _mean(
        [
            fallback_s(load, n, rates) + load.handovers * rates.sync_ms / 1e3
            for load in loads
            for _, n in parts
        ]
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _prepare_s(load: LayerLoad, rates: Rates) -> float:
    moved = load.stream_bytes * (1 / rates.read_gb_s + 1 / rates.copy_gb_s)
    return (moved + load.layout_bytes / rates.layout_gb_s) / 1e9


def hiding_chunk(
    layers: list[LayerLoad], rates: Rates, *, most: int = 1 << 16, tokens_before: int = 0
) -> int | None:
    """The shortest chunk in which any layer's compute hides any other's preparation.

    None if even `most` tokens do not: the device is too fast, or the flash too slow, for it.
    """
    streamed = [load for load in layers if load.stream_bytes]
    if not streamed:
        return None
    prepare = max(_prepare_s(load, rates) for load in streamed)

    def hides(tokens: int) -> bool:
        return prepare <= min(
            compute_s(load, tokens, tokens_before, rates)
            + fallback_s(load, tokens, rates)
            + load.handovers * rates.sync_ms / 1e3
            for load in streamed
        )

    if not hides(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if hides(middle) else (middle, high)
    return high
