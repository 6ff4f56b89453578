"""The metadata that makes llama.cpp build a small MoE model of any architecture.

Three layers, from general to particular: `base` holds the keys that nearly all architectures read;
`ON_DEMAND` holds values for keys that some demand, added only when llama.cpp names them as missing,
so that a file carries no foreign keys; `QUIRKS` holds what is particular to one architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The size of a synthetic model. None in `layers` means what the architecture needs."""

    layers: int = 3
    experts: int = 8
    top_k: int = 2
    d_model: int = 64
    d_ff: int = 32
    d_dense_ff: int = 64
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 128
    context: int = 512

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads


def base(shape: Shape) -> dict[str, Any]:
    """Keys (without the architecture's prefix) that nearly all MoE architectures read."""
    return {
        "vocab_size": shape.vocab,
        "context_length": shape.context,
        "embedding_length": shape.d_model,
        "block_count": shape.layers,
        "feed_forward_length": shape.d_dense_ff,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "expert_count": shape.experts,
        "expert_used_count": shape.top_k,
        "expert_feed_forward_length": shape.d_ff,
    }


ON_DEMAND: dict[str, Callable[[Shape], Any]] = {
    "attention.layer_norm_epsilon": lambda s: 1e-5,
    "leading_dense_block_count": lambda s: 1,
    "expert_shared_count": lambda s: 1,
    "expert_shared_feed_forward_length": lambda s: s.d_ff,
    "expert_gating_func": lambda s: 2,
    "expert_weights_scale": lambda s: 1.0,
    "interleave_moe_layer_step": lambda s: 1,
    "attention.sliding_window": lambda s: 32,
    "rope.dimension_count": lambda s: s.head_dim,
    "logit_scale": lambda s: 1.0,
    "attention.clamp_kqv": lambda s: 8.0,
}

QUIRKS: dict[str, Callable[[Shape], dict[str, Any]]] = {}

SHAPES: dict[str, dict[str, int]] = {}


def shape(arch: str, **given: int) -> Shape:
    """The shape of an architecture: what was given, and its own defaults for the rest."""
    own = SHAPES.get(arch, {})
    return replace(Shape(), **(own | given))


def describe(arch: str, shape: Shape) -> dict[str, Any]:
    """GGUF metadata of a model without a tokenizer, before what llama.cpp demands on top."""
    keys = base(shape) | QUIRKS.get(arch, lambda s: {})(shape)
    return {
        "general.architecture": arch,
        "general.name": f"labkit synthetic {arch}",
        **{f"{arch}.{key}": value for key, value in keys.items() if value is not None},
        "tokenizer.ggml.model": "none",
    }
