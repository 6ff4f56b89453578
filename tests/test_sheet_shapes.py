"""Shapes of models in JSON: what can be said, and what hostile files meet."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from labkit.errors import SheetError
from labkit.sheet import ModelShape, load_shape, shape_names, sheet
from labkit.sheet.shape import PUBLISHED

KEYS = {
    "block_count": 3,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 32,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "expert_count": 8,
    "expert_used_count": 2,
}
TENSORS = {
    "token_embd.weight": [64, 100],
    "blk.*.attn_q.weight": [64, 64],
    "blk.{0}.ffn_up.weight": [64, 32],
    "blk.{1-2}.ffn_up_exps.weight": [64, 32, 8],
}


def described(**changes: Any) -> dict[str, Any]:
    value = {
        "format": "labkit-shape 1",
        "name": "Tiny",
        "architecture": "qwen3moe",
        "keys": KEYS,
        "tensors": TENSORS,
        **changes,
    }
    return {k: v for k, v in value.items() if v is not None}


def written(folder: Path, value: Any) -> Path:
    path = folder / "shape.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def cut(shape: ModelShape, layers: int) -> tuple[dict[str, tuple[int, ...]], dict[str, object]]:
    """(tensors, metadata) of a shape's first layers, with few experts and a small vocabulary."""
    keys = shape.keys
    used = max(keys.by_layer("expert_used_count", keys.n_layers))
    sizes = {keys.count("expert_count"): used + 3, keys.count("vocab_size"): 72}
    prefix = f"{shape.architecture}."
    metadata: dict[str, object] = {"general.architecture": shape.architecture}
    metadata |= {
        key: value[:layers] if isinstance(value, list) and len(value) == keys.n_layers else value
        for key, value in shape.metadata.items()
    }
    metadata |= {
        prefix + "block_count": layers,
        prefix + "expert_count": used + 3,
        prefix + "vocab_size": 72,
        prefix + "attention.layer_norm_rms_epsilon": 1e-5,
        prefix + "attention.layer_norm_epsilon": 1e-5,
        prefix + "logit_scale": 1.0,
        prefix + "expert_gating_func": 2,
        prefix + "rope.dimension_sections": [11, 11, 10, 0],
        "tokenizer.ggml.model": "none",
    }
    tensors = {}
    for name, dimensions in shape.tensors:
        match = re.match(r"blk\.(\d+)\.", name)
        if match and int(match[1]) >= layers:
            continue
        expert = "exp" in name or "ffn_gate_inp." in name
        last = dimensions[-1]
        if (expert and last == keys.count("expert_count")) or last == keys.count("vocab_size"):
            dimensions = (*dimensions[:-1], sizes[last])
        tensors[name] = dimensions
    return tensors, metadata


def test_a_shape_of_ones_own(tmp_path: Path) -> None:
    path = written(tmp_path, described(sources=["my notes"]))
    model = sheet(path)
    assert model.name == "Tiny"
    assert model.from_shape
    assert model.sources == ("my notes",)
    assert model.moe_layers == [1, 2]
    assert model.total_params == 6400 + 3 * 64 * 64 + 64 * 32 + 2 * 64 * 32 * 8
    assert model.token_cycle_bytes == 2 * 2 * 64 * 32 // 2
    assert model.kv_bytes(256) == 3 * 2 * 2 * 16 * 2 * 256


def test_published_shapes_have_sources() -> None:
    models = json.loads(PUBLISHED.read_text())["models"]
    assert set(models) == set(shape_names())
    for name, model in models.items():
        assert model["published"]["source"].startswith("http"), name
        assert all(s.startswith("http") for s in model["sources"]), name


def test_names_are_found_and_guessed() -> None:
    assert load_shape("GPT-OSS-20B").name == "gpt-oss-20b"
    with pytest.raises(SheetError, match="Did you mean 'qwen3-30b-a3b'"):
        sheet("qwen3-30b-a3")
    with pytest.raises(SheetError, match="no published shape and no file"):
        sheet("zzz")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, '"format": "labkit-shape 1"'),
        ({"format": "labkit-shapes 1"}, "one model"),
        ({"name": None}, "'name' is missing"),
        ({"name": "a\x1b[31m"}, "'name' is missing"),
        ({"architecture": 3}, "'architecture' is missing"),
        ({"colour": "red"}, "'colour' is no field"),
        ({"keys": None}, "'keys' must be an object"),
        ({"keys": KEYS | {"block_count": 0}}, "must be 1 to 512"),
        ({"keys": KEYS | {"block_count": 10**9}}, "must be 1 to 512"),
        ({"keys": KEYS | {"block_count": "3"}}, "must be 1 to 512"),
        ({"keys": KEYS | {"expert_count": 1.5}}, "must be a count"),
        ({"keys": KEYS | {"expert_count": {}}}, "must be a count"),
        ({"tensors": None}, "'tensors' must be an object"),
        ({"tensors": []}, "'tensors' must be an object"),
        ({"tensors": {"a.weight": []}}, "1 to 4 sizes"),
        ({"tensors": {"a.weight": [0]}}, "1 to 4 sizes"),
        ({"tensors": {"a.weight": [-5, 3]}}, "1 to 4 sizes"),
        ({"tensors": {"a.weight": [2**70]}}, "1 to 4 sizes"),
        ({"tensors": {"a.weight": [1, 1, 1, 1, 1]}}, "1 to 4 sizes"),
        ({"tensors": {"a.weight": [True, True]}}, "1 to 4 sizes"),
        ({"tensors": {"a.*.weight": [2, 2]}}, "at the start"),
        ({"tensors": {"blk.{3}.a.weight": [2, 2]}}, "beyond the model's 3 layers"),
        ({"tensors": {"blk.{0-99999999}.a.weight": [2, 2]}}, "no layer and no range"),
        ({"tensors": {"blk.{1,1}.a.weight": [2, 2]}}, "a second time"),
        ({"tensors": {"blk.*.ffn_up_exps.weight": [2, 2]}}, "three sizes"),
        ({"published": 5}, "'published' must be an object"),
        ({"published": {"total_b": -1, "source": "x"}}, "1e9 parameters"),
        ({"published": {"total_b": 1}}, "'source' is missing"),
        ({"notes": "text"}, "list of texts"),
    ],
)  # fmt: skip
def test_shapes_that_make_no_sense(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(SheetError, match=re.escape(message)):
        sheet(written(tmp_path, described(**change)))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, '{"format": NaN', "\x00\x01"]
)
def test_files_that_are_no_shapes(tmp_path: Path, text: str) -> None:
    with pytest.raises(SheetError, match=r"shape\.json"):
        sheet(written(tmp_path, text))


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "shape.json"
    with path.open("wb") as file:
        file.truncate(5 << 20)
    with pytest.raises(SheetError, match="over 4 MiB"):
        sheet(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count_kv", [1]),
        ("nextn_predict_layers", 9),
        ("attention.head_count", [4]),
    ],
)
def test_keys_that_do_not_fit_leave_the_weights(tmp_path: Path, key: str, value: Any) -> None:
    """The ledger of the weights stands; the cache says why there is no figure."""
    path = written(tmp_path, described(keys=KEYS | {key: value}))
    if key == "nextn_predict_layers":
        with pytest.raises(Exception, match="more than the"):
            sheet(path)
        return
    model = sheet(path)
    assert model.total_params > 0
    with pytest.raises(SheetError, match="lists 1 layers"):
        model.kv_bytes(256)
