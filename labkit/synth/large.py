"""Large models for experiments at scale: real MoE shapes, any size, written at disk speed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from labkit.errors import LabkitError
from labkit.synth.gguf_writer import TensorSpec, write_shards
from labkit.synth.llama import LlamaWorker
from labkit.synth.metadata import Shape
from labkit.synth.models import (
    MAX_EXPERTS,
    MAX_LAYERS,
    check_shape,
    tensor_bytes,
    tensor_type,
)
from labkit.synth.quantise import expert_type
from labkit.synth.quirks import default_shape
from labkit.synth.scaling import LargePlanner, Tensors
from labkit.synth.tiles import write_tiled

PRESETS: dict[str, Shape] = {
    # Qwen3-30B-A3B, with half its attention heads.
    "qwen3moe": Shape(48, 128, 8, 2048, 768, 16, 4, 4096, 4096, d_head=128),
    # gpt-oss-20b.
    "gpt-oss": Shape(24, 32, 4, 2880, 2880, 64, 8, 4096, 4096, d_head=64),
}
"""Shapes of known models, but with a small vocabulary."""

_OTHER = Shape(24, 64, 8, 2048, 768, 16, 4, 4096, 4096)
_TOLERANCE = 0.05
_ROUTER = re.compile(r"ffn_gate_(?:inp|tid2eid)")
_TILED_BYTES = 1 << 20
"""Smaller tensors are drawn value by value."""
_MATRIX = re.compile(
    r"(?:blk\.\d+\.)?(?:attn_(?:q|k|v|qkv|output)|ffn_(?:gate|up|down)(?:_shexp)?|token_embd|output)"
    r"\.weight"
)
"""Dense matrices that are quantised as the experts are."""


def make_large(
    arch: str,
    path: str | Path,
    *,
    size_gib: float | None = None,
    layers: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    d_model: int | None = None,
    d_ff: int | None = None,
    quant: str = "Q4_0",
    shards: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    worker: LlamaWorker | None = None,
) -> Path:
    """Write a model of real proportions that llama.cpp decodes and that routes with variety.

    Args:
        arch: a name of `architectures()`; `PRESETS` has the shape of known models, any other
            gets a common one.
        size_gib: size of the files, met within 5 %; what is not given of `layers` and `experts`
            is chosen to meet it. None takes the preset as it is.
        quant: type of the experts and of the big dense matrices.
        progress: told (bytes written, bytes of the whole model).

    Returns:
        the file, or the first shard.

    Raises:
        LabkitError: the wishes cannot be met, or the disk has no room. Nothing is left behind.
        LlamaError: llama.cpp does not build such a model.
    """
    kind = expert_type(quant)
    given = {"layers": layers, "experts": experts, "top_k": top_k, "d_model": d_model, "d_ff": d_ff}
    wishes = {key: value for key, value in given.items() if value is not None}
    with contextlib.ExitStack() as stack:
        planner = LargePlanner(arch, worker or stack.enter_context(LlamaWorker()))
        shape = check_shape(_preset(arch, wishes), kind)
        if size_gib is not None:
            target = round(size_gib * 2**30)
            if "layers" not in wishes:
                shape = _fit_layers(planner, shape, kind, target)
            if "experts" not in wishes:
                shape = _fit_experts(planner, shape, kind, target)
            shape = check_shape(shape, kind)
            _require_size(planner, shape, kind, target)
        header, tensors = planner.plan(shape)
    specs = _specs(tensors, shape, kind, seed)
    total, done = _total(specs), 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return write_shards(Path(path), header, specs, shards, count)[0]


def _preset(arch: str, wishes: dict[str, int]) -> Shape:
    shape = PRESETS.get(arch, _OTHER).with_(wishes)
    if "d_model" not in wishes:
        return shape
    heads = max(1, shape.d_model // 128)
    return replace(shape, heads=heads, kv_heads=max(1, heads // 4), d_head=None)


def _specs(
    tensors: Tensors, shape: Shape, kind: GGMLQuantizationType, seed: int
) -> list[TensorSpec]:
    return [_spec(name, size, kind, shape, seed) for name, size in tensors.items()]


def _spec(
    name: str, size: tuple[int, ...], expert: GGMLQuantizationType, shape: Shape, seed: int
) -> TensorSpec:
    kind = tensor_type(name, expert)
    dense = GGMLQuantizationType.Q8_0 if expert is GGMLQuantizationType.MXFP4 else expert
    if _MATRIX.fullmatch(name) and size[0] % GGML_QUANT_SIZES[dense][0] == 0:
        kind = dense

    def write(file: BinaryIO) -> None:
        if spec.nbytes < _TILED_BYTES or _ROUTER.search(name):
            file.write(tensor_bytes(name, size, kind, shape, seed))
        else:
            write_tiled(file, name, size[0], spec.nbytes, kind, seed)

    spec = TensorSpec(name, size, kind, write)
    return spec


def _total(specs: list[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs)


def _size(planner: LargePlanner, shape: Shape, kind: GGMLQuantizationType) -> int:
    return _total(_specs(planner.plan(shape)[1], shape, kind, seed=0))


def _fit_layers(
    planner: LargePlanner, shape: Shape, kind: GGMLQuantizationType, target: int
) -> Shape:
    """As many layers as come nearest to `target` bytes."""
    least = default_shape(planner.arch).layers
    one = replace(shape, layers=least)
    two = replace(shape, layers=2 * least)
    size = _size(planner, one, kind)
    layer_bytes = (_size(planner, two, kind) - size) / least
    layers = least + round((target - size) / layer_bytes)
    return replace(shape, layers=min(max(layers, least), MAX_LAYERS))


def _fit_experts(
    planner: LargePlanner, shape: Shape, kind: GGMLQuantizationType, target: int
) -> Shape:
    """As many experts a layer as come nearest to `target` bytes."""
    few, many = min(2 * shape.top_k, MAX_EXPERTS - 1), MAX_EXPERTS
    size = _size(planner, replace(shape, experts=few), kind)
    expert_bytes = (_size(planner, replace(shape, experts=many), kind) - size) / (many - few)
    experts = few + round((target - size) / expert_bytes)
    if experts >= 64:
        experts = round(experts / 4) * 4  # architectures that route in groups need a multiple
    return replace(shape, experts=min(max(experts, shape.top_k), MAX_EXPERTS))


def _require_size(
    planner: LargePlanner, shape: Shape, kind: GGMLQuantizationType, target: int
) -> None:
    total = _size(planner, shape, kind)
    if abs(total - target) > _TOLERANCE * target:
        raise LabkitError(
            f"{target / 2**30:.3g} GiB cannot be met: {shape.layers} layers of {shape.experts} "
            f"experts, d_model {shape.d_model} and d_ff {shape.d_ff} give {total / 2**30:.3g} GiB. "
            "Give other values, or leave layers or experts open; d_model and d_ff set the scale."
        )
