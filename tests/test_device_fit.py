"""The speed model against published runs: fitted on one half of the rows, scored on the other.

The halves are the even and the odd rows of data/recorded/recorded_runs.csv, counted from 0. All
mapped runs (memory too small for the file) happen to be odd.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from labkit.device import load_profile
from labkit.device.fit import Fit, errors, fit_constants, predict
from labkit.device.hits import SKEW_HIGH, SKEW_LOW, assumed_hit_pct
from labkit.device.recorded import (
    decode_rows,
    flash_read_ceiling,
    htp_points,
    prefill_runs,
    recorded_models,
    recorded_runs,
)
from labkit.device.speed import Constants, fault_time, token_time
from labkit.errors import DeviceError

PHONE = load_profile("oneplus-15r")


def score(*, fitted_on: int, assume_hits: bool = False) -> tuple[Fit, pd.DataFrame]:
    rows = decode_rows(PHONE, assume_hits=assume_hits)
    half = rows["row"] % 2 == fitted_on
    fit = fit_constants(rows[half])
    return fit, errors(rows[~half], fit.constants)


def test_odd_rows_predict_the_even_ones():
    _, table = score(fitted_on=1)
    assert len(table) == 15
    off = table["error_pct"].abs()
    print(f"median {off.median():.1f} %, worst {off.max():.1f} %")  # noqa: T201
    assert off.median() <= 15
    worst = table.iloc[int(off.to_numpy().argmax())]
    assert off.max() < 40, worst.to_dict()


def test_even_rows_predict_the_odd_ones():
    _, table = score(fitted_on=0)
    assert len(table) == 16
    # With the four mapped runs, whose page-fault rate the even rows do not show at all.
    assert table["error_pct"].abs().median() <= 15
    streamed = table.loc[~table["mapped"], "error_pct"].abs()
    assert streamed.median() <= 15
    assert streamed.max() < 40


@pytest.mark.parametrize("fitted_on", [0, 1])
def test_even_an_assumed_hit_rate_predicts_the_other_half(fitted_on: int):
    _, table = score(fitted_on=fitted_on, assume_hits=True)
    assert table.loc[~table["mapped"], "error_pct"].abs().median() <= 15


def test_the_profile_holds_the_fit_of_all_rows():
    fit = fit_constants(decode_rows(PHONE))
    for name in ("decode_gb_s", "read_share_pct", "hidden_pct", "fault_mib_s"):
        assert PHONE.need(name) == pytest.approx(getattr(fit.constants, name), rel=0.01), name
    assert PHONE.need("band_pct") == pytest.approx(fit.band_pct, rel=0.01)


def test_mapped_runs_differ_too_much_for_one_rate():
    """What the profile's page-fault rate is worth: the order of magnitude, no more."""
    fit = fit_constants(decode_rows(PHONE))
    mapped = fit.errors[fit.errors["mapped"]]
    ratio = mapped["predicted_tok_s"] / mapped["decode_tok_s"]
    assert len(mapped) == 4
    assert ratio.max() / ratio.min() > 10
    assert ratio.between(1 / 6, 6).all()


def made_up(constants: Constants, n: int = 24) -> pd.DataFrame:
    random = np.random.default_rng(0)
    read = random.uniform(50, 1500, n)
    rows = pd.DataFrame(
        {
            "weight_mib": random.uniform(800, 3000, n),
            "layers": random.integers(24, 60, n),
            "read_mib": read,
            "flash_mib_s": random.uniform(1000, 2500, n),
            "overlapped": np.arange(n) % 2 == 0,
            "mapped": np.arange(n) % 6 == 5,
        }
    )
    return rows.assign(decode_tok_s=predict(rows, constants))


def test_the_fit_finds_constants_that_made_the_runs():
    truth = Constants(25.0, 80.0, 60.0, fault_mib_s=150.0)
    fit = fit_constants(made_up(truth))
    for name in ("decode_gb_s", "read_share_pct", "hidden_pct", "fault_mib_s"):
        assert getattr(fit.constants, name) == pytest.approx(getattr(truth, name), rel=0.05), name
    assert fit.band_pct < 3


