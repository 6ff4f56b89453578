"""Modelled prefill: its counts against counting by hand, its laws, and what a request gains."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from labkit.bundled import model_path
from labkit.device import htp, load_profile
from labkit.device.pipeline_rates import Rates, rates_of
from labkit.device.pipeline_request import amdahl, break_even_outputs, requests, with_decode
from labkit.device.pipeline_work import (
    LayerLoad,
    compute_s,
    expert_rows,
    experts_touched,
    layers_of,
    model_prefill,
)
from labkit.errors import DeviceError, OptionError
from labkit.gguf_map import GGUFMap, open_gguf
from labkit.sheet import sheet
from labkit.sheet.attention import Attention

LAYER = LayerLoad(
    layer=0,
    stream_bytes=64e6,
    layout_bytes=64e6,
    fixed_bytes=8e6,
    fixed_weights=16e6,
    expert_weights=2e6,
    n_expert=64,
    n_used=8,
)
TEN = [replace(LAYER, layer=n) for n in range(10)]
RATES = Rates(read_gb_s=1.0, device_gflop_s=1000, cpu_gflop_s=100)


@pytest.fixture(scope="module")
def q4_k_m() -> GGUFMap:
    return open_gguf(model_path("main-q4_k_m"))


def test_padded_rows_are_those_of_drawn_routing():
    draw = np.random.default_rng(0)
    drawn = [
        (np.ceil(draw.multinomial(96, [1 / 64] * 64) / 32) * 32).sum() for _ in range(2000)
    ]  # 96 tokens of one expert each
    assert expert_rows(96, 64, 1, 32) == pytest.approx(np.mean(drawn), rel=0.02)
    assert expert_rows(96, 64, 8, 1) == 96 * 8
    assert expert_rows(100_000, 64, 8, 32) == pytest.approx(100_000 * 8, rel=0.002)
    assert expert_rows(50, 8, 8, 32) == 8 * 64


def test_touched_experts_grow_from_top_k_to_all():
    assert experts_touched(1, 64, 8) == pytest.approx(8)
    assert experts_touched(512, 64, 8) == pytest.approx(64, rel=1e-6)
    assert experts_touched(10, 0, 0) == 0


def test_compute_counts_two_operations_a_weight_and_the_tokens_before():
    flop = 2 * 100 * (16e6 + 8 * 2e6)
    assert compute_s(LAYER, 100, 0, RATES) == pytest.approx(flop / 1e12)
    heads = Attention(0, n_query=32, key_width=128, value_width=128, row_width=2048, reach=0)
    attending = LayerLoad(layer=0, fixed_weights=16e6, attention=heads)
    more = compute_s(attending, 100, 300, RATES) - compute_s(attending, 100, 200, RATES)
    assert more == pytest.approx(2 * 32 * 256 * 100 * 100 / 1e12)
    slow_memory = Rates(1.0, 1000, 100, memory_gb_s=1.0)
    assert compute_s(LAYER, 1, 0, slow_memory) == pytest.approx((8e6 + 64e6 / 8) / 1e9)


def test_a_longer_chunk_reads_less_until_compute_hides_the_reads():
    by_chunk = {c: model_prefill(TEN, 1024, RATES, chunk=c) for c in (64, 256, 1024)}
    assert by_chunk[64].timeline.prepare_s == pytest.approx(16 * 10 * 0.064)
    assert by_chunk[1024].timeline.prepare_s == pytest.approx(10 * 0.064)
    assert by_chunk[64].tok_s < by_chunk[256].tok_s < by_chunk[1024].tok_s
    assert by_chunk[64].timeline.hidden_pct < 10  # 6 ms of compute beside 64 ms of reads
    fast = Rates(read_gb_s=10.0, device_gflop_s=1000, cpu_gflop_s=100)
    hidden = model_prefill(TEN, 1024, fast, chunk=1024).timeline
    assert hidden.wait_s == pytest.approx(0.0064)  # the first layer only: nothing runs before it


def test_a_short_rest_goes_through_the_cpu_and_a_long_one_does_not():
    short = model_prefill([LAYER], 520, RATES, chunk=256, longest_tail=16)
    assert short.tail == 8
    assert short.timeline.tail_s == pytest.approx(2 * 8 * (16e6 + 8 * 2e6) / 1e11)
    assert model_prefill([LAYER], 400, RATES, chunk=256, longest_tail=16).tail == 0
    assert model_prefill([LAYER], 8, RATES, chunk=256, longest_tail=16).tail == 8


def test_a_file_counts_its_own_weights(q4_k_m: GGUFMap):
    table = htp.placement(q4_k_m)
    layers = layers_of(sheet(q4_k_m), table)
    assert [load.layer for load in layers] == list(range(q4_k_m.n_layers))
    assert sum(load.stream_bytes for load in layers) == pytest.approx(q4_k_m.expert_bytes)
    dense, moe = layers[0], layers[1]
    assert (dense.stream_bytes, dense.n_expert) == (0, 0)
    per_expert = sum(math.prod(e.tensor.shape[:2]) for e in q4_k_m.layer_tensors(1))
    assert moe.expert_weights + moe.cpu_expert_weights == per_expert
    assert moe.cpu_expert_weights > 0  # its Q5_0 down projections
    assert moe.handovers == 2
    untyped = layers_of(sheet(q4_k_m))[1]
    assert (untyped.expert_weights, untyped.handovers) == (per_expert, 0)
    assert (moe.n_expert, moe.n_used) == (q4_k_m.n_expert, q4_k_m.n_expert_used)


def test_types_that_the_backend_lacks_stay_on_the_cpu(q4_k_m: GGUFMap):
    table = htp.placement(q4_k_m).set_index("tensor")
    left = table[(table["on"] == "CPU") & (table["role"] != "embedding")]
    assert set(left["type"]) == {"Q5_0"}
    assert (left["device_mib"] == 0).all()
    assert "Q5_0" in left["why"].iloc[0]
    stops = htp.handovers(htp.placement(q4_k_m))
    assert set(stops.index[stops > 0]) == set(left["layer"])


def test_experts_in_half_precision_stay_although_matrices_go():
    f16 = htp.placement(open_gguf(model_path("main-f16")))
    assert set(f16.loc[f16["role"] == "routed expert", "on"]) == {"CPU"}
    assert set(f16.loc[f16["role"] == "attention", "on"]) == {"HTP"}


def test_the_device_layout_unpacks_scales_and_pads(q4_k_m: GGUFMap):
    tensor = next(t for t in q4_k_m.tensors if t.type_name == "Q4_K" and len(t.shape) == 2)
    columns, rows = tensor.shape
    assert htp.device_bytes(tensor) == columns * -(-rows // 32) * 32 * 640 // 1024
    assert htp.device_bytes(tensor) > tensor.nbytes
    eight_bit = next(t for t in open_gguf(model_path()).tensors if t.type_name == "Q8_0")
    assert htp.device_bytes(eight_bit) == eight_bit.nbytes


def test_sessions_hold_whole_layers_and_say_what_does_not_fit(q4_k_m: GGUFMap):
    table = htp.placement(q4_k_m)
    whole = float(table["device_mib"].sum())
    assert htp.sessions(table, 3584).count == 1
    spread = htp.sessions(table, 1.2)
    assert spread.table["mib"].sum() == pytest.approx(whole)
    assert (spread.table["mib"] <= 1.2).all()
    assert spread.count == len(spread.table) > 1
    tight = htp.sessions(table, 0.3)
    assert tight.count is None
    assert tight.too_large
    need = htp.arena(table)
    assert need.need_mib == pytest.approx(2 * need.slot_mib + need.fixed_mib)
    assert need.need_mib < whole
    summary = htp.memory_table(table, [1.2, 0.3]).set_index("way")
    assert summary["sessions_of_1_mib"].iloc[0] == spread.count
    assert summary["sessions_of_0_mib"].isna().all()
    assert summary["need_mib"].tolist() == pytest.approx([whole, need.need_mib])
    with pytest.raises(OptionError, match="holds nothing"):
        htp.sessions(table, 0)


def test_a_request_is_its_prompt_and_its_further_tokens():
    table = requests(4.0, 0.1, [0, 1, 41]).set_index("outputs")
    assert table["request_s"].tolist() == pytest.approx([4.0, 4.0, 8.0])
    assert table.loc[41, "prefill_pct"] == pytest.approx(50)
    assert break_even_outputs(4.0, 0.1) == pytest.approx(41)


def test_amdahl_bounds_what_a_faster_prefill_saves():
    table = amdahl(4.0, 0.1, [1, 41, 401], [2, 1e9])
    by = table.set_index(["outputs", "factor"])
    assert by.loc[(41, 2.0), "speedup"] == pytest.approx(1 / (1 - 0.5 + 0.5 / 2))
    assert by.loc[(401, 1e9), "speedup"] == pytest.approx(by.loc[(401, 1e9), "limit"])
    assert by.loc[(1, 2.0), "limit"] == math.inf
    assert (table["speedup"] <= table["limit"] + 1e-9).all()
    with pytest.raises(OptionError, match="more than 0"):
        amdahl(4.0, 0.1, [1], [0])


def test_decode_follows_on_the_cpu():
    timeline = model_prefill([LAYER], 100, RATES).timeline
    last = with_decode(timeline, 0.1, 11).iloc[-1]
    assert (last["worker"], last["work"]) == ("CPU", "decode")
    assert last["start_s"] == pytest.approx(timeline.total_s)
    assert last["end_s"] == pytest.approx(timeline.total_s + 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"read_gb_s": 0}, "read_gb_s is 0; it must be more than 0"),
        ({"device_gflop_s": math.nan}, "device_gflop_s"),
        ({"sync_ms": -1}, "sync_ms is -1; it must be 0 or more"),
        ({"tile_tokens": 0}, "tile_tokens"),
    ],
)
def test_absurd_rates_are_refused(change: dict, words: str):
    with pytest.raises(OptionError, match=words):
        Rates(**{"read_gb_s": 1.0, "device_gflop_s": 1.0, "cpu_gflop_s": 1.0, **change})


def test_absurd_prompts_are_refused():
    with pytest.raises(OptionError, match="tokens is 0"):
        model_prefill([LAYER], 0, RATES)
    with pytest.raises(OptionError, match="chunk is -1"):
        model_prefill([LAYER], 8, RATES, chunk=-1)
    with pytest.raises(OptionError, match="no layers"):
        model_prefill([], 8, RATES)


def test_a_profile_gives_the_rates_or_says_what_is_missing():
    phone = load_profile("oneplus-15r")
    rates = rates_of(phone)
    assert rates.device_gflop_s == phone.need("htp_prefill_gflop_s")
    assert rates.read_gb_s == pytest.approx(phone.flash_mib_s(4096, 4) * 2**20 / 1e9)
    with pytest.raises(DeviceError, match="htp_prefill_gflop_s"):
        rates_of(load_profile("ddr4-laptop"))
