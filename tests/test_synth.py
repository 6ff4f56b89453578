"""Tiny random models of every MoE architecture that the installed llama.cpp builds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from labkit import synth
from labkit.architectures import parse_expert_tensor
from labkit.errors import LabkitError, LlamaError
from labkit.gguf_map import open_gguf
from labkit.runtime import Session, ggml
from labkit.synth.models import reads_fused
from labkit.synth.quantise import EXPERT_TYPES, expert_type, quantise
from labkit.synth.quirks import default_shape, describe
from labkit.synth.values import weights

Model = Callable[..., Path]
LEADING_DENSE = ("deepseek", "deepseek2", "glm4moe", "laguna", "kimi-linear")


def test_there_are_many_architectures_and_none_is_a_dense_one():
    found = synth.architectures()
    assert found == sorted(found)
    assert len(found) >= 50
    assert {"qwen3moe", "gpt-oss", "deepseek2", "arctic", "grovemoe", "gemma4"} <= set(found)
    assert not {"qwen3", "llama-embed", "mamba", "bert"} & set(found)


def test_every_architecture_builds_decodes_and_repeats(
    synth_model: Model, synth_worker: synth.LlamaWorker
):
    wrong = {}
    for arch in synth.architectures():
        path = synth_model(arch)
        first, second = synth_worker.decode(path), synth_worker.decode(path)
        if not first["finite"] or first["spread"] < 0.1 or first != second:
            wrong[arch] = first
        if len(open_gguf(path).moe_layers) < 2 or path.stat().st_size > 2.5e6:
            wrong[arch] = open_gguf(path).moe_layers, path.stat().st_size
    assert wrong == {}


def test_equal_seeds_give_equal_bytes_and_others_do_not(
    synth_model: Model, synth_worker: synth.LlamaWorker, tmp_path: Path
):
    again = tmp_path / "again.gguf"
    for arch in synth.architectures():
        synth.make(arch, again, worker=synth_worker)
        assert again.read_bytes() == synth_model(arch).read_bytes(), arch
    assert synth_model("qwen3moe", seed=1).read_bytes() != synth_model("qwen3moe").read_bytes()


def test_every_architecture_routes_tokens_differently_and_unevenly(synth_model: Model):
    prompt = [1, 5, 9, 2, 7, 3, 8, 4, 100, 60, 33, 21, 77, 90, 12, 13, 14, 15, 16, 17]
    wrong = {}
    for arch in synth.architectures():
        with Session(synth_model(arch), resident=True, n_ctx=64, threads=1) as session:
            session.generate(prompt, 2)
            table = session.trace.table
            first = table[table.layer == min(session.map.moe_layers)]
            loads = first.expert.value_counts()
            choices = first.groupby("step").expert.apply(frozenset).nunique()
            if len(loads) < 5 or choices < 5 or loads.max() < 2 * loads.min():
                wrong[arch] = (loads.to_dict(), choices)
    assert wrong == {}


@pytest.mark.parametrize("arch", LEADING_DENSE)
def test_a_dense_first_layer_and_shared_experts_where_the_architecture_has_them(
    synth_model: Model, arch: str
):
    model = open_gguf(synth_model(arch))
    assert model.moe_layers == [1, 2]
    assert model.tensor("blk.0.ffn_up.weight").role == "dense ffn"
    assert model.tensor("blk.1.ffn_up_shexp.weight").role == "shared expert"


@pytest.mark.parametrize("quant", EXPERT_TYPES)
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "deepseek2", "gemma4"])
def test_experts_of_every_type_decode(
    synth_model: Model, synth_worker: synth.LlamaWorker, arch: str, quant: str
):
    path = synth_model(arch, quant=quant)
    answer = synth_worker.decode(path)
    assert answer["finite"]
    assert answer["spread"] > 0.1
    types = {expert.tensor.type_name for expert in open_gguf(path).expert_tensors}
    assert types == {quant}


@pytest.mark.parametrize(
    ("quant", "error"),
    [("F32", 0), ("F16", 1e-3), ("Q8_0", 0.01), ("Q6_K", 0.03), ("Q4_K", 0.1), ("MXFP4", 0.2)],
)
def test_quantised_values_are_the_values(quant: str, error: float):
    values = weights("blk.0.ffn_up_exps.weight", (256, 8, 2), seed=3)
    kind = expert_type(quant)
    raw = np.frombuffer(quantise(values, kind), np.uint8).reshape(16, -1)
    back = gguf.quants.dequantize(raw, kind).reshape(values.shape)
    assert np.linalg.norm(back - values) <= error * np.linalg.norm(values)


def test_three_shards_hold_the_same_model(synth_model: Model, synth_worker: synth.LlamaWorker):
    whole, first = synth_model("qwen3moe"), synth_model("qwen3moe", shards=3)
    assert first.name.endswith("-00001-of-00003.gguf")
    assert synth_worker.decode(first)["sha256"] == synth_worker.decode(whole)["sha256"]
    one, three = open_gguf(whole), open_gguf(first)
    assert len(three.paths) == 3
    assert {tensor.shard for tensor in three.tensors} == {0, 1, 2}
    assert [tensor.name for tensor in three.tensors] == [tensor.name for tensor in one.tensors]
    sizes = [path.stat().st_size for path in three.paths]
    assert max(sizes) < 1.5 * min(sizes)


def test_fused_experts_compute_what_the_split_ones_do(
    synth_model: Model, synth_worker: synth.LlamaWorker
):
    for arch in ("deepseek2", "qwen3next"):
        split, fused = synth_model(arch), synth_model(arch, fused=True)
        projections = {expert.projection for expert in open_gguf(fused).expert_tensors}
        assert projections == {"gate_up", "down"}
        assert synth_worker.decode(fused)["sha256"] == synth_worker.decode(split)["sha256"]
    assert reads_fused("deepseek2", synth_worker)
    assert not reads_fused("qwen3moe", synth_worker)


def test_slices_can_be_smaller_than_a_page_and_offsets_unaligned(synth_model: Model):
    model = open_gguf(synth_model("qwen3moe", quant="Q4_0"))
    assert {expert.slice_bytes for expert in model.expert_tensors} == {1152}
    assert any(expert.tensor.offset % 4096 for expert in model.expert_tensors)


def test_what_is_unavailable_still_is(synth_model: Model, synth_worker: synth.LlamaWorker):
    assert set(synth.UNAVAILABLE) == {"llama-embed", "nomic-bert-moe", "refact"}
    for arch in ("llama-embed", "nomic-bert-moe"):
        assert synth_worker.decode(synth_model(arch))["spread"] == 0  # no logits at all
    # Experts rounded to four bits change no logit: nothing computes with them.
    fine, coarse = synth_model("refact"), synth_model("refact", quant="Q4_0")
    assert synth_worker.decode(fine)["sha256"] == synth_worker.decode(coarse)["sha256"]
    fine, coarse = synth_model("llama"), synth_model("llama", quant="Q4_0")
    assert synth_worker.decode(fine)["sha256"] != synth_worker.decode(coarse)["sha256"]


def test_no_architecture_of_the_installed_library_is_forgotten(synth_worker: synth.LlamaWorker):
    # A C++ function with its mangled name, which only some builds export: for this check alone.
    try:
        name_of = ggml.function("_Z13llm_arch_name8llm_arch", ctypes.c_char_p, ctypes.c_int)
    except LabkitError:
        pytest.skip("this build does not export the list of its architectures")
    names = {name_of(number).decode() for number in range(300)}
    assert len(names) > 100
    forgotten = synth.probe(names - set(synth.candidates()), synth_worker)
    assert [name for name, obstacle in forgotten.items() if obstacle is None] == []


def test_an_abort_of_llama_cpp_is_an_error_and_the_next_job_works(
    synth_worker: synth.LlamaWorker,
):
    header = describe("qwen3moe", default_shape("qwen3moe"))
    with pytest.raises(LlamaError, match="ended its process: GGML_ASSERT"):
        synth_worker.tensors(header | {"qwen3moe.block_count": 0})
    assert any(parse_expert_tensor(name) for name in synth_worker.tensors(header))


@pytest.mark.parametrize(
    ("arch", "options", "told"),
    [
        ("qwen3moe", {"quant": "Q9_9"}, "choose one of"),
        ("qwen3moe", {"quant": "Q4_K", "d_ff": 64}, "multiples of 256"),
        ("qwen3moe", {"top_k": 9}, "top_k is 9, but must be from 1 to 8"),
        ("qwen3moe", {"experts": 513}, "from 1 to 512"),
        ("qwen3moe", {"d_model": 60}, "multiple of 16"),
        ("qwen3moe", {"shards": 1000}, "from 1 to"),
        ("qwen3moe", {"layers": 0}, "layers is 0, but must be from 1 to 512"),
        ("mamba", {}, "no routed experts"),
        ("no-such-arch", {}, "unknown model architecture"),
    ],
)
def test_bad_wishes_are_explained(
    synth_worker: synth.LlamaWorker, tmp_path: Path, arch: str, options: dict, told: str
):
    path = tmp_path / "model.gguf"
    with pytest.raises(LabkitError, match=told):
        synth.make(arch, path, worker=synth_worker, **options)
    assert not path.exists()


def test_make_needs_no_worker(synth_model: Model, tmp_path: Path):
    path = synth.make("olmoe", tmp_path / "deep" / "olmoe.gguf")
    assert path.read_bytes() == synth_model("olmoe").read_bytes()
