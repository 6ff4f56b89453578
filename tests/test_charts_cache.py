"""Charts of a cache: their titles say what the tables hold, and they are drawn."""

from __future__ import annotations

import pandas as pd
import pytest

from labkit import charts
from labkit.charts import cache
from labkit.policy import POLICIES


@pytest.fixture
def curve() -> pd.DataFrame:
    rows = [
        (10.0, "lru", 0.0, 100.0), (10.0, "lfu", 20.0, 80.0), (10.0, "belady", 40.0, 60.0),
        (20.0, "lru", 50.0, 50.0), (20.0, "lfu", 45.0, 55.0), (20.0, "belady", 70.0, 30.0),
        (30.0, "lru", 60.0, 40.0), (30.0, "lfu", 60.0, 40.0), (30.0, "belady", 80.0, 20.0),
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["budget_mib", "policy", "hit_pct", "read_mib"])


def words(chart) -> str:
    assert charts.png(chart.to_dict())[:4] == b"\x89PNG"
    return charts.finding(chart).replace("\u00a0", " ")


def test_what_a_budget_buys(curve: pd.DataFrame) -> None:
    chart = cache.hit_rate_curves(curve, 12.0, tokens=10)
    assert words(chart) == (
        "20.0 MiB buy 50 % hits with lru, the best policy there; the optimum would find 70 %"
    )
    (slider,) = chart.to_dict()["params"]
    assert (slider["value"], slider["bind"]["min"], slider["bind"]["max"]) == (20, 10, 30)
    assert slider["bind"]["step"] == 10


def test_the_slider_can_reach_its_end(curve: pd.DataFrame) -> None:
    parts = [
        curve[curve["budget_mib"] == 10].assign(budget_mib=n * 4.78412 / 16) for n in range(1, 17)
    ]
    (slider,) = cache.hit_rate_curves(pd.concat(parts), 0.6, 10).to_dict()["params"]
    low, high, step = (slider["bind"][name] for name in ("min", "max", "step"))
    assert (high - low) / step == pytest.approx(15, abs=1e-6)
    assert high == pytest.approx(4.78, abs=0.01)
    assert (slider["value"] - low) / step == pytest.approx(5, abs=1e-6)


def test_every_policy_has_a_look_of_its_own_and_stands_in_one_legend(curve: pd.DataFrame) -> None:
    names = list(POLICIES)
    rows = curve[curve["policy"] == "lru"]
    every = pd.concat([rows.assign(policy=name) for name in names])
    (panel, *_) = cache.hit_rate_curves(every, 12.0, 10).to_dict()["vconcat"]
    (lines,) = (p for p in panel["layer"] if p["mark"]["type"] == "line")
    looks = [lines["encoding"][channel] for channel in ("color", "strokeDash")]
    assert all(look["scale"]["domain"] == names and look["legend"] is None for look in looks)
    pairs = zip(*(map(str, look["scale"]["range"]) for look in looks), strict=True)
    assert len(set(pairs)) == len(names)


def test_the_title_names_lru_beside_a_better_policy(curve: pd.DataFrame) -> None:
    curve.loc[curve["policy"] == "lfu", "hit_pct"] = 55.0
    assert "55 % hits with lfu, the best policy there, and 50 % with lru" in words(
        cache.hit_rate_curves(curve, 12.0, tokens=10)
    )


def test_one_budget_is_a_chart_too(curve: pd.DataFrame) -> None:
    assert "10.0 MiB" in words(cache.hit_rate_curves(curve[curve["budget_mib"] == 10], 12.0, 10))


def test_what_the_next_mib_is_worth(curve: pd.DataFrame) -> None:
    # From 10 to 20 MiB lru reads 50 MiB less over 10 tokens: 0.5 MiB per token and MiB; then 0.1.
    assert words(cache.marginal_value(curve, tokens=10)) == (
        "Under lru memory is worth most at 15.0 MiB: there each MiB saves 512 KiB of reads per "
        "token; at 25.0 MiB 102 KiB"
    )


def test_on_a_big_model_it_is_the_next_100_mib(curve: pd.DataFrame) -> None:
    curve["budget_mib"] *= 100
    # From 1000 to 2000 MiB lru reads 50 MiB less over 10 tokens: 0.5 MiB per token and 100 MiB.
    assert words(cache.marginal_value(curve, tokens=10)) == (
        "Under lru memory is worth most at 1,500.0 MiB: there each 100 MiB saves 0.5 MiB of reads "
        "per token; at 2,500.0 MiB 0.1 MiB"
    )


def test_a_trace_in_which_nothing_comes_again(curve: pd.DataFrame) -> None:
    curve["hit_pct"], curve["read_mib"] = 0.0, 100.0
    for some in (curve, curve[curve["budget_mib"] == 10], curve.assign(hit_pct=float("nan"))):
        chart = cache.hit_rate_curves(some, 12.0, tokens=10)
        assert words(chart) == "No budget finds anything: no expert is asked for twice"
        assert words(cache.marginal_value(some, 10)) == "More memory saves nothing under lru here"


def test_where_the_misses_are() -> None:
    batches = pd.DataFrame(
        {
            "layer": [1, 1, 2, 2],
            "phase": ["prefill", "decode", "prefill", "decode"],
            "misses": [1, 2, 1, 0],
            "read_bytes": [2**20, 2**21, 2**20, 0],
        }
    )
    assert words(cache.misses_by_layer(batches, 8.0, "lru")) == (
        "Layer 1 reads most: 75 % of all bytes (an even share: 50 %); the prompts cause 50 %"
    )
    batches["read_bytes"] = 0
    assert words(cache.misses_by_layer(batches, 8.0, "lru")) == "Nothing had to be read"


def test_prediction_and_run(curve: pd.DataFrame) -> None:
    live = pd.DataFrame(
        {"budget_mib": [20.0], "policy": ["lru"], "hit_pct": [50.0], "predicted_pct": [50.0]}
    )
    assert "exactly" in words(cache.predicted_and_live(curve, live))
    live["hit_pct"] = 51.5
    assert "by 1.50 points" in words(cache.predicted_and_live(curve, live))
