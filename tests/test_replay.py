"""Replay: the engine's accounting by hand, the recorded figures of others, and the cliff."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from labkit.errors import BudgetError, TraceError
from labkit.policy import ONLINE, POLICIES
from labkit.replay import demand, lru_curve, replay, replay_batches
from labkit.trace import RouteTrace, RoutingBlock

PEER = Path(__file__).resolve().parents[2] / "shared" / "peer"
MIB = 2**20


def block(phase: str, layer: int, positions: list[int], experts: list[list[int]]) -> RoutingBlock:
    ids = np.array(experts, np.int32).reshape(len(positions), -1)
    nothing = np.zeros(ids.shape, np.int64)
    return RoutingBlock(
        0, phase, layer, np.array(positions), ids, nothing * 1.0, nothing > 0, nothing
    )


def small_trace() -> RouteTrace:
    """Two layers of entries of 1 and 2 MiB; a prompt of two tokens, then two tokens."""
    trace = RouteTrace(n_layers=2, n_expert=8, entry_bytes={0: MIB, 1: 2 * MIB})
    for part in (
        block("prefill", 0, [0, 1], [[1, 2], [2, 3]]),
        block("prefill", 1, [1], [[5, 6]]),
        block("decode", 0, [2], [[1, 2]]),
        block("decode", 1, [2], [[5, 7]]),
        block("decode", 0, [3], [[2, 4]]),
        block("decode", 1, [3], [[7, 5]]),
    ):
        trace.append(part)
    return trace


def cyclic_trace(tokens: int = 20, layers: int = 6, k: int = 2) -> RouteTrace:
    trace = RouteTrace(n_layers=layers, n_expert=8, entry_bytes=dict.fromkeys(range(layers), MIB))
    for step in range(tokens):
        for layer in range(layers):
            trace.append(block("decode", layer, [step], [list(range(k))]))
    return trace


def random_trace(seed: int, tokens: int = 120, layers: int = 4, k: int = 2) -> RouteTrace:
    rng = np.random.default_rng(seed)
    sizes = {layer: int(rng.integers(1, 4)) * MIB for layer in range(layers)}
    trace = RouteTrace(n_layers=layers, n_expert=16, entry_bytes=sizes)
    odds = rng.dirichlet(np.full(16, 0.5), layers)
    for layer in range(layers):
        chosen = [rng.choice(16, k, replace=False, p=odds[layer]).tolist() for _ in range(5)]
        trace.append(block("prefill", layer, list(range(5)), chosen))
    for step in range(5, tokens):
        for layer in range(layers):
            chosen = rng.choice(16, k, replace=False, p=odds[layer]).tolist()
            trace.append(block("decode", layer, [step], [chosen]))
    return trace


def test_a_prompt_is_one_batch_and_an_expert_is_asked_for_once() -> None:
    asked = demand(small_trace())
    assert asked.batches == [
        [(0, 1), (0, 2), (0, 3)],
        [(1, 5), (1, 6)],
        [(0, 1), (0, 2)],
        [(1, 5), (1, 7)],
        [(0, 2), (0, 4)],
        [(1, 7), (1, 5)],
    ]
    assert asked.keys["step"].tolist() == [0, 0, 2, 2, 3, 3]
    assert asked.floor_bytes == 4 * MIB
    assert asked.cycle_bytes == 6 * MIB  # two of 1 MiB and two of 2
    assert asked.used_bytes == (4 + 3 * 2) * MIB


def test_a_long_prompt_can_be_cut_into_its_batches() -> None:
    batches = demand(small_trace(), ubatch=1).batches
    assert batches[:3] == [[(0, 1), (0, 2)], [(0, 2), (0, 3)], [(1, 5), (1, 6)]]


def test_hits_bytes_and_rates_by_hand() -> None:
    table = replay(small_trace(), [9], ["lru"]).iloc[0]
    # Prompt: 3 + 2 entries, 7 MiB. Token 2: 1, 2 hit; 5 hits, 7 is read (9 MiB). Token 3: 2 hits, 4
    # is read for 3 (oldest); 7 and 5 hit.
    assert table["hit_pct"] == pytest.approx(100 * 6 / 13)
    assert table["hit_pct_decode"] == pytest.approx(100 * 6 / 8)
    assert table["read_mib"] == 7 + 2 + 1
    assert table["peak_resident_mib"] == 9


def test_batches_add_up_to_the_table() -> None:
    trace = random_trace(1)
    for policy in POLICIES:
        table = replay(trace, [17], [policy]).iloc[0]
        batches = replay_batches(trace, 17, policy)
        lookups = batches["hits"].sum() + batches["misses"].sum()
        assert table["hit_pct"] == pytest.approx(100 * batches["hits"].sum() / lookups)
        assert table["read_mib"] == pytest.approx(batches["read_bytes"].sum() / MIB)
        assert batches["phase"].unique().tolist() == ["prefill", "decode"]


def test_below_the_token_cycle_lru_finds_nothing_and_above_it_all() -> None:
    trace = cyclic_trace(layers=100, k=1)
    cycle_mib = demand(trace).cycle_bytes / MIB
    table = replay(trace, [0.99 * cycle_mib, 1.01 * cycle_mib], ["lru"])
    assert table["hit_pct"].tolist() == [0, 95]  # the first of 20 tokens reads
    curve = lru_curve(trace)
    assert curve["hit_pct"].tolist() == [0, 95]
    assert curve["budget_mib"].tolist() == [0, cycle_mib]


def test_the_cliff_is_one_batch_wide() -> None:
    # A batch asks for all its entries before any goes, so what is left of it still counts.
    trace = cyclic_trace(layers=6, k=2)
    assert replay(trace, [10, 11, 12], ["lru"])["hit_pct"].tolist() == [0, 47.5, 95]
    curve = lru_curve(trace)
    assert curve["budget_mib"].tolist() == [0, 11, 12]
    assert curve["hit_pct"].tolist() == [0, 47.5, 95]


@pytest.mark.parametrize("seed", range(3))
def test_the_whole_lru_curve_equals_its_replay(seed: int) -> None:
    trace = random_trace(seed, k=1)
    budgets = [0, 1, 2.5, 4, 9, 16, 25, 64, 1000]
    curve = lru_curve(trace)
    at = np.searchsorted(curve["budget_mib"], budgets, side="right") - 1
    table = replay(trace, budgets, ["lru"])
    decode = table["hit_pct_decode"]
    # The prompt holds several experts of a layer in one batch, whose order may differ by one.
    assert curve["hit_pct_decode"].to_numpy()[at] == pytest.approx(decode.to_numpy(), abs=1.0)
    only_decode = RouteTrace(entry_bytes=trace.entry_bytes)
    for part in trace._blocks:
        if isinstance(part, RoutingBlock) and part.phase == "decode":
            only_decode.append(part)
    curve = lru_curve(only_decode)
    table = replay(only_decode, budgets, ["lru"])
    at = np.searchsorted(curve["budget_mib"], budgets, side="right") - 1
    for column in ("hit_pct", "hit_pct_decode", "read_mib"):
        assert curve[column].to_numpy()[at] == pytest.approx(table[column].to_numpy(), abs=1e-9)


def test_more_than_one_expert_a_token_moves_the_curve_by_a_few_lookups_at_most() -> None:
    trace = random_trace(5, tokens=400, k=4)
    budgets = [10, 20, 40, 60, 80]
    curve = lru_curve(trace)
    at = np.searchsorted(curve["budget_mib"], budgets, side="right") - 1
    table = replay(trace, budgets, ["lru"])
    assert curve["hit_pct"].to_numpy()[at] == pytest.approx(table["hit_pct"].to_numpy(), abs=1.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_resident_stays_within_the_budget_or_one_batch(policy: str) -> None:
    trace = random_trace(2, k=4)
    floor = demand(trace).floor_bytes / MIB
    table = replay(trace, [0, 1, 5, 20, 60, 10_000], [policy])
    assert (table["peak_resident_mib"] <= np.maximum(table["budget_mib"], floor)).all()
    # A budget larger than the model reads each entry once.
    assert table["read_mib"].iloc[-1] == pytest.approx(demand(trace).used_bytes / MIB)
    assert table["hit_pct"].iloc[0] == 0


def test_an_empty_trace_has_no_rate() -> None:
    table = replay(RouteTrace(), [1])
    assert table["policy"].tolist() == list(POLICIES)
    assert table["hit_pct"].isna().all()
    assert (table["read_mib"] == 0).all()
    assert lru_curve(RouteTrace())["hit_pct"].isna().all()
    assert replay_batches(RouteTrace(), 1).empty


def test_one_layer_and_one_token() -> None:
    trace = RouteTrace(entry_bytes={3: MIB})
    trace.append(block("decode", 3, [0], [[1, 2]]))
    table = replay(trace, [1, 2])
    assert (table["hit_pct"] == 0).all()
    assert table["peak_resident_mib"].tolist() == [2.0] * len(table)


def test_unknown_sizes_are_asked_for() -> None:
    trace = small_trace()
    trace.entry_bytes = {0: MIB}
    with pytest.raises(TraceError, match=r"layer 1 .*entry_bytes"):
        replay(trace, [4])
    assert demand(trace, entry_bytes=MIB).sizes.tolist() == [MIB] * 6
    assert demand(trace, entry_bytes={0: 1, 1: 2}).entry_bytes == {0: 1, 1: 2}


def test_nonsense_is_refused() -> None:
    for budget in (-1, float("nan")):
        with pytest.raises(BudgetError, match="makes no sense"):
            replay(small_trace(), [budget])
    with pytest.raises(ValueError, match="no cache policy 'mru'"):
        replay(small_trace(), [1], ["mru"])
    assert replay(small_trace(), [float("inf")], ["lru"])["hit_pct"].iloc[0] > 0


@pytest.fixture(scope="module")
def recorded() -> tuple[RouteTrace, pd.DataFrame]:
    if not PEER.is_dir():
        pytest.skip("the peer's recorded trace is not beside this checkout")
    curve = pd.read_csv(PEER / "qwen3-30b-a3b.curve.csv")
    return RouteTrace.open(PEER / "qwen3-30b-a3b.route.csv"), curve


def test_the_recorded_curve_is_met_to_a_tenth_of_a_point(recorded) -> None:
    trace, curve = recorded
    budgets = sorted(curve["budget_mib"].unique())
    ours = replay(trace, budgets)
    both = curve.merge(ours, on=["budget_mib", "policy"], suffixes=("_theirs", ""))
    both = both[both["policy"].isin(["lru", "lfu", "belady"])]
    assert len(both) == 3 * 11
    assert (both["hit_pct"] - both["hit_pct_cum"]).abs().max() < 0.1
    assert (both["hit_pct_decode"] - both["hit_pct_decode_theirs"]).abs().max() < 0.1
    assert (both["read_mib"] / both["read_mib_theirs"] - 1).abs().max() < 0.005
    # The run itself: an LRU cache of 4000 MiB on the phone, prompt included.
    at_4000 = ours[(ours["budget_mib"] == 4000) & (ours["policy"] == "lru")]
    assert at_4000["hit_pct"].iloc[0] == pytest.approx(74.9, abs=0.1)
    # Never above the budget, and nothing above the optimum.
    assert (ours["peak_resident_mib"] <= ours["budget_mib"]).all()
    best = ours[ours["policy"] == "belady"].set_index("budget_mib")["hit_pct"]
    for name in ONLINE:
        rates = ours[ours["policy"] == name].set_index("budget_mib")["hit_pct"]
        assert (rates <= best).all(), name
    whole = lru_curve(trace)
    at = np.searchsorted(whole["budget_mib"], budgets, side="right") - 1
    lru = ours[ours["policy"] == "lru"]["hit_pct"].to_numpy()
    assert whole["hit_pct"].to_numpy()[at] == pytest.approx(lru, abs=0.05)
