"""What prefetch brings: sessions without it and with each kind of it, token by token in turns."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit import bundled
from labkit.errors import OptionError
from labkit.gguf_map import open_gguf
from labkit.runtime import Session, TokenStep

KINDS = (None, "previous", "router")
"""Kinds of prefetch, as a `Session` takes them."""


@dataclass(frozen=True)
class PrefetchComparison:
    """Tables of one comparison.

    Attributes:
        summary: a row for each kind: prefetch ("none", "previous", "router"); token_ms (median),
            ratio to the time without prefetch (median over tokens) with its 95 % bootstrap interval
            ratio_low and ratio_high; hit_pct, prefetch_hit_pct (of all lookups); read_mib and
            prefetch_mib (means); read_ms, wait_ms, manage_ms (medians); all of one token.
        layers: a row for each kind and layer: prefetch, and `Session.prefetch_accuracy`.
    """

    summary: pd.DataFrame
    layers: pd.DataFrame


def text_tokens(model: str | Path, n: int) -> list[int]:
    """`n` token ids of English prose; of a model without a tokenizer, random ones."""
    if not open_gguf(model).has_tokenizer:
        return np.random.default_rng(0).integers(10, 400, n).tolist()
    with Session(model) as session:
        tokens = session.tokenize(" ".join(bundled.prompts()["english"]))
    return (tokens * (1 + n // len(tokens)))[:n]


def compare_prefetch(
    model: str | Path, tokens: Sequence[int], *, warmup: int = 4, **options: Any
) -> PrefetchComparison:
    """Have one session of each kind go through `tokens`, one by one and in turns.

    The order of the sessions is drawn anew for each token: who comes second finds what the first
    has read in the caches of a virtual disk.

    Args:
        warmup: so many tokens at the start do not count.
        options: further arguments of `Session`, such as cache_mib and overlap.

    Raises:
        OptionError: nothing is left to measure.
    """
    if warmup >= len(tokens):
        raise OptionError(f"{len(tokens)} tokens with {warmup} of them as warm-up leave none")
    steps: list[list[TokenStep]] = [[] for _ in KINDS]
    rng = np.random.default_rng(0)
    with contextlib.ExitStack() as opened:
        sessions = [
            opened.enter_context(Session(model, prefetch=kind, prefill="experts", **options))
            for kind in KINDS
        ]
        for token in tokens:
            for which in rng.permutation(len(KINDS)).tolist():
                sessions[which].generate([token], 0)
                steps[which] += sessions[which].prefill_steps
        tables = [session.prefetch_accuracy for session in sessions]
    names = [kind or "none" for kind in KINDS]
    counted = [some[warmup:] for some in steps]
    rows = [
        {"prefetch": name} | _figures(some, _walls_ms(counted[0]))
        for name, some in zip(names, counted, strict=True)
    ]
    layers = [
        table.assign(prefetch=name)
        for name, table in zip(names, tables, strict=True)
        if not table.empty
    ]
    return PrefetchComparison(pd.DataFrame(rows), pd.concat(layers, ignore_index=True))


def foretold(layers: pd.DataFrame) -> pd.DataFrame:
    """All layers together, a row a kind: prefetch, recall_pct, control_right, _wrong and _ties."""
    sums = layers.groupby("prefetch", as_index=False).sum(numeric_only=True, min_count=1)
    control = [name for name in sums.columns if name.startswith("control_")]
    return sums.assign(recall_pct=100 * sums["right"] / sums["chosen"])[
        ["prefetch", "recall_pct", *control]
    ]


def _walls_ms(steps: list[TokenStep]) -> np.ndarray:
    return np.array([1e3 * step.wall_s for step in steps])


def _figures(steps: list[TokenStep], plain_ms: np.ndarray) -> dict[str, float]:
    ratios = _walls_ms(steps) / plain_ms
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    lookups = sum(step.hits + step.misses for step in steps)

    def median_ms(name: str) -> float:
        return float(np.median([1e3 * getattr(step, name) for step in steps]))

    return {
        "token_ms": median_ms("wall_s"),
        "ratio": float(np.median(ratios)),
        "ratio_low": float(low),
        "ratio_high": float(high),
        "hit_pct": 100 * sum(step.hits for step in steps) / lookups,
        "prefetch_hit_pct": 100 * sum(step.prefetch_hits for step in steps) / lookups,
        "read_mib": float(np.mean([step.bytes_read / 2**20 for step in steps])),
        "prefetch_mib": float(np.mean([step.prefetch_bytes / 2**20 for step in steps])),
        "read_ms": median_ms("read_s"),
        "wait_ms": median_ms("wait_s"),
        "manage_ms": median_ms("manage_s"),
    }
