"""Files that would end the process inside llama.cpp are found out by a child process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_bytes import ARRAY, FLOAT32, STRING, UINT32, Key, parse

from labkit.errors import ModelFileError
from labkit.gguf_map import open_gguf
from labkit.runtime import trial
from labkit.runtime.trial import trial_load


@pytest.mark.parametrize(
    ("arch", "key"),
    [
        ("deepseek", Key("deepseek.rope.dimension_count", UINT32, 2)),
        ("arctic", Key("arctic.attention.key_length", UINT32, 3)),
        ("bailingmoe2", Key("bailingmoe2.expert_gating_func", UINT32, 77)),
    ],
)
def test_contradictions_of_an_architecture(synth_model, tmp_path, arch, key):
    """No general rule knows these; llama.cpp asserts them while it builds the graph."""
    doc = parse(synth_model(arch).read_bytes()).with_keys(key)
    gguf = open_gguf(doc.write(tmp_path / "m.gguf"))
    with pytest.raises(ModelFileError, match=r"would end this process.*(ASSERT|fatal error)"):
        trial_load(gguf)


@pytest.mark.parametrize(
    "change",
    [
        Key("qwen3moe.block_count", UINT32, 513),
        Key("qwen3moe.expert_used_count", UINT32, 0),
        Key("qwen3moe.expert_used_count", UINT32, 9),
        Key("qwen3moe.expert_count", UINT32, 0),
        Key("qwen3moe.expert_group_count", UINT32, 3),
        Key("qwen3moe.nextn_predict_layers", UINT32, 90),
        Key("qwen3moe.rope.scaling.type", STRING, "bogus"),
        Key("tokenizer.ggml.tokens", ARRAY, ["a", "b", "a"], STRING),
    ],
)
def test_rules_of_the_map_stand_for_real_assertions(synth_model, tmp_path, change):
    """Each rule refuses in Python what kills the child: were it dropped, a kernel would die."""
    extra = []
    if change.name.startswith("tokenizer"):
        extra = [
            Key("tokenizer.ggml.model", STRING, "gpt2"),
            Key("tokenizer.ggml.pre", STRING, "qwen2"),
            Key("tokenizer.ggml.merges", ARRAY, ["a b"], STRING),
        ]
    doc = parse(synth_model("qwen3moe").read_bytes()).with_keys(change, *extra)
    path = doc.write(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError):
        open_gguf(path)
    with pytest.raises(ModelFileError, match="would end this process"):
        trial_load(open_gguf(path, inspect_only=True))


def test_a_sound_model_is_tried_once(synth_model: Callable[..., Path], tmp_path, monkeypatch):
    started: list[list[str]] = []
    run = subprocess.run

    def counting(command, **options):
        started.append(command)
        return run(command, **options)

    monkeypatch.setattr(trial.subprocess, "run", counting)
    doc = parse(synth_model("qwen3moe").read_bytes())
    path = doc.write(tmp_path / "m.gguf")
    trial_load(open_gguf(path))
    trial_load(open_gguf(path))
    assert len(started) == 1
    doc.with_keys(Key("general.description", STRING, "another file")).write(path)
    trial_load(open_gguf(path))
    assert len(started) == 2


def test_what_llama_cpp_refuses_in_order_is_left_to_loading(synth_model, tmp_path):
    doc = parse(synth_model("qwen3moe").read_bytes())
    doc.tensors = [t for t in doc.tensors if t.name != "output_norm.weight"]
    trial_load(open_gguf(doc.write(tmp_path / "m.gguf")))


def test_an_epsilon_below_zero_is_refused(synth_model, tmp_path):
    """Asserted only while computing, so that the trial cannot see it."""
    key = Key("qwen3moe.attention.layer_norm_rms_epsilon", FLOAT32, -1.0)
    doc = parse(synth_model("qwen3moe").read_bytes()).with_keys(key)
    with pytest.raises(ModelFileError, match="epsilon is -1"):
        open_gguf(doc.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("kind", [1, 9, 15, 24, 27, 28, 30])
def test_types_that_no_weight_can_have(synth_model, tmp_path, kind):
    """A norm in F16, a weight in I8: llama.cpp computes with them until it crashes."""
    from labkit.gguf_map.types import GGML_TYPES

    doc = parse(synth_model("qwen3moe").read_bytes())
    _, block, nbytes = GGML_TYPES[kind]
    name = "output_norm.weight" if kind in (1, 30) else "blk.0.attn_output.weight"
    tensor = next(t for t in doc.tensors if t.name == name)
    count = 1
    for dim in tensor.shape:
        count *= dim
    if tensor.shape[0] % block:
        pytest.skip(f"rows of {tensor.shape[0]} do not divide by {block}")
    tensor.kind, tensor.data = kind, bytes(count // block * nbytes)
    with pytest.raises(ModelFileError, match=f"'{name}' has type"):
        open_gguf(doc.write(tmp_path / "m.gguf"))
