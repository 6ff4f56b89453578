"""Routing figures on cases worked by hand, and against a plain simulation."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pandas as pd
import pytest

from labkit import routing_metrics as metrics


def table(choices: dict[tuple[int, int], list[int]], **columns: list[float]) -> pd.DataFrame:
    """A routing table from {(step, layer): [experts in slot order]}."""
    rows = [
        (step, layer, slot, expert)
        for (step, layer), experts in choices.items()
        for slot, expert in enumerate(experts)
    ]
    return pd.DataFrame(rows, columns=["step", "layer", "slot", "expert"]).assign(**columns)


def random_table(steps: int, layers: int, experts: int, k: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    skew = rng.random(experts) ** 3
    return table(
        {
            (step, layer): rng.choice(experts, k, replace=False, p=skew / skew.sum()).tolist()
            for step in range(steps)
            for layer in range(layers)
        }
    )


def test_load_is_the_share_of_choices_in_the_layer() -> None:
    load = metrics.expert_load(table({(0, 1): [0, 1], (1, 1): [0, 3], (0, 2): [2, 1]}), 4)
    first = load[load["layer"] == 1]
    assert first["choices"].tolist() == [2, 1, 0, 1]
    assert first["load"].tolist() == [0.5, 0.25, 0.0, 0.25]
    assert first["times_fair"].tolist() == [2.0, 1.0, 0.0, 1.0]
    assert load[load["layer"] == 2]["load"].tolist() == [0.0, 0.5, 0.5, 0.0]


def test_load_refuses_an_expert_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="expert 7"):
        metrics.expert_load(table({(0, 0): [7]}), 4)


def test_purity_counts_domains_alike_however_long_their_texts() -> None:
    # Domain a: experts 0,1 at rates 1/2, 1/2. Domain b, twice as long: 1, 2, 3 at 1/4, 1/2, 1/4.
    a = table({(0, 0): [0, 1]})
    b = table({(i, 0): [2, 1] if i == 0 else [2, 3] for i in range(2)})
    purity = metrics.domain_purity({"a": a, "b": b}, 5)
    # rates: a = 1/2 1/2 0 0 0; b = 0 1/4 1/2 1/4 0
    assert purity["purity"].tolist()[:4] == pytest.approx([1, 2 / 3, 1, 1])
    assert np.isnan(purity["purity"][4])
    assert purity["domain"].tolist()[:4] == ["a", "a", "b", "b"]
    assert pd.isna(purity["domain"][4])


def test_purity_of_one_routing_for_all_domains_is_one_over_domains() -> None:
    same = table({(0, 0): [0, 1], (1, 0): [1, 2]})
    purity = metrics.domain_purity(dict.fromkeys("abcd", same), 3)
    assert purity["purity"].tolist() == pytest.approx([0.25] * 3)


def test_domains_must_cover_the_same_layers() -> None:
    with pytest.raises(ValueError, match="layers"):
        metrics.domain_purity({"a": table({(0, 0): [0]}), "b": table({(0, 1): [0]})}, 2)


def test_total_variation() -> None:
    a, b = table({(0, 0): [0, 1]}), table({(0, 0): [1, 2]})
    apart = metrics.domain_distance({"a": a, "b": b, "c": a}, 3)
    assert apart["total_variation"].tolist() == pytest.approx([0.5, 0.0, 0.5])


def test_churn_is_what_the_token_before_did_not_use() -> None:
    rows = {(0, 0): [0, 1], (1, 0): [1, 2], (2, 0): [2, 1], (5, 0): [4, 5], (6, 0): [6, 7]}
    result = metrics.churn(table(rows))
    # Step 5 follows a gap; step 2 swaps slots only.
    assert result[["step", "churn"]].to_numpy().tolist() == [[1, 0.5], [2, 0.0], [6, 1.0]]


def test_churn_does_not_reach_across_turns() -> None:
    rows = pd.concat(
        [table({(0, 0): [0]}).assign(turn=0), table({(1, 0): [0], (2, 0): [1]}).assign(turn=1)]
    )
    assert metrics.churn(rows)[["turn", "step", "churn"]].to_numpy().tolist() == [[1, 2, 1.0]]


def test_active_set_counts_different_experts_in_the_window() -> None:
    rows = {(0, 0): [0, 1], (1, 0): [1, 2], (2, 0): [1, 2], (3, 0): [3, 0]}
    result = metrics.active_set(table(rows), 2)
    assert result[["step", "active"]].to_numpy().tolist() == [[1, 3], [2, 2], [3, 4]]
    assert metrics.active_set(table(rows), 5).empty
    with pytest.raises(ValueError, match="window"):
        metrics.active_set(table(rows), 0)


def test_entropy_of_weights() -> None:
    rows = table({(0, 0): [0, 1], (1, 0): [0, 1]}, weight=[2.0, 2.0, 3.0, 1.0])
    bits = metrics.routing_entropy(rows)["entropy_bits"].tolist()
    assert bits == pytest.approx([1.0, 0.811278], abs=1e-6)
    assert metrics.routing_entropy(rows.assign(weight=[np.nan, 1, 1, 0]))[
        "entropy_bits"
    ].tolist() == pytest.approx([np.nan, 0.0], nan_ok=True)


def test_reuse_distance_counts_other_entries_once() -> None:
    # a b c b a a: the second b has c between, the second a has b and c.
    rows = table({(step, 0): [expert] for step, expert in enumerate([0, 1, 2, 1, 0, 0])})
    assert metrics.reuse_distance(rows).tolist() == [pd.NA, pd.NA, pd.NA, 1, 2, 0]


def test_the_same_expert_of_another_layer_is_another_entry() -> None:
    rows = table({(0, 0): [0], (0, 1): [0], (1, 0): [0], (1, 1): [0]})
    assert metrics.reuse_distance(rows).tolist() == [pd.NA, pd.NA, 1, 1]


def test_reuse_distance_keeps_the_index_of_the_table() -> None:
    rows = random_table(20, 2, 6, 2, seed=1)
    mixed = rows.sample(frac=1, random_state=1)
    assert metrics.reuse_distance(mixed).sort_index().equals(metrics.reuse_distance(rows))


def test_a_cyclic_trace_hits_nothing_below_its_cycle_and_all_above() -> None:
    rows = table({(step, 0): [step % 8] for step in range(80)})
    assert metrics.lru_hit_rate(rows, 7 / 8, 8) == 0.0
    assert metrics.lru_hit_rate(rows, 1.0, 8) == pytest.approx(72 / 80)


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.9])
def test_lru_hits_equal_a_plain_simulation(fraction: float) -> None:
    rows = random_table(150, 3, 16, 3, seed=5)
    room = int(fraction * 3 * 16)
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    for layer, expert in zip(rows["layer"], rows["expert"], strict=True):
        hits += (layer, expert) in held
        held[layer, expert] = None
        held.move_to_end((layer, expert))
        if len(held) > room:
            held.popitem(last=False)
    assert metrics.lru_hit_rate(rows, fraction, 16) == pytest.approx(hits / len(rows))


def test_agreement_ignores_the_order_of_slots() -> None:
    a = table({(0, 0): [0, 1], (1, 0): [2, 3], (0, 1): [0, 1]})
    b = table({(0, 0): [1, 0], (1, 0): [2, 4], (0, 1): [5, 6]})
    assert metrics.agreement(a, b)["agreement"].tolist() == [0.75, 0.0]


def test_uniform_routing_is_the_baseline_that_theory_gives() -> None:
    rows = metrics.uniform_routing(random_table(1500, 2, 32, 4, seed=3), 32)
    assert rows.groupby(["step", "layer"])["expert"].nunique().eq(4).all()
    assert metrics.churn(rows)["churn"].mean() == pytest.approx(1 - 4 / 32, abs=0.01)
    assert metrics.expert_load(rows, 32)["times_fair"].between(0.7, 1.3).all()
    # Room for two tokens' choices, which share some, less what the token at hand pushes out.
    assert metrics.lru_hit_rate(rows, 0.25, 32) == pytest.approx(0.22, abs=0.03)


def test_empty_tables_have_no_figures() -> None:
    none = table({})
    assert metrics.churn(none).empty
    assert np.isnan(metrics.lru_hit_rate(none, 0.5, 8))
    assert metrics.reuse_distance(none).empty
