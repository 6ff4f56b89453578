"""Medians, spreads and ratios of token times, with intervals that say how far to trust them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """How many times as fast a case is as another, with a bootstrap interval."""

    value: float
    low: float
    high: float


def spread_pct(values: Sequence[float] | np.ndarray) -> float:
    """Distance from the smallest to the largest value, in percent of the median.

    A bench has a handful of rounds; a quartile of five values would promise more than it knows.
    """
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    return float(100 * np.ptp(known) / np.median(known)) if len(known) > 1 else float("nan")


def ratio(
    base: Sequence[np.ndarray],
    case: Sequence[np.ndarray],
    *,
    confidence: float = 0.95,
    draws: int = 4000,
    seed: int = 0,
) -> Ratio | None:
    """How many times as fast `case` is as `base`: the median over rounds of a round's ratio.

    Args:
        base, case: token times of each round, in the same order of rounds. What slowed the machine
            in a round slowed both, so a ratio is taken within a round.
        confidence: of the interval.
        draws: bootstrap samples. Each draws rounds and, within a round, tokens, with replacement.

    Returns:
        None when a round of either has no tokens, or there is no round.
    """
    pairs = [(np.asarray(b, float), np.asarray(c, float)) for b, c in zip(base, case, strict=True)]
    if not pairs or any(not len(b) or not len(c) for b, c in pairs):
        return None
    random = np.random.default_rng(seed)
    resampled = np.stack([_means(b, draws, random) / _means(c, draws, random) for b, c in pairs])
    picked = random.integers(len(pairs), size=(len(pairs), draws))
    medians = np.median(np.take_along_axis(resampled, picked, axis=0), axis=0)
    tail = 50 * (1 - confidence)
    low, high = np.percentile(medians, [tail, 100 - tail])
    value = float(np.median([b.mean() / c.mean() for b, c in pairs]))
    return Ratio(value, min(float(low), value), max(float(high), value))


def _means(values: np.ndarray, draws: int, random: np.random.Generator) -> np.ndarray:
    """(draws,) means of resamples of `values`."""
    return values[random.integers(len(values), size=(draws, len(values)))].mean(axis=1)
