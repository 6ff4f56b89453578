"""The comparison of the kinds of prefetch, what it says, and its chart."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import pytest

from labkit import bundled, charts
from labkit.charts.foretold import foretold_by_layer
from labkit.errors import OptionError
from labkit.prefetch_lab import compare_prefetch, foretold, text_tokens, verdict

pytestmark = pytest.mark.filterwarnings("ignore::labkit.runtime.BudgetWarning")


def words(chart) -> str:
    assert charts.png(chart.to_dict())[:4] == b"\x89PNG"
    return charts.finding(chart).replace("\u00a0", " ").replace("\u2011", "-")


def test_the_kinds_side_by_side() -> None:
    model = bundled.model_path()
    tokens = text_tokens(model, 30)
    assert len(set(tokens)) > 10
    found = compare_prefetch(model, tokens, warmup=6, cache_mib=0.4, overlap="serial")
    summary = found.summary.set_index("prefetch")
    assert summary.index.tolist() == ["none", "previous", "router"]
    plain = summary.to_dict("index")["none"]
    assert plain["prefetch_mib"] == 0
    assert plain["time_ratio"] == plain["time_ratio_low"] == plain["time_ratio_high"] == 1
    assert summary["hit_pct"].is_monotonic_increasing
    assert (summary["hit_pct"] == summary["prefetch_hit_pct"]).all()
    assert (summary["time_ratio_low"] <= summary["time_ratio_high"]).all()
    together = foretold(found.layers).set_index("prefetch").to_dict("index")
    assert together["router"]["recall_pct"] > together["previous"]["recall_pct"] > 12.5
    assert together["router"]["control_wrong"] == 0
    assert pd.isna(together["previous"]["control_right"])
    finding = words(foretold_by_layer(found.layers))
    assert finding.startswith("The next layer's router foretells")


def test_a_model_whose_routers_cannot_be_asked(synth_model: Callable) -> None:
    path = synth_model("gemma4")
    tokens = text_tokens(path, 12)
    found = compare_prefetch(path, tokens, cache_mib=64, overlap="serial", n_ctx=256)
    assert found.summary["prefetch"].tolist() == ["none", "previous"]
    assert words(foretold_by_layer(found.layers)).startswith("The token before foretells")


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(OptionError, match="leave none"):
        compare_prefetch(bundled.model_path(), [1, 2, 3], warmup=3)


def test_the_verdict_says_what_the_interval_allows() -> None:
    summary = pd.DataFrame(
        {
            "prefetch": ["none", "previous", "router"],
            "hit_pct": [0.0, 30.0, 80.0],
            "read_mib": [10.0, 14.0, 11.0],
            "time_ratio": [1.0, 1.2, 0.9],
            "time_ratio_low": [1.0, 1.1, 0.8],
            "time_ratio_high": [1.0, 1.3, 1.02],
        }
    )
    previous, router = verdict(summary)
    assert previous.startswith("previous: hits 0 -> 30 %, read a token 10.00 -> 14.00 MiB")
    assert previous.endswith("slower than without.")
    assert router.endswith("no difference that these tokens show.")
    summary.loc[2, "time_ratio_high"] = 0.95
    assert verdict(summary)[1].endswith("faster than without.")
