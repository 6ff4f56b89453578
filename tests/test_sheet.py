"""The model sheet: worked figures that everybody quotes, published shapes, bytes by part."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_sheet_shapes import cut

from labkit.bundled import model_path
from labkit.device import DeviceProfile, Figure, FlashPoint
from labkit.errors import OptionError
from labkit.gguf_map import open_gguf
from labkit.gguf_map.summary import token_bytes
from labkit.runtime.budget import layer_floor_bytes
from labkit.sheet import (
    PARTS,
    ModelSheet,
    fit_table,
    latency_floor,
    load_shape,
    memory_ledger,
    shape_names,
    sheet,
    sparsity_table,
)
from labkit.sheet.bounds import ridge_flop_per_byte, time_floor_s, weight_bytes, weight_intensity
from labkit.sheet.report import contexts, intensity_table, kv_kinds_table, sheet_json
from labkit.synth import LlamaWorker


def device(**figures: float) -> DeviceProfile:
    found = {name: Figure(value, "assumed", "a test") for name, value in figures.items()}
    flash = (FlashPoint(4096, 4, 2000, "a test"),)
    return DeviceProfile(
        "test", "A device", {"ram_mib": Figure(8192, "assumed", "a")} | found, flash
    )


# The figures that everybody quotes.


def test_resident_and_read_bytes_at_four_bits() -> None:
    assert weight_bytes(1.3e9, 4) == 650e6
    assert weight_bytes(0.3e9, 4) == 150e6


def test_ridge_point() -> None:
    assert ridge_flop_per_byte(30e12, 68e9) == pytest.approx(441, abs=0.5)


def test_intensity_at_int4() -> None:
    assert weight_intensity(4) == 4
    assert weight_intensity(16) == 1


@pytest.mark.parametrize(("active", "least_ms"), [(0.3e9, 2.5), (0.8e9, 6.7), (1.0e9, 8.3)])
def test_least_time_of_a_token_by_dram(active: float, least_ms: float) -> None:
    assert 1e3 * time_floor_s(weight_bytes(active, 4), 60e9) == pytest.approx(least_ms, abs=0.05)


def test_the_same_from_a_whole_sheet() -> None:
    """MobileMoE-S is the model of 1.3 B and 0.3 B."""
    model = sheet("mobilemoe-s", bits=4)
    assert model.total_bytes == pytest.approx(650e6, rel=0.03)
    assert model.token_bytes == pytest.approx(150e6, rel=0.10)
    assert model.intensity_flop_per_byte() == pytest.approx(4, rel=0.001)
    floor = latency_floor(model, device(dram_gb_s=60, tops=30))
    assert 1e3 * floor.dram_s == pytest.approx(2.5, rel=0.1)
    assert floor.bound_by == "DRAM"
    assert floor.floor_s == floor.dram_s


def test_rates_that_make_no_sense() -> None:
    for rate in (0, -1):
        with pytest.raises(OptionError, match="above 0"):
            time_floor_s(1, rate)
        with pytest.raises(OptionError, match="above 0"):
            ridge_flop_per_byte(rate, 1)


# Published models.


def test_the_models_that_the_field_discusses() -> None:
    assert set(shape_names()) == {
        *("mobilemoe-s", "mobilemoe-l", "lfm2.5-8b-a1b", "granite-3.1-3b-a800m"),
        *("gemma-4-26b-a4b", "gpt-oss-20b", "gpt-oss-120b", "olmoe-1b-7b"),
        *("phi-3.5-moe", "qwen3-30b-a3b", "qwen3.6-35b-a3b"),
    }


@pytest.mark.parametrize("name", shape_names())
def test_parameters_are_the_publishers(name: str) -> None:
    model = sheet(name)
    published = model.published
    assert published is not None
    assert published.total_b
    assert published.active_b
    assert model.sources
    assert model.total_params / 1e9 == pytest.approx(published.total_b, rel=0.03)
    # Publishers count the embedding's table, or not, or an output matrix not either.
    embeddings = sum(w.n_params for w in model.weights if w.part == "embeddings") / 1e9
    active = model.active_params / 1e9
    low = active - embeddings
    assert low * 0.99 <= published.active_b <= (active + embeddings) * 1.02


def test_a_count_to_the_last_parameter() -> None:
    """`general.parameter_count` of the published LFM2.5-8B-A1B GGUF."""
    assert sheet("lfm2.5-8b-a1b").total_params == 8_467_856_832


@pytest.mark.parametrize("name", [n for n in shape_names() if not n.startswith("mobile")])
def test_tensors_are_those_that_llama_cpp_wants(name: str, synth_worker: LlamaWorker) -> None:
    """Of the first layers of the model, with few experts and a small vocabulary."""
    shape, metadata = cut(load_shape(name), layers=6)
    wanted = synth_worker.tensors(metadata)
    for tensor, dimensions in shape.items():
        assert wanted[tensor] == dimensions, tensor
    left_out = {n.rsplit(".", 1)[-1] for n in set(wanted) - set(shape)}
    # Scales of other quantisations, biases that it does not have, and what is optional.
    assert left_out <= {"scale", "input_scale", "bias", "weight"}
    matrices = {n for n in set(wanted) - set(shape) if n.endswith(".weight")}
    optional = ("output.weight", "rope_freqs.weight", "dense_2.weight", "attn_v.weight")
    assert all(n.endswith(optional) for n in matrices), matrices


# Files.


def test_a_file_agrees_with_the_map() -> None:
    path = model_path("main-q4_0")
    gguf, model = open_gguf(path), sheet(path)
    assert model.total_bytes == gguf.nbytes
    assert model.routed_bytes == gguf.expert_bytes
    assert model.dense_bytes == gguf.dense_bytes
    assert model.token_bytes == token_bytes(gguf)
    assert model.token_cycle_bytes == gguf.token_cycle_bytes
    assert model.floor_bytes == layer_floor_bytes(gguf)
    assert model.moe_layers == gguf.moe_layers
    assert model.leading_dense_layers == 1
    assert sum(model.part_bytes.values()) == model.total_bytes
    assert set(model.part_bytes) == set(PARTS)
    assert model.shared_bytes > 0
    assert not model.header_only


def test_active_parameters_by_hand() -> None:
    model = sheet(model_path("main-f16"))
    by_role = model.roles_table().set_index("role")
    routed = by_role.loc["routed expert"]
    assert routed["token_params"] == routed["params"] * 4 / 32
    dense = by_role.drop("routed expert")
    assert (dense["token_params"] == dense["params"]).all()  # embeddings are tied
    assert model.active_params == round(by_role["token_params"].sum())
    matrices = sum(w.token_params for w in model.weights if len(w.shape) > 1)
    attention = sum(2 * a.n_query * (a.key_width + a.value_width) for a in model.attention)
    assert model.flops_per_token() == 2 * matrices + attention
    assert model.flops_per_token(9) == 2 * matrices + 10 * attention


def test_a_header_without_its_data(tmp_path: Path, synth_model: Callable[..., Path]) -> None:
    path = synth_model("qwen3moe", shards=3)
    first = open_gguf(path).paths
    whole = sheet(path)
    for shard in first:
        data_offset = open_gguf(path).data_offsets[first.index(shard)]
        (tmp_path / shard.name).write_bytes(shard.read_bytes()[: data_offset - 1])
    found = sheet(tmp_path)
    assert found.header_only
    assert found.total_bytes == whole.total_bytes
    assert found.kv_bytes(512) == whole.kv_bytes(512)


def test_a_dense_model_has_a_sheet() -> None:
    shape = load_shape("qwen3-30b-a3b")
    dense = tuple((n, s) for n, s in shape.tensors if "exps" not in n)
    model = sheet(replace(shape, tensors=dense))
    assert not model.is_moe
    assert model.routed_bytes == model.token_cycle_bytes == model.floor_bytes == 0
    assert model.leading_dense_layers == model.n_layers
    assert math.isnan(model.slice_kib)
    assert memory_ledger(model, 512).verdict(0) == "too large"
    assert memory_ledger(model, 512).verdict(1e12) == "resident"


def test_a_context_longer_than_the_models() -> None:
    with pytest.raises(OptionError, match=r"512 tokens is longer|longer than the model's own 512"):
        sheet(model_path(), n_ctx=513)
    model = sheet(model_path())
    with pytest.raises(OptionError, match="longer than the model's own 512"):
        model.kv_bytes(4096)
    with pytest.raises(OptionError, match="at least 1"):
        model.kv_bytes(0)


# Widths.


def test_widths_of_weights() -> None:
    model = sheet("qwen3-30b-a3b", bits=16)
    assert model.bits_per_weight == pytest.approx(16)
    assert model.at_bits(4).total_bytes * 4 == pytest.approx(model.total_bytes, rel=1e-6)
    q4 = model.at_bits("Q4_0")
    assert 4.5 < q4.bits_per_weight < 4.52  # norms and routers stay F32
    mixed = model.at_bits({"routed expert": 2, "*": 8})
    assert mixed.routed_bytes * 8 == model.routed_bytes
    assert mixed.dense_bytes * 2 == pytest.approx(model.dense_bytes, rel=1e-6)
    assert mixed.total_params == model.total_params


@pytest.mark.parametrize("bits", [0, -1, 33, math.nan, math.inf, "Q9", {"router": 4}])
def test_widths_that_make_no_sense(bits) -> None:
    with pytest.raises(OptionError):
        sheet("mobilemoe-s", bits=bits)


# Memory, sparsity, batches.


def test_the_ledger_adds_up() -> None:
    model = sheet("gpt-oss-20b")
    ledger = memory_ledger(model, 4096)
    table = ledger.table()
    assert table["size_bytes"].sum() == ledger.resident_bytes
    assert ledger.resident_bytes - ledger.streamed_bytes == model.routed_bytes - model.floor_bytes
    assert ledger.streamed_cycle_bytes - ledger.streamed_bytes == (
        model.token_cycle_bytes - model.floor_bytes
    )
    assert not ledger.compute_asked
    assert memory_ledger(model, 4096, swa_full=True).kv_bytes == 2 * 24 * 8 * 64 * 2 * 4096


def test_sliding_windows_stop_growing() -> None:
    model = sheet("gpt-oss-20b")
    table = kv_kinds_table(model, [2048, 65536])
    window = table.loc[table["kind"] == "sliding window", "kv_bytes"]
    assert window.nunique() == 1
    short, long = table.loc[table["kind"] == "attention", "kv_bytes"]
    assert long == 32 * short
    assert contexts(model)[-1] == model.context_length


def test_active_parameters_are_not_memory() -> None:
    """On a phone many models are tempting: what a token reads fits, the model does not."""
    models = [sheet(name) for name in shape_names()]
    table = fit_table(models, [device(usable_mib=6000)], bits=(4,))
    tempting = table[table["tempting"]]
    assert "Qwen3-30B-A3B" in set(tempting["model"])
    assert (tempting["resident_mib"] > 6000).all()
    assert (tempting["active_mib"] < 6000).all()
    verdicts = dict(zip(table["model"], table["verdict"], strict=True))
    assert verdicts["MobileMoE-S"] == "resident"


def test_sparsity_saves_compute_not_capacity() -> None:
    table = sparsity_table([sheet(name) for name in shape_names()]).set_index("model")
    assert (table["capacity_pct"] == 100).all()
    assert (table["compute_pct"] < 30).all()
    assert (table["batch_read_pct"] > 3 * table["read_pct"]).all()
    assert table.loc["gpt-oss-120b", "compute_pct"] == pytest.approx(4.45, abs=0.1)


def test_a_batch_reads_each_weight_once() -> None:
    model = sheet("olmoe-1b-7b")
    assert model.batch_bytes(1) == pytest.approx(model.token_bytes)
    assert model.batch_bytes(10_000) <= model.total_bytes
    assert model.batch_bytes(10_000) > 0.99 * (model.total_bytes - model.embedding_bytes)
    table = intensity_table(model, device(tops=30, dram_gb_s=68))
    assert table["flop_per_byte"].is_monotonic_increasing
    assert table["ridge_flop_per_byte"].iloc[0] == pytest.approx(441, abs=0.5)
    assert intensity_table(model)["ridge_flop_per_byte"].isna().all()


def test_floors_of_a_token() -> None:
    model = sheet("qwen3-30b-a3b")
    phone = device(dram_gb_s=60)
    cold = latency_floor(model, phone, hit_rate=0, read_kib=4096)
    assert math.isnan(cold.compute_s)  # the profile does not say
    assert cold.flash_s == pytest.approx(model.token_cycle_bytes / (2000 * 2**20))
    assert cold.bound_by == "flash"
    warm = latency_floor(model, phone, hit_rate=1)
    assert warm.flash_s == 0
    assert latency_floor(model, phone, n_past=4095).dram_s > warm.dram_s
    with pytest.raises(OptionError, match="hit_rate"):
        latency_floor(model, phone, hit_rate=1.1)


def test_json_is_plain() -> None:
    model: ModelSheet = sheet("gemma-4-26b-a4b")
    value = sheet_json(model, memory_ledger(model, 4096), 4096, 512, device(dram_gb_s=60))
    text = json.dumps(value, allow_nan=False)
    assert json.loads(text)["device"]["compute_floor_ms"] is None
    assert value["session_kv_bytes"] > value["kv_bytes"]
