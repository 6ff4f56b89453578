"""`calibrate`: a profile's decode constants from a benchmark that ran on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from labkit.device.fit import START, Fit, fit_constants
from labkit.device.profile import DeviceProfile, Figure
from labkit.device.speed import Constants, token_time
from labkit.errors import DeviceError

if TYPE_CHECKING:
    from labkit.bench.result import BenchResult
    from labkit.sheet import ModelSheet

MIB = 2**20
_LEAST_BAND_PCT = 10.0
"""A few runs of one afternoon agree better than the next one will."""
_OVERLAPPED = ("stream", "stream-pipeline", "stream-userfaultfd")


def calibrate(
    profile: DeviceProfile, bench: str | Path | BenchResult, model: ModelSheet | None = None
) -> DeviceProfile:
    """The profile with its decode constants and its band fitted to a benchmark.

    Args:
        profile: of the device on which the benchmark ran, with its flash rates.
        bench: a directory of `labkit bench`, or its result.
        model: the sheet of its model; None opens the file that the benchmark names.

    Raises:
        BenchError: no such benchmark.
        DeviceError: it has no streamed run to fit, or the profile no flash rates.
    """
    from labkit.bench.result import BenchResult
    from labkit.sheet import sheet

    result = bench if isinstance(bench, BenchResult) else BenchResult.load(bench)
    ledger = model or sheet(result.facts["model"])
    fit = fit_bench(profile, result, ledger)
    said = f"fit to {len(fit.errors)} cases of a benchmark of {ledger.name}"
    found = {
        **_compute_figures(profile, fit, ledger, said),
        "read_share_pct": Figure(round(fit.constants.read_share_pct, 1), "fitted", said),
        "band_pct": Figure(round(max(fit.band_pct, _LEAST_BAND_PCT), 1), "fitted", said),
    }
    if (fit.errors["overlapped"] & (fit.errors["read_mib"] > 0)).any():
        found["hidden_pct"] = Figure(round(fit.constants.hidden_pct, 1), "fitted", said)
    if fit.errors["mapped"].any():
        found["fault_mib_s"] = Figure(round(fit.constants.fault_mib_s, 2), "fitted", said)
    return profile.with_figures(found)


def fit_bench(profile: DeviceProfile, result: BenchResult, model: ModelSheet) -> Fit:
    """The fit itself, with the error of every case; see `calibrate`.

    All cases are of one model, which cannot tell a layer's fixed time from the time of its bytes:
    the fit takes all of it for bytes.
    """
    rows = bench_rows(profile, result, model)
    if not (rows["read_mib"] > 0).any():
        raise DeviceError(
            "The benchmark has no streamed case that read experts, so there is nothing to "
            "calibrate. Run `labkit bench MODEL --cases resident,stream-serial,stream "
            "--cache-mib A,B --out DIR` with budgets below the model's experts."
        )
    start = replace(Constants.of(profile), layer_ms=0.0)
    if profile.get("hidden_pct") is None:
        start = replace(start, hidden_pct=START.hidden_pct)
    return fit_constants(rows, start)


def _compute_figures(
    profile: DeviceProfile, fit: Fit, model: ModelSheet, said: str
) -> dict[str, Figure]:
    """The compute time of the fit, split into bytes and layers as the profile splits it."""
    before = Constants.of(profile)
    work = {"weight_mib": model.token_bytes / MIB, "layers": model.n_layers}
    fixed = model.n_layers * before.layer_ms / 1000
    share = fixed / float(token_time(before, **work).compute_s)
    seconds = float(token_time(fit.constants, **work).compute_s)
    rate = fit.constants.decode_gb_s / (1 - share)
    found = {"decode_gb_s": Figure(round(rate, 3), "fitted", said)}
    if share:
        layer_ms = 1000 * share * seconds / model.n_layers
        found["layer_ms"] = Figure(round(layer_ms, 5), "fitted", f"{said}; its part as measured")
    return found


def bench_rows(profile: DeviceProfile, result: BenchResult, model: ModelSheet) -> pd.DataFrame:
    """The cases of a benchmark as the speed model sees them; columns as in `decode_rows`.

    Repacked, traced and failed cases are left out. A mapped case counts as mapped where a memory
    limit kept the file from fitting, else as one in memory.
    """
    from labkit.bench.summary import summary

    options = {case["name"]: case.get("options") or {} for case in result.facts["cases"]}
    short = result.facts.get("memory_limit_mib") is not None
    table = summary(result)
    rows = []
    for row in table[table["status"] == "ok"].to_dict("records"):
        kind = row["kind"]
        streamed = kind.startswith("stream")
        mapped = kind == "mmap" and short
        if not streamed and kind not in ("resident", "mmap"):
            continue
        lanes = int(options[row["case"]].get("lanes", 4))
        rows.append(
            {
                "case": row["case"],
                "weight_mib": model.token_bytes / MIB,
                "layers": model.n_layers,
                "read_mib": _read_mib(row, model, streamed=streamed, mapped=mapped),
                "flash_mib_s": profile.flash_mib_s(model.slice_kib, lanes),
                "overlapped": kind in _OVERLAPPED,
                "mapped": mapped,
                "decode_tok_s": row["decode_tok_s"],
            }
        )
    return pd.DataFrame(rows, columns=_COLUMNS)


_COLUMNS = [
    "case", "weight_mib", "layers", "read_mib", "flash_mib_s", "overlapped", "mapped",
    "decode_tok_s",
]  # fmt: skip


def _read_mib(row: dict, model: ModelSheet, *, streamed: bool, mapped: bool) -> float:
    """Expert bytes that a token asked flash for."""
    if streamed:
        return float(row["read_mib"])
    if mapped and row["limit_mib"] == row["limit_mib"]:
        from labkit.device.hits import assumed_hit_pct

        left = max(row["limit_mib"] - model.dense_bytes / MIB, 0)
        missed = 1 - float(assumed_hit_pct(left, 0, model.routed_bytes / MIB)) / 100
        return missed * model.token_cycle_bytes / MIB
    return 0.0