def test_a_constant_that_no_run_shows_stays_where_it_began():
    runs = made_up(Constants(25.0, 80.0, fault_mib_s=1)).assign(overlapped=False, mapped=False)
    assert fit_constants(runs).constants.hidden_pct == 50
    resident = runs.assign(read_mib=0.0, decode_tok_s=10.0)
    assert fit_constants(resident).constants.read_share_pct == 70


def test_runs_that_cannot_be_fitted_are_refused():
    runs = made_up(Constants(25.0, fault_mib_s=100))
    with pytest.raises(DeviceError, match="Only mapped runs"):
        fit_constants(runs.assign(mapped=True))
    for bad in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(DeviceError, match="without a decode rate"):
            fit_constants(runs.assign(decode_tok_s=bad))


def test_times_add_up():
    half = Constants(decode_gb_s=10, read_share_pct=50, hidden_pct=50, layer_ms=1, fault_mib_s=100)
    work = {"weight_mib": 1e9 / 2**20, "layers": 50}
    serial = token_time(half, **work, read_mib=100, flash_mib_s=2000)
    assert serial.compute_s == pytest.approx(0.1 + 0.05)
    assert serial.read_s == pytest.approx(0.1)
    assert serial.wall_s == pytest.approx(0.25)
    beside = token_time(half, **work, read_mib=100, flash_mib_s=2000, overlapped=True)
    assert beside.wall_s == pytest.approx(0.25 - 0.05)
    assert beside.exposed_s == pytest.approx(0.05)
    assert token_time(half, **work).wall_s == pytest.approx(0.15)
    assert fault_time(half, **work, fault_mib=10).wall_s == pytest.approx(0.25)


def test_assumed_hits_know_the_cliff_and_the_whole_cache():
    assert assumed_hit_pct(99, 100, 1000) == 0
    assert 0 < assumed_hit_pct(101, 100, 1000) < 100
    assert assumed_hit_pct(1000, 100, 1000) == 100
    assert assumed_hit_pct(5000, 100, 1000) == 100
    rates = assumed_hit_pct(np.array([200, 400, 600]), 100, 1000)
    assert (np.diff(rates) > 0).all()


def test_the_assumption_spans_the_recorded_hit_rates():
    rows = recorded_runs().merge(recorded_models(), on=["model", "quant"], suffixes=("", "_full"))
    rows = rows[(rows["cache_mib"] > 0) & rows["read_mib_per_token"].notna()]
    cycle = rows["token_cycle_mib"] * rows["top_k"] / rows["top_k_full"]
    hit = 100 * (1 - rows["read_mib_per_token"] / cycle)
    low, high = (
        assumed_hit_pct(rows["cache_mib"].to_numpy(), cycle.to_numpy(), total, skew)
        for total in [rows["expert_mib"].to_numpy()]
        for skew in (SKEW_LOW, SKEW_HIGH)
    )
    assert ((hit >= low - 1) & (hit <= high + 1)).all()


@pytest.mark.parametrize(
    "table", [recorded_runs, recorded_models, flash_read_ceiling, htp_points, prefill_runs]
)
def test_every_recorded_row_has_a_source(table):
    rows = table()
    assert len(rows)
    named = rows["source"] if "source" in rows else rows["note"]
    assert named.notna().all()
    own = (
        rows["source"].isin(["seed-0"]) if "source" in rows else rows["note"].str.contains("shape")
    )
    assert rows.loc[~own, "url"].str.startswith("https://").all()


def test_recorded_sizes_agree_with_each_other():
    models = recorded_models()
    whole = models["token_cycle_mib"] * models["experts"] / models["top_k"]
    assert np.allclose(models["expert_mib"], whole, rtol=0.001)
    assert (models["dense_token_mib"] <= models["dense_mib"]).all()
    file_mib = models["file_gib"] * 1024
    assert ((models["expert_mib"] + models["dense_mib"]) <= file_mib * 1.001).all()
