"""Fit a device's constants to measured runs, and say how well they predict other runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pandas as pd

from labkit.device.speed import Constants, TokenTime, fault_time, token_time
from labkit.errors import DeviceError

START = Constants(decode_gb_s=15, read_share_pct=70, hidden_pct=50, fault_mib_s=100)
"""Where every search begins; the pull below keeps a constant near it that the runs do not show."""
_LIMITS = {
    "decode_gb_s": (0.01, 1000.0),
    "read_share_pct": (1.0, 200.0),
    "hidden_pct": (1.0, 100.0),
}
_PULL = 0.005
_ROUNDS = 40
_FACTORS = (-1.0, -0.3, 0.0, 0.3, 1.0)


@dataclass(frozen=True)
class Fit:
    """Constants, and the error of each run that they were fitted to (see `errors`)."""

    constants: Constants
    errors: pd.DataFrame

    @property
    def band_pct(self) -> float:
        """Four in five runs are predicted within this error."""
        return band_pct(self.errors)


def fit_constants(runs: pd.DataFrame, start: Constants = START) -> Fit:
    """Constants that make the sum of |log(predicted / measured)| smallest.

    Absolute logarithms, because a run on a hot phone is an outlier that must not bend the rest.
    Three constants are searched (decode rate, share of the flash curve, hidden part of overlap);
    the page-fault rate is the geometric mean of what the mapped runs show.

    Args:
        runs: columns as in `labkit.device.recorded.decode_rows`.
        start: where to begin; its `layer_ms` is kept.

    Raises:
        DeviceError: no streamed or resident run, or one without a decode rate.
    """
    good = np.isfinite(runs["decode_tok_s"]) & (runs["decode_tok_s"] > 0)
    if not good.all():
        raise DeviceError("A run without a decode rate cannot be fitted; leave such rows out.")
    direct = runs[~runs["mapped"]]
    if direct.empty:
        raise DeviceError(
            "Only mapped runs were given: they say nothing about compute and reads. Add streamed "
            "or resident ones."
        )
    names = ["decode_gb_s"]
    if (direct["read_mib"] > 0).any():
        names.append("read_share_pct")
    if (direct["overlapped"] & (direct["read_mib"] > 0)).any():
        names.append("hidden_pct")
    found = _search(direct, start, names)
    mapped = runs[runs["mapped"] & (runs["read_mib"] > 0)]
    if len(mapped):
        found = replace(found, fault_mib_s=_fault_rate(mapped, found))
    return Fit(found, errors(runs, found))


def predict(runs: pd.DataFrame, constants: Constants) -> np.ndarray:
    """Decode tokens a second of every run."""
    direct = _times(runs, constants).wall_s
    if not runs["mapped"].any():
        return 1 / direct
    work = {name: runs[name].to_numpy(float) for name in ("weight_mib", "layers")}
    fault = fault_time(constants, fault_mib=runs["read_mib"].to_numpy(float), **work)
    return 1 / np.where(runs["mapped"], fault.wall_s, direct)


def errors(runs: pd.DataFrame, constants: Constants) -> pd.DataFrame:
    """The runs with predicted_tok_s and error_pct (predicted against measured) added."""
    predicted = predict(runs, constants)
    return runs.assign(
        predicted_tok_s=predicted, error_pct=100 * (predicted / runs["decode_tok_s"] - 1)
    )


def band_pct(table: pd.DataFrame) -> float:
    """The error that four in five of the streamed runs of `errors` stay within."""
    streamed = table.loc[~table["mapped"], "error_pct"]
    return float(np.percentile(streamed.abs(), 80))


def _times(runs: pd.DataFrame, constants: Constants) -> TokenTime:
    return token_time(
        constants,
        weight_mib=runs["weight_mib"].to_numpy(float),
        layers=runs["layers"].to_numpy(float),
        read_mib=runs["read_mib"].to_numpy(float),
        flash_mib_s=runs["flash_mib_s"].to_numpy(float),
        overlapped=runs["overlapped"].to_numpy(bool),
    )


def _search(runs: pd.DataFrame, start: Constants, names: list[str]) -> Constants:
    """A grid around the best point so far, in logarithms, that narrows where it finds no better."""
    low, high = np.log([_LIMITS[name] for name in names]).T
    given = [max(getattr(start, name), _LIMITS[name][0]) for name in names]
    origin = np.clip(np.log(given), low, high)
    measured = runs["decode_tok_s"].to_numpy(float)

    def constants(at: np.ndarray) -> Constants:
        return replace(start, **dict(zip(names, np.exp(at).tolist(), strict=True)))

    def loss(at: np.ndarray) -> float:
        wall = _times(runs, constants(at)).wall_s
        return float(np.abs(np.log(wall * measured)).sum() + _PULL * ((at - origin) ** 2).sum())

    best, width = origin, 1.0
    least = loss(best)
    for _ in range(_ROUNDS):
        around = [
            np.clip(best + width * np.array(step), low, high)
            for step in product(_FACTORS, repeat=len(names))
        ]
        losses = [loss(at) for at in around]
        index = int(np.argmin(losses))
        if losses[index] < least - 1e-12:
            best, least = around[index], losses[index]
        else:
            width /= 2
    return constants(best)


def _fault_rate(mapped: pd.DataFrame, constants: Constants) -> float:
    compute = _times(mapped.assign(read_mib=0.0), constants).wall_s
    waited = np.maximum(1 / mapped["decode_tok_s"].to_numpy(float) - compute, 1e-3)
    return float(np.exp(np.log(mapped["read_mib"].to_numpy(float) / waited).mean()))
