"""The metadata that makes llama.cpp build a small MoE model of any architecture.

From general to particular: `base` holds the keys that nearly all architectures read; `ON_DEMAND`
holds values for keys that some demand, added only when llama.cpp names them as missing, so that a
file carries no foreign keys; `OFFERS` holds keys that are kept where they change the model; and
`labkit.synth.quirks` holds what is particular to one architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The size of a synthetic model; `d_ff` is the width of one expert and of dense layers."""

    layers: int = 3
    experts: int = 8
    top_k: int = 2
    d_model: int = 64
    d_ff: int = 32
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 128
    context: int = 512
    d_head: int | None = None

    @property
    def head_dim(self) -> int:
        """Width of an attention head: `d_head`, or else an equal share of the model's width."""
        return self.d_head or self.d_model // self.heads

    def alternating(self, even: int, odd: int) -> list[int]:
        """A value for each layer: `even`, `odd`, `even`, ..."""
        return [odd if layer % 2 else even for layer in range(self.layers)]

    def with_(self, given: dict[str, int]) -> Shape:
        return replace(self, **given)


def base(shape: Shape) -> dict[str, Any]:
    """Keys (without the architecture's prefix) that nearly all MoE architectures read."""
    head = {"attention.key_length": shape.d_head, "attention.value_length": shape.d_head}
    return (head if shape.d_head else {}) | {
        "vocab_size": shape.vocab,
        "context_length": shape.context,
        "embedding_length": shape.d_model,
        "block_count": shape.layers,
        "feed_forward_length": shape.d_ff,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "expert_count": shape.experts,
        "expert_used_count": shape.top_k,
        "expert_feed_forward_length": shape.d_ff,
    }


MLA_ROPE, MLA_NOPE, MLA_LATENT = 16, 16, 32
"""Multi-head latent attention: a head's rotated and plain part, and the compressed keys."""

OFFERS: dict[str, Callable[[Shape], Any]] = {
    "leading_dense_block_count": lambda s: 1,
    "expert_shared_count": lambda s: 1,
    "expert_shared_feed_forward_length": lambda s: s.d_ff,
}
"""Keys that give a model a dense first layer and shared experts, where it can have them."""

SIGMOID = 2
"""The router's activation in `expert_gating_func`."""

ON_DEMAND: dict[str, Callable[[Shape], Any]] = OFFERS | {
    "expert_gating_func": lambda s: SIGMOID,
    "expert_weights_scale": lambda s: 1.0,
    "expert_weights_norm": lambda s: True,
    "expert_group_scale": lambda s: 1.0,
    "experts_per_group": lambda s: 2,
    "interleave_moe_layer_step": lambda s: 1,
    "swiglu_clamp_exp": lambda s: 7.0,
    "embedding_length_per_layer_input": lambda s: 16,
    "logit_scale": lambda s: 1.0,
    "residual_scale": lambda s: 1.0,
    "attention.layer_norm_epsilon": lambda s: 1e-5,
    "attention.clamp_kqv": lambda s: 8.0,
    "attention.sliding_window": lambda s: 32,
    "attention.sliding_window_pattern": lambda s: s.alternating(0, 1),
    "attention.key_length_swa": lambda s: s.head_dim,
    "attention.value_length_swa": lambda s: s.head_dim,
    "attention.q_lora_rank": lambda s: 32,
    "attention.kv_lora_rank": lambda s: MLA_LATENT,
    "attention.key_length_mla": lambda s: MLA_NOPE + MLA_ROPE,
    "attention.value_length_mla": lambda s: MLA_NOPE,
    "attention.kv_lora_rank_swa": lambda s: MLA_LATENT,
    "attention.key_length_mla_swa": lambda s: MLA_NOPE + MLA_ROPE,
    "attention.value_length_mla_swa": lambda s: MLA_NOPE,
    "attention.indexer.head_count": lambda s: s.heads,
    "attention.indexer.key_length": lambda s: 64,
    "attention.indexer.top_k": lambda s: 16,
    "attention.indexer.types": lambda s: s.alternating(1, 0),
    "attention.indexer.block_size": lambda s: 4,
    "attention.indexer.local_blocks": lambda s: 1,
    "attention.indexer.kpool": lambda s: 4,
    "attention.output_group_count": lambda s: 2,
    "attention.output_lora_rank": lambda s: 16,
    "attention.compress_rope_freq_base": lambda s: 160000.0,
    "rope.dimension_sections": lambda s: [s.head_dim // 4] * 2 + [0, 0],
    "rope.freq_base_swa": lambda s: 10000.0,
    "full_attention_interval": lambda s: 2,
    "shortconv.l_cache": lambda s: 3,
    "ssm.conv_kernel": lambda s: 4,
    "ssm.inner_size": lambda s: 2 * s.d_model,
    "ssm.state_size": lambda s: 16,
    "ssm.time_step_rank": lambda s: s.heads,
    "ssm.group_count": lambda s: 2,
    "kda.head_dim": lambda s: 16,
    "kda.gate_lower_bound": lambda s: -5.0,
    "activation.situ_beta": lambda s: 4.0,
    "activation.situ_linear_beta": lambda s: 25.0,
    "attn_res.block_size": lambda s: 2,
    "hyper_connection.count": lambda s: 4,
    "hyper_connection.sinkhorn_iterations": lambda s: 2,
    "hyper_connection.epsilon": lambda s: 1e-6,
    "hyper_connection.magnitude": lambda s: 2.0,
    "hyper_connection.low_rank": lambda s: 8,
}
