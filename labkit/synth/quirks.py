"""What one architecture needs beyond the keys of `labkit.synth.metadata`.

An architecture that llama.cpp gains later needs no entry as long as the general keys serve it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.synth.metadata import MLA_LATENT, MLA_ROPE, SIGMOID, Shape, base

Keys = dict[str, Any]

SQRT_SOFTPLUS = 4
"""DeepSeek-V4's router activation in `expert_gating_func`."""


def _mla(shape: Shape) -> Keys:
    """Latent attention: all heads share one compressed key, cached with its rotated part."""
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": MLA_LATENT + MLA_ROPE,
        "attention.value_length": MLA_LATENT,
        "rope.dimension_count": MLA_ROPE,
        "attention.key_length_mla": 2 * MLA_ROPE,
        "attention.value_length_mla": MLA_ROPE,
    }


def _grouped(shape: Shape) -> Keys:
    """Routing in two steps: the best half of four groups, then the best experts in them."""
    if shape.experts < 8 or shape.experts % 4 or shape.top_k > shape.experts // 2:
        return {}
    return {"expert_group_count": 4, "expert_group_used_count": 2}


def _hybrid(shape: Shape) -> Keys:
    """Every second layer is recurrent, which llama.cpp reads from 0 key heads."""
    return {"attention.head_count_kv": shape.alternating(shape.kv_heads, 0)}


def _hybrid_mla(shape: Shape) -> Keys:
    return _mla(shape) | {"attention.head_count_kv": shape.alternating(1, 0)}


def _linear_attention(shape: Shape) -> Keys:
    """Gated delta net: the state is square in the head size."""
    return {"ssm.inner_size": shape.heads * 16, "full_attention_interval": 2}


def _all_key_heads(shape: Shape) -> Keys:
    return {"attention.head_count_kv": shape.heads}


def _dots3note(shape: Shape) -> Keys:
    return _mla(shape) | {
        "attention.key_length_swa": MLA_LATENT + MLA_ROPE,
        "attention.value_length_swa": MLA_LATENT,
    }


def _glm5_next(shape: Shape) -> Keys:
    """Latent attention without rotated positions."""
    return _hybrid_mla(shape) | {"attention.key_length": MLA_LATENT, "rope.dimension_count": 0}


def _nemotron_h_moe(shape: Shape) -> Keys:
    """A layer is attention, recurrent or MoE alone: here attention, MoE, recurrent, MoE, ..."""
    attends = [layer % 4 == 0 for layer in range(shape.layers)]
    return {
        "attention.head_count": [shape.heads if yes else 0 for yes in attends],
        "attention.head_count_kv": [shape.kv_heads if yes else 0 for yes in attends],
        "feed_forward_length": shape.alternating(0, shape.d_ff),
        "expert_shared_feed_forward_length": shape.d_ff,
    }


def _deepseek4(shape: Shape) -> Keys:
    """The first layer routes by token id; then all kinds of compressed attention."""
    ratios = [0, 0, 4, 128]
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "rope.dimension_count": 32,
        "hash_layer_count": 1,
        "expert_gating_func": SQRT_SOFTPLUS,
        "attention.compress_ratios": [ratios[layer % 4] for layer in range(shape.layers)],
    }


def _dflash(shape: Shape) -> Keys:
    """A draft model that is a MoE: it sits on the layers of a DeepSeek-V4."""
    attention = _deepseek4(shape)
    del attention["hash_layer_count"], attention["attention.compress_ratios"]
    return attention | {"target_layers": [0, 1], "hyper_connection.count": 4}


QUIRKS: dict[str, Callable[[Shape], Keys]] = {
    "afmoe": lambda s: {"attention.sliding_window": 32},
    "bailingmoe2": _grouped,
    "bailingmoe3": _hybrid_mla,
    "deepseek2": lambda s: _mla(s) | _grouped(s),
    "deepseek2-ocr": _all_key_heads,
    "deepseek32": _mla,
    "deepseek4": _deepseek4,
    "dflash": _dflash,
    "dots1": lambda s: _all_key_heads(s) | {"expert_gating_func": SIGMOID},
    "dots3note": _dots3note,
    "glm-dsa": _mla,
    "glm5-next": _glm5_next,
    "granitehybrid": _hybrid,
    "hy_v4": lambda s: _mla(s) | {"expert_gating_func": SIGMOID},
    "jamba": _hybrid,
    "kimi-k3": lambda s: _hybrid_mla(s) | {"expert_latent_length": s.d_ff},
    "kimi-linear": _hybrid_mla,
    "lfm2moe": _hybrid,
    "minimax-01": lambda s: {"full_attention_interval": 2},
    "minimax-m2": lambda s: {"expert_gating_func": SIGMOID},
    "minimax-m3": lambda s: {
        "attention.indexer.head_count": s.kv_heads,
        "rope.dimension_count": min(s.head_dim, 64),  # fits into the indexer's keys
    },
    "mistral4": _mla,
    "nemotron_h": _nemotron_h_moe,
    "nemotron_h_moe": _nemotron_h_moe,
    "nomic-bert-moe": lambda s: {"tokenizer.ggml.token_type_count": 1, "moe_every_n_layers": 2},
    "olmoe": _all_key_heads,
    "qwen35moe": _linear_attention,
    "qwen3next": _linear_attention,
    "qwen4exp": _linear_attention,
    "smallthinker": lambda s: {"expert_gating_func": SIGMOID},
}
"""Keys (without the architecture's prefix) that replace or extend the general ones."""

LAYERS: dict[str, int] = {
    "afmoe": 4,  # every fourth layer attends to everything
    "deepseek4": 4,
    "llama4": 4,  # every fourth layer goes without positions
    "nemotron_h": 4,
    "nemotron_h_moe": 4,
}
"""Layers of architectures that need more than three to show everything they have."""


def default_shape(arch: str) -> Shape:
    """The smallest shape with two MoE layers and all kinds of layers."""
    return Shape(layers=LAYERS.get(arch, Shape.layers))


def describe(arch: str, shape: Shape) -> Keys:
    """GGUF metadata of a model without a tokenizer, before what llama.cpp demands on top."""
    keys = base(shape) | QUIRKS.get(arch, lambda _: {})(shape)
    return {
        "general.architecture": arch,
        "general.name": f"labkit synthetic {arch}",
        **{_prefixed(arch, key): value for key, value in keys.items()},
        "tokenizer.ggml.model": "none",
    }


def _prefixed(arch: str, key: str) -> str:
    return key if key.startswith("tokenizer.") else f"{arch}.{key}"
