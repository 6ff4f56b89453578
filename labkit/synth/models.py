"""Make small models of any MoE architecture that the installed llama.cpp builds."""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGMLQuantizationType

from labkit.architectures import parse_expert_tensor
from labkit.errors import LabkitError, LlamaError
from labkit.synth.gguf_writer import TensorSpec, write_shards
from labkit.synth.llama import LlamaWorker
from labkit.synth.metadata import OFFERS, ON_DEMAND, Shape
from labkit.synth.quantise import block_length, expert_type, quantise
from labkit.synth.quirks import default_shape, describe
from labkit.synth.values import expert_table, weights

_FUSED = "ffn_gate_up_exps.weight"
MAX_LAYERS, MAX_EXPERTS = 512, 512
"""Limits of llama.cpp, which aborts beyond them."""

_TABLE = "ffn_gate_tid2eid"
_MISSING_KEY = re.compile(r"key not found in model: ([\w.-]+)")


def make(
    arch: str,
    path: str | Path,
    *,
    layers: int | None = None,
    experts: int = 8,
    top_k: int = 2,
    d_model: int | None = None,
    d_ff: int | None = None,
    quant: str = "F32",
    fused: bool = False,
    shards: int = 1,
    seed: int = 0,
    worker: LlamaWorker | None = None,
) -> Path:
    """Write a tiny random model of an architecture, without a tokenizer.

    Args:
        arch: a name of `architectures()`, as in GGUF's `general.architecture`.
        path: the file to write; with several shards, the start of their names.
        layers: number of layers; None takes the least with two MoE layers and all that is special.
        d_model, d_ff: width of the model and of one expert; None takes the least that works.
        quant: type of the routed experts (`quantise.EXPERT_TYPES`); the rest is F32.
        fused: put gate and up of each expert into one tensor, with the values of the two. Not
            every architecture reads that: see `reads_fused`.
        worker: a running worker to use, where many models are made.

    Returns:
        the file, or the first shard. Equal arguments give equal bytes.

    Raises:
        LabkitError: an argument that cannot work.
        LlamaError: llama.cpp does not build such a model; the message says why.
    """
    kind = expert_type(quant)
    shape = _shape(
        arch, kind, layers=layers, experts=experts, top_k=top_k, d_model=d_model, d_ff=d_ff
    )
    with contextlib.ExitStack() as stack:
        header, tensors = plan(arch, shape, worker or stack.enter_context(LlamaWorker()))
    if not any(parse_expert_tensor(name) for name in tensors):
        raise LabkitError(f"{arch} of {shape.layers} layers has no routed experts in llama.cpp.")
    if fused:
        tensors = _fuse(tensors)
    specs = [_spec(name, size, kind, shape, seed) for name, size in tensors.items()]
    if not 0 < shards <= len(specs):
        raise LabkitError(f"{shards} shards: give a number from 1 to {len(specs)}, the tensors.")
    return write_shards(Path(path), header, specs, shards)[0]


def reads_fused(arch: str, worker: LlamaWorker) -> bool:
    """Whether llama.cpp reads this architecture's experts with gate and up in one tensor."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            worker.decode(make(arch, Path(folder) / "fused.gguf", fused=True, worker=worker))
        except LabkitError:
            return False
    return True


def _fuse(tensors: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    fused: dict[str, tuple[int, ...]] = {}
    for name, size in tensors.items():
        if "ffn_gate_exps.weight" in name:
            fused[name.replace("gate", "gate_up")] = (size[0], 2 * size[1], size[2])
        elif "ffn_up_exps.weight" not in name:
            fused[name] = size
    if not any(_FUSED in name for name in fused):
        raise LabkitError("this architecture's experts have no gate that could be fused with up.")
    return fused


def plan(
    arch: str, shape: Shape, worker: LlamaWorker
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Metadata and tensor shapes of a model, settled with llama.cpp.

    Raises:
        LlamaError: llama.cpp refuses, or demands a key that labkit has no value for.
    """
    header, tensors = settle(arch, describe(arch, shape), shape, worker)
    for key, value in OFFERS.items():
        if f"{arch}.{key}" in header:
            continue
        offered = header | {f"{arch}.{key}": value(shape)}
        try:
            offered, changed = settle(arch, offered, shape, worker)
        except LlamaError:
            continue
        if changed != tensors:
            header, tensors = offered, changed
    return header, {name: size for name, size in tensors.items() if not _is_companion(name)}


