"""Large synthetic models, made here in small: sizes, layouts, routing, and failures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from typer.testing import CliRunner

from labkit import synth
from labkit.cli import app
from labkit.errors import LabkitError
from labkit.gguf_map import open_gguf
from labkit.runtime import Session
from labkit.synth import gguf_writer
from labkit.synth.gguf_writer import TensorSpec, write_shards
from labkit.synth.metadata import Shape
from labkit.synth.models import plan
from labkit.synth.quirks import default_shape
from labkit.synth.scaling import LargePlanner

MIB = 2**20
SMALL: dict[str, Any] = {"d_model": 256, "d_ff": 256}


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("qwen3moe", {"quant": "Q4_0"}),
        ("gpt-oss", {"quant": "MXFP4", "d_ff": 512}),
        ("deepseek2", {"quant": "Q4_K"}),
        ("deepseek4", {"quant": "Q8_0"}),
        ("llama4", {"quant": "Q6_K", "layers": 4}),
        ("qwen3moe", {"quant": "F32", "experts": 13}),
    ],
)
def test_size_is_met_and_the_model_decodes(
    synth_worker: synth.LlamaWorker, tmp_path: Path, arch: str, options: dict
):
    path = tmp_path / "model.gguf"
    synth.make_large(arch, path, size_gib=40 / 1024, worker=synth_worker, **SMALL | options)
    assert path.stat().st_size == pytest.approx(40 * MIB, rel=0.05)
    answer = synth_worker.decode(path)
    assert answer["finite"]
    assert answer["spread"] > 0.1
    model = open_gguf(path)
    assert {expert.tensor.type_name for expert in model.expert_tensors} == {options["quant"]}
    assert model.n_layers == options.get("layers", model.n_layers)
    assert model.n_expert == options.get("experts", model.n_expert)


def test_tokens_route_with_variety_and_experts_are_unevenly_popular(
    synth_worker: synth.LlamaWorker, tmp_path: Path
):
    path = tmp_path / "model.gguf"
    synth.make_large("qwen3moe", path, size_gib=0.03, worker=synth_worker, **SMALL)
    with Session(path, resident=True, n_ctx=256, threads=1) as session:
        session.generate(list(range(7, 4000, 41)), 1)
        table = session.trace.table
    for layer in session.map.moe_layers[:-1]:  # the last one routes the last token only
        loads = table[table.layer == layer].expert.value_counts()
        assert len(loads) > 0.6 * session.map.n_expert
        assert loads.iloc[0] > 3 * loads.median()
        assert loads.iloc[0] < 0.9 * table.step.nunique()


def test_no_two_experts_of_a_tensor_have_the_same_bytes(
    synth_worker: synth.LlamaWorker, tmp_path: Path
):
    path = tmp_path / "model.gguf"
    synth.make_large("qwen3moe", path, size_gib=0.1, worker=synth_worker, **SMALL)
    raw = np.memmap(path, np.uint8, "r")
    everywhere, slices = set(), 0
    for expert in open_gguf(path).expert_tensors:
        offsets = expert.tensor.offset + np.arange(expert.n_expert) * expert.slice_bytes
        seen = {raw[offset : offset + expert.slice_bytes].tobytes() for offset in offsets}
        assert len(seen) == expert.n_expert
        everywhere |= seen
        slices += expert.n_expert
    assert len(everywhere) > 0.9 * slices


def test_equal_seeds_give_equal_bytes(synth_worker: synth.LlamaWorker, tmp_path: Path):
    paths = []
    for number, seed in enumerate([4, 4, 5]):
        path = tmp_path / f"{number}.gguf"
        options = SMALL | {"seed": seed, "worker": synth_worker}
        paths.append(synth.make_large("qwen3moe", path, size_gib=0.02, **options))
    first, second, other = (path.read_bytes() for path in paths)
    assert first == second
    assert first != other


@pytest.mark.parametrize(
    "arch", ["deepseek2", "deepseek4", "gemma4", "grovemoe", "jamba", "kimi-k3"]
)
def test_the_plan_of_a_large_model_is_what_llama_cpp_would_say(
    synth_worker: synth.LlamaWorker, arch: str
):
    shape = Shape(layers=9, experts=24, top_k=2, d_model=128, d_ff=96)
    header, tensors = LargePlanner(arch, synth_worker).plan(shape)
    assert (header, tensors) == plan(arch, shape, synth_worker)
    assert len(tensors) > len(plan(arch, default_shape(arch), synth_worker)[1])


def test_shards_of_a_large_model(synth_worker: synth.LlamaWorker, tmp_path: Path):
    whole, split = tmp_path / "whole.gguf", tmp_path / "split.gguf"
    options = SMALL | {"size_gib": 0.02, "worker": synth_worker}
    synth.make_large("qwen3moe", whole, **options)
    first = synth.make_large("qwen3moe", split, shards=3, **options)
    assert len(open_gguf(first).paths) == 3
    assert synth_worker.decode(first) == synth_worker.decode(whole)


def test_sizes_that_cannot_be_met_are_explained(synth_worker: synth.LlamaWorker, tmp_path: Path):
    path = tmp_path / "model.gguf"
    rigid = SMALL | {"size_gib": 0.05, "layers": 3, "experts": 200}
    tiny: dict[str, Any] = {"size_gib": 0.01}
    for wishes in (tiny, rigid):
        with pytest.raises(LabkitError, match="cannot be met"):
            synth.make_large("qwen3moe", path, worker=synth_worker, **wishes)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_seen_before_anything_is_written(
    synth_worker: synth.LlamaWorker, tmp_path: Path
):
    too_much = 1.2 * shutil.disk_usage(tmp_path).free / 2**30 + 1
    if too_much > 3000:
        pytest.skip("this disk has room for the largest model")
    with pytest.raises(LabkitError, match=r"needs [\d.]+ GiB, but .* free"):
        synth.make_large("gpt-oss", tmp_path / "m.gguf", size_gib=too_much, worker=synth_worker)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shards", [1, 3])
def test_a_failed_write_leaves_nothing_and_spares_the_file_that_was_there(
    tmp_path: Path, shards: int
):
    def broken(_file):
        raise OSError(28, "No space left on device")

    kind = GGMLQuantizationType.F32
    good = [TensorSpec(f"t{i}", (8,), kind, lambda file: file.write(bytes(32))) for i in range(4)]
    path = tmp_path / "model.gguf"
    path.write_bytes(b"older")
    with pytest.raises(OSError, match="No space"):
        write_shards(path, {}, [*good, TensorSpec("bad", (8,), kind, broken)], shards)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"older"


def test_another_reader_agrees_on_the_file(tmp_path: Path):
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    spec = TensorSpec(
        "t", (4, 3, 2), GGMLQuantizationType.F32, lambda file: file.write(values.tobytes())
    )
    metadata = {
        "general.architecture": "x",
        "whole": 7,
        "real": 0.5,
        "yes": True,
        "list": [1, 2, 3],
        "wide": [np.uint64(2**40)],
        "words": ["a", "bc"],
    }
    gguf_writer.write_gguf(tmp_path / "t.gguf", metadata, [spec])
    reader = GGUFReader(tmp_path / "t.gguf")
    found = {key: reader.fields[key].contents() for key in metadata}
    assert found == metadata
    assert np.array_equal(reader.tensors[0].data, values)


def test_the_command_makes_tiny_and_large_models(tmp_path: Path):
    run = CliRunner().invoke
    tiny, large = str(tmp_path / "tiny.gguf"), str(tmp_path / "large.gguf")
    told = json.loads(run(app, ["synth", "olmoe", tiny, "--quant", "Q8_0", "--json"]).stdout)
    assert told["paths"] == [tiny]
    assert told["expert_type"] == "Q8_0"
    assert len(told["check"]["tokens"]) == 5
    words = ["synth", "qwen3moe", large, "--size-gib", "0.02", "--d-model", "256", "--d-ff", "256"]
    result = run(app, words)
    assert result.exit_code == 0, result.output
    assert "decodes with llama.cpp" in result.stdout
    assert Path(large).stat().st_size == pytest.approx(0.02 * 2**30, rel=0.05)
    assert isinstance(run(app, words).exception, LabkitError)  # it exists
    assert run(app, [*words, "--force", "--no-check"]).exit_code == 0
    wrong = run(app, ["synth", "qwen3mo", str(tmp_path / "x.gguf")])
    assert "Did you mean qwen3moe" in str(wrong.exception)
    assert "qwen3moe" in run(app, ["synth", "--list"]).stdout.split()
