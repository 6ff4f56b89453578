"""Echo and its forecast: what they expect on cases worked by hand, and what it buys."""

from __future__ import annotations

import random

import numpy as np
import pandas as pd
import pytest

from labkit.bundled import model_path, prompts
from labkit.cache_lab import record
from labkit.policy import ONLINE, Echo, Forecast, make_policy
from labkit.replay import demand, replay, replay_batches
from labkit.trace import RouteTrace, RoutingBlock

MIB = 2**20


def learn(forecast: Forecast, tokens: list[list[list[int]]]) -> None:
    """Tokens of layers of choices, one batch after another."""
    for token in tokens:
        for layer, choices in enumerate(token):
            forecast.learn([(layer, expert) for expert in choices])


def scripted_trace(seed: int, tokens: int = 240, layers: int = 8, k: int = 3) -> RouteTrace:
    """Words of a small language, each with its experts, in phrases that come again."""
    rng = np.random.default_rng(seed)
    words = np.argsort(rng.random((40, layers, 32)), axis=2)[:, :, :k]
    phrases = [rng.integers(0, 40, 8) for _ in range(9)]
    trace = RouteTrace(n_layers=layers, n_expert=32, entry_bytes=dict.fromkeys(range(layers), MIB))
    said = np.concatenate([phrases[i] for i in rng.integers(0, 9, tokens // 8 + 1)])[:tokens]
    prompt = 24
    for layer in range(layers):
        add(trace, "prefill", layer, range(prompt), words[said[:prompt], layer])
    for step in range(prompt, tokens):
        for layer in range(layers):
            add(trace, "decode", layer, [step], words[said[step : step + 1], layer])
    return trace


def add(trace: RouteTrace, phase: str, layer: int, steps, experts: np.ndarray) -> None:
    nothing = np.zeros(experts.shape, np.int64)
    trace.append(
        RoutingBlock(0, phase, layer, np.array(steps), experts, nothing * 1.0, nothing > 0, nothing)
    )


def test_recent_uses_count_more_and_several_add_up() -> None:
    forecast = Forecast(1)
    learn(forecast, [[[0]], [[1]], [[0]], [[2]]])
    ages = np.arange(1, 5)
    recent = np.exp(-ages / 64) / ages / (np.exp(-ages / 64) / ages).sum()
    # No token has anything in common with the last, so likeness votes alike for what followed the
    # other three, and for three tenths of that for what came two tokens after them.
    alike = np.array([(1 + 0.3) / 3, (1 + 0.3) / 3, 1 / 3]) / 1.3  # ages 1, 2, 3
    votes = [recent[3] + recent[1] + alike[1], recent[2] + alike[2], recent[0] + alike[0]]
    assert forecast.table[0, :3] == pytest.approx(votes, abs=1e-6)


def test_what_followed_a_moment_like_this_is_expected() -> None:
    forecast = Forecast(2)
    history = [[[token % 5], [token % 5 + 5]] for token in range(13)]  # 0 1 2 3 4 0 1 2 ...
    learn(forecast, history)
    # After 2 comes 3, though 3 and 4 were used longest ago.
    assert forecast.table[0, :5].argmax() == 3
    assert forecast.table[1, 5:10].argmax() == 3


def test_a_prompt_is_told_token_by_token_and_means_the_same() -> None:
    tokens = [[[1, 2], [3, 4]], [[2, 5], [4, 6]], [[1, 7], [3, 8]], [[2, 5], [1, 6]]]
    by_token, at_once = Forecast(2), Forecast(2)
    learn(by_token, tokens)
    for layer in range(2):
        choices = [expert for token in tokens for expert in token[layer]]
        distinct = [(layer, expert) for expert in dict.fromkeys(choices)]
        at_once.learn(distinct, choices)
    # Only the likeness of earlier tokens' past differs, and nothing is like the present here.
    assert at_once.table[:, :9].argmax(axis=1).tolist() == by_token.table[:, :9].argmax(1).tolist()
    assert remembered(at_once, 4) == remembered(by_token, 4)


def remembered(forecast: Forecast, n: int) -> list[list[set[int]]]:
    """The experts of the last `n` tokens, newest first, by layer."""
    by_age = forecast._used[:, forecast._newest : forecast._newest + n] - 1
    return [[{e for e in token if e >= 0} for token in layer] for layer in by_age.tolist()]


def test_a_last_layer_that_routes_one_token_of_a_prompt_stays_aligned() -> None:
    forecast = Forecast(2)
    forecast.learn([(0, 1), (0, 2), (0, 3)], [1, 3, 2, 3])
    forecast.learn([(1, 9), (1, 8)])
    forecast.learn([(0, 1), (0, 3)])
    assert remembered(forecast, 3) == [[{1, 3}, {2, 3}, {1, 3}], [set(), {8, 9}, set()]]


def test_only_a_window_is_remembered_but_ties_go_to_the_newer() -> None:
    forecast = Forecast(1, window=16)
    learn(forecast, [[[1]], [[2]], *[[[3]]] * 40])
    assert 0 < forecast.table[0, 1] < forecast.table[0, 2] < 1e-6
    long = Forecast(1, window=16)
    learn(long, [[[token * 7 % 11]] for token in range(500)])
    short = Forecast(1, window=16)
    learn(short, [[[token * 7 % 11]] for token in range(400, 500)])
    assert long.table[0, :11] == pytest.approx(short.table[0, :11], abs=1e-5)


def test_caches_of_all_budgets_can_share_a_forecast() -> None:
    trace = scripted_trace(1)
    budgets = [0, 10, 30, 60, 100]
    together = replay(trace, budgets, ["echo"])
    alone = [replay(trace, [budget], ["echo"]).iloc[0] for budget in budgets]
    assert together["hit_pct"].tolist() == [row["hit_pct"] for row in alone]


def rates(trace: RouteTrace, cycles: list[float]) -> pd.DataFrame:
    """Hit rates by policy at budgets in token cycles, with the best of the others beside."""
    asked = demand(trace)
    table = replay(asked, [asked.cycle_bytes / MIB * part for part in cycles])
    found = table.pivot(index="budget_mib", columns="policy", values="hit_pct")
    others = [name for name in ONLINE if name != "echo"]
    recovered = 100 * (found["echo"] - found["lru"]) / (found["belady"] - found["lru"])
    return found.assign(others=found[others].max(axis=1), recovered_pct=recovered)


@pytest.mark.parametrize("seed", range(3))
def test_text_that_repeats_itself_wins_back_a_third_of_what_lru_loses(seed: int) -> None:
    found = rates(scripted_trace(seed), [0.5, 0.8, 1.2, 2, 3, 5])
    assert (found["recovered_pct"] > 30).all()
    # Its words are as often and as likely all the time, which is where plain counting is at home.
    assert (found["echo"] > found["others"] - 4).all()
    assert (found["echo"] > found["others"])[:3].all()


def test_on_the_bundled_model_no_other_policy_is_better() -> None:
    trace, _ = record(model_path(), [domain[0] for domain in prompts().values()], 96)
    found = rates(trace, [0.3, 0.6, 0.9, 1.2, 1.6, 2.2, 3, 4.5])
    assert (found["echo"] >= found["others"] - 0.5).all(), found.T
    assert (found["recovered_pct"] > 40)[:6].all(), found.T


def test_no_more_churn_than_lru() -> None:
    asked = demand(scripted_trace(5))
    for budget in (10, 30, 60, 120):
        lru, echo = (replay_batches(asked, budget, name) for name in ("lru", "echo"))
        assert echo["misses"].sum() <= lru["misses"].sum()
        assert echo["evicted"].sum() <= lru["evicted"].sum()


def test_layers_and_experts_that_nobody_announced_find_room() -> None:
    cache = make_policy("echo", 100, {0: 10})
    rng = random.Random(1)
    assert isinstance(cache, Echo)
    for _ in range(50):
        for layer in (0, 3, 17):
            cache.request(layer, rng.sample(range(300), 2), 10)
            cache.admit([(rng.choice((1, 3, 90)), rng.randrange(600))], 10)
            assert cache.resident_bytes <= 100
            assert len(cache) * 10 == cache.resident_bytes
