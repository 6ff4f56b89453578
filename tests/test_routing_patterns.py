"""What routing repeats and could be predicted from, on cases worked by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from labkit import routing_metrics as metrics
from labkit.routing_patterns import (
    co_activation,
    domain_information,
    imbalance,
    overlap_by_lag,
    predictor_accuracy,
    working_set,
)
from labkit.trace import RouteTrace


def routing(tokens: list[list[int]], layer: int = 0) -> pd.DataFrame:
    rows = [
        (0, step, layer, slot, expert)
        for step, experts in enumerate(tokens)
        for slot, expert in enumerate(experts)
    ]
    return pd.DataFrame(rows, columns=["turn", "step", "layer", "slot", "expert"])


TOKENS = [[0, 1], [1, 2], [0, 1], [0, 3]]  # loads 3, 3, 1, 1 of 8


def test_imbalance_by_hand() -> None:
    row = imbalance(routing(TOKENS), 4).iloc[0]
    assert row["max_times_fair"] == 1.5
    assert row["cv"] == pytest.approx(0.5)  # 1.5, 1.5, 0.5, 0.5 around 1
    assert row["entropy_bits"] == pytest.approx(2 * 3 / 8 * np.log2(8 / 3) + 2 / 8 * 3)


def test_overlap_by_lag_by_hand() -> None:
    found = overlap_by_lag(routing(TOKENS), [1, 2, 9]).set_index("lag")["overlap"]
    assert found[1] == pytest.approx((0.5 + 0.5 + 0.5) / 3)
    assert found[2] == pytest.approx((1 + 0) / 2)
    assert np.isnan(found[9])


def test_the_working_set_grows_by_what_is_new() -> None:
    grown = working_set(routing(TOKENS))
    assert grown["entries"].tolist() == [2, 3, 3, 4]
    assert grown["new"].tolist() == [2, 1, 0, 1]


def test_domain_information_by_hand() -> None:
    apart = {"a": routing([[0, 1]]), "b": routing([[2, 3]])}
    assert domain_information(apart, 4)["information_bits"].tolist() == [pytest.approx(1)]
    alike = {"a": routing([[0, 1]]), "b": routing([[1, 0]])}
    assert domain_information(alike, 4)["information_bits"].tolist() == [pytest.approx(0)]
    # Expert 1 is used by both: it tells nothing, and it makes up half of the choices.
    half = {"a": routing([[0, 1]]), "b": routing([[1, 2]])}
    assert domain_information(half, 4)["information_bits"].tolist() == [pytest.approx(0.5)]


def test_co_activation_by_hand() -> None:
    table = pd.concat([routing([[0], [0], [1], [1]]), routing([[2], [2], [3], [2]], layer=1)])
    lift = co_activation(table, 0, 1, 4)
    assert lift[0, 2] == pytest.approx(1 / 0.75)
    assert lift[1, 2] == pytest.approx(0.5 / 0.75)
    assert lift[0, 3] == 0
    assert lift[1, 3] == pytest.approx(2)
    assert np.isnan(lift[2, 2])


def test_predictors_by_hand() -> None:
    table = routing(TOKENS)
    table["phase"] = ["prefill"] * 4 + ["decode"] * 4
    found = predictor_accuracy(table).set_index("predictor")["recall"]
    # Generated: {0, 1} after {1, 2}, then {0, 3} after {0, 1}.
    assert found["previous token"] == pytest.approx((0.5 + 0.5) / 2)
    # Most used before them: 1 and then 0 (the lower of 0 and 2); after them 1 and 0.
    assert found["hot list"] == pytest.approx((1 + 0.5) / 2)
    assert found["hot list of the prompt"] == pytest.approx((1 + 0.5) / 2)
    wide = predictor_accuracy(table, hot=3).set_index("predictor")["recall"]
    assert wide["hot list"] == pytest.approx((1 + 0.5) / 2)


def test_a_table_without_phases_has_no_prompt() -> None:
    found = predictor_accuracy(routing(TOKENS)).set_index("predictor")["recall"]
    assert found["hot list of the prompt"] == 0
    assert found["previous token"] == pytest.approx((0 + 0.5 + 0.5 + 0.5) / 4)
    assert predictor_accuracy(routing([])).isna()["recall"].all()


def test_an_empty_trace_has_no_figures_and_breaks_none() -> None:
    none = RouteTrace().table
    tables = (
        metrics.expert_load(none, 4), metrics.churn(none), metrics.active_set(none, 2),
        metrics.routing_entropy(none), metrics.domain_purity({"a": none, "b": none}, 4),
        metrics.uniform_routing(none, 4), metrics.agreement(none, none), imbalance(none, 4),
        working_set(none), domain_information({"a": none, "b": none}, 4),
    )  # fmt: skip
    assert all(table.empty for table in tables)
    assert metrics.domain_distance({"a": none, "b": none}, 4)["total_variation"].isna().all()
    assert overlap_by_lag(none, [1])["overlap"].isna().all()
    assert np.isnan(co_activation(none, 0, 1, 4)).all()
