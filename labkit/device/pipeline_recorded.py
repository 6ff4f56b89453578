"""The two-slot model against prefills that others recorded on a phone with an HTP."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pandas as pd

from labkit.device.htp import CPU, HTP
from labkit.device.pipeline_rates import Rates, rates_of
from labkit.device.pipeline_work import layers_of, model_prefill
from labkit.device.profile import load_profile
from labkit.device.recorded import RECORDED_DIR, prefill_runs
from labkit.sheet import sheet

if TYPE_CHECKING:
    from labkit.sheet import ModelSheet

#: The phone of the recorded prefills: its HTP rate is fitted to the first two Q4_0 rows.
PROFILE = "oneplus-15r"
_FITTED_TOKENS = (1418, 1921)
#: Mean width of a mixed quantisation; Q4_0 alone has its own.
_BITS = {"Q4_0": 4.5, "Q4_K_M": 4.85}


def recorded_prefills() -> pd.DataFrame:
    """Recorded two-slot prefills on an HTP, beside what the model makes of them.

    Columns: model, quant, prompt_tokens, recorded_s, modelled_s, error_pct (modelled over recorded
    - 1), prepare_s, compute_s, wait_s (all three modelled), fitted (the device's rate comes from
    this row), on_cpu (a role whose weights the device refused, else ""), source, url.
    """
    runs = prefill_runs()
    runs = runs[runs["backend"] == HTP].assign(on_cpu="")
    refused = pd.read_csv(RECORDED_DIR / "prefill_fallbacks.csv")
    rates = rates_of(load_profile(PROFILE))
    rows = [_row(run, rates) for run in pd.concat([runs, refused]).to_dict("records")]
    return pd.DataFrame(rows)


def _row(run: dict, rates: Rates) -> dict:
    ledger = sheet(run["model"].lower(), bits=_BITS.get(run["quant"], 4.5))
    table = _refused(ledger, run["on_cpu"]) if run["on_cpu"] else None
    made = model_prefill(
        layers_of(ledger, table), int(run["prompt_tokens"]), rates, chunk=int(run["ubatch"])
    )
    fitted = run["quant"] == "Q4_0" and run["prompt_tokens"] in _FITTED_TOKENS
    return {
        **{name: run[name] for name in ("model", "quant", "prompt_tokens")},
        "recorded_s": run["prefill_s"],
        "modelled_s": made.prefill_s,
        "error_pct": 100 * (made.prefill_s / run["prefill_s"] - 1),
        "prepare_s": made.timeline.prepare_s,
        "compute_s": made.timeline.compute_s,
        "wait_s": made.timeline.wait_s,
        "fitted": fitted and not run["on_cpu"],
        **{name: run[name] for name in ("on_cpu", "source", "url")},
    }


def _refused(ledger: ModelSheet, role: str) -> pd.DataFrame:
    """A placement of a shape, for which all tensors of one role stay on the CPU."""
    rows = [
        (w.name, w.layer, w.role, CPU if w.role == role else HTP, math.nan) for w in ledger.weights
    ]
    table = pd.DataFrame(rows, columns=["tensor", "layer", "role", "on", "device_mib"])
    table["device_mib"] = [w.nbytes / 2**20 for w in ledger.weights]
    return table.astype({"layer": "Int64"})