def settle(
    arch: str, header: dict[str, Any], shape: Shape, worker: LlamaWorker
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The metadata with every key that llama.cpp misses in it, and the tensors it then wants.

    Raises:
        LlamaError: llama.cpp refuses, or demands a key that labkit has no value for.
    """
    header = dict(header)
    while True:
        try:
            return header, worker.tensors(header)
        except LlamaError as error:
            missing = _MISSING_KEY.search(str(error))
            key = missing.group(1).removeprefix(f"{arch}.") if missing else ""
            if key not in ON_DEMAND or f"{arch}.{key}" in header:
                raise LlamaError(f"llama.cpp builds no {arch} of this metadata: {error}") from error
            header[f"{arch}.{key}"] = ON_DEMAND[key](shape)


def _is_companion(name: str) -> bool:
    """Whether a tensor is one of the optional scales that only NVFP4 files have."""
    return name.endswith((".scale", ".input_scale")) and "ffn_gate_inp." not in name


def _shape(arch: str, kind: GGMLQuantizationType, **wanted: int | None) -> Shape:
    given = {key: value for key, value in wanted.items() if value is not None}
    block = block_length(kind)
    if block > 32:
        given = {"d_model": block, "d_ff": block} | given
    return check_shape(default_shape(arch).with_(given), kind)


def check_shape(shape: Shape, kind: GGMLQuantizationType) -> Shape:
    """The shape itself, if it can work with experts of a type.

    Raises:
        LabkitError: it cannot; the message gives the number and the rule.
    """
    block = block_length(kind)
    if min(shape.d_model, shape.d_ff) < 1 or shape.d_model % block or shape.d_ff % block:
        raise LabkitError(
            f"{kind.name} packs {block} values of a row together, so d_model ({shape.d_model}) and "
            f"d_ff ({shape.d_ff}) must be multiples of {block}."
        )
    if shape.d_model % (4 * shape.heads) and shape.d_head is None:
        raise LabkitError(
            f"d_model ({shape.d_model}) must be a multiple of {4 * shape.heads}: "
            f"{shape.heads} heads of a multiple of 4."
        )
    for what, value, limit in (
        ("layers", shape.layers, MAX_LAYERS),
        ("experts", shape.experts, MAX_EXPERTS),
        ("top_k", shape.top_k, shape.experts),
    ):
        if not 0 < value <= limit:
            raise LabkitError(f"{what} is {value}, but must be from 1 to {limit}.")
    return shape


def _spec(
    name: str, size: tuple[int, ...], expert: GGMLQuantizationType, shape: Shape, seed: int
) -> TensorSpec:
    kind = tensor_type(name, expert)

    def write(file: BinaryIO) -> None:
        file.write(tensor_bytes(name, size, kind, shape, seed))

    return TensorSpec(name, size, kind, write)


def tensor_type(name: str, expert: GGMLQuantizationType) -> GGMLQuantizationType:
    """The type of a tensor in a tiny model whose experts have the type `expert`."""
    if _TABLE in name:
        return GGMLQuantizationType.I32
    return expert if parse_expert_tensor(name) else GGMLQuantizationType.F32


def tensor_bytes(
    name: str, size: tuple[int, ...], kind: GGMLQuantizationType, shape: Shape, seed: int
) -> bytes:
    """The content of a tensor: random values that suit its name, as `kind`."""
    if _TABLE in name:
        return expert_table(size, shape.experts, name, seed).tobytes()
    if _FUSED not in name:
        return quantise(weights(name, size, seed), kind)
    half = (size[0], size[1] // 2, size[2])
    parts = [weights(name.replace("gate_up", part), half, seed) for part in ("gate", "up")]
    return quantise(np.concatenate(parts, axis=1), kind)
