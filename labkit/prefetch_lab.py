"""What prefetch brings: sessions without it and with each kind of it, token by token in turns."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit import bundled
from labkit.errors import OptionError
from labkit.gguf_map import open_gguf
from labkit.runtime import BudgetWarning, Session, TokenStep

KINDS = (None, "previous", "router")
"""Kinds of prefetch, as a `Session` takes them."""


@dataclass(frozen=True)
class PrefetchComparison:
    """Tables of one comparison.

    A kind that cannot foretell anything of the model is not in them.

    Attributes:
        summary: a row for each kind: prefetch ("none", "previous", "router"); token_ms (median),
            time_ratio to the time without prefetch (median over tokens; above 1 is slower) with its
            95 % bootstrap interval time_ratio_low and time_ratio_high; hit_pct, prefetch_hit_pct
            (of all lookups); read_mib and prefetch_mib (means); read_ms, wait_ms, manage_ms
            (medians); all of one token.
        layers: a row for each kind and layer: prefetch, and `Session.prefetch_accuracy`.
    """

    summary: pd.DataFrame
    layers: pd.DataFrame


def text_tokens(model: str | Path, n: int) -> list[int]:
    """`n` token ids of English prose; of a model without a tokenizer, random ones."""
    gguf = open_gguf(model)
    if not gguf.has_tokenizer:
        n_vocab = gguf.tensor("token_embd.weight").shape[1]
        return np.random.default_rng(0).integers(n_vocab, size=n).tolist()
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
    rng = np.random.default_rng(0)
    with contextlib.ExitStack() as opened:
        with warnings.catch_warnings():
            # A budget below the token cycle is where reading ahead has most to bring.
            warnings.simplefilter("ignore", BudgetWarning)
            sessions = _open_each(opened, model, options)
        steps: dict[str, list[TokenStep]] = {name: [] for name in sessions}
        for token in tokens:
            for name in rng.permutation(list(sessions)).tolist():
                sessions[name].generate([token], 0)
                steps[name] += sessions[name].prefill_steps
        tables = [s.prefetch_accuracy.assign(prefetch=name) for name, s in sessions.items()]
    plain_ms = _walls_ms(steps["none"][warmup:])
    rows = [{"prefetch": name} | _figures(some[warmup:], plain_ms) for name, some in steps.items()]
    return PrefetchComparison(pd.DataFrame(rows), pd.concat(tables, ignore_index=True))


def verdict(summary: pd.DataFrame) -> list[str]:
    """A sentence for each kind: what it does to hits, to reads and to the time of a token."""
    rows = summary.set_index("prefetch")
    plain = rows.loc["none"]
    sentences = []
    for name, row in rows.drop(index="none").iterrows():
        gain = "no difference that these tokens show"
        if row["time_ratio_high"] < 1 or row["time_ratio_low"] > 1:
            gain = f"{'faster' if row['time_ratio'] < 1 else 'slower'} than without"
        sentences.append(
            f"{name}: hits {plain['hit_pct']:.0f} -> {row['hit_pct']:.0f} %, read a token "
            f"{plain['read_mib']:.2f} -> {row['read_mib']:.2f} MiB, "
            f"time {row['time_ratio']:.2f} [{row['time_ratio_low']:.2f}, "
            f"{row['time_ratio_high']:.2f}] of that without it: {gain}."
        )
    return sentences


def foretold(layers: pd.DataFrame) -> pd.DataFrame:
    """All layers together, a row a kind: prefetch, recall_pct, control_right, _wrong and _ties."""
    sums = layers.groupby("prefetch", as_index=False).sum(numeric_only=True, min_count=1)
    control = [name for name in sums.columns if name.startswith("control_")]
    return sums.assign(recall_pct=100 * sums["right"] / sums["chosen"])[
        ["prefetch", "recall_pct", *control]
    ]


def _open_each(
    opened: contextlib.ExitStack, model: str | Path, options: dict[str, Any]
) -> dict[str, Session]:
    sessions: dict[str, Session] = {}
    for kind in KINDS:
        try:
            session = Session(model, prefetch=kind, prefill="experts", **options)
        except OptionError:
            if kind != "router":
                raise
        else:
            sessions[kind or "none"] = opened.enter_context(session)
    return sessions


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
        "time_ratio": float(np.median(ratios)),
        "time_ratio_low": float(low),
        "time_ratio_high": float(high),
        "hit_pct": 100 * sum(step.hits for step in steps) / lookups,
        "prefetch_hit_pct": 100 * sum(step.prefetch_hits for step in steps) / lookups,
        "read_mib": float(np.mean([step.bytes_read / 2**20 for step in steps])),
        "prefetch_mib": float(np.mean([step.prefetch_bytes / 2**20 for step in steps])),
        "read_ms": median_ms("read_s"),
        "wait_ms": median_ms("wait_s"),
        "manage_ms": median_ms("manage_s"),
    }
