"""How llama.cpp names the tensors of a Mixture-of-Experts model.

Names decide, not a list of models: llama.cpp gives every architecture the same tensor names, so a
tensor is a routed expert exactly when it is called ``blk.<layer>.<suffix>.weight`` with one of the
four suffixes in `EXPERT_SUFFIXES`. Look-alikes are dense weights that every token uses:
``ffn_norm_exps`` (a norm in arctic), ``ffn_*_chexps`` (grovemoe's adjugate experts, which the graph
indexes on its own), and the ``.scale`` and ``.bias`` companions of expert matrices.
"""

from __future__ import annotations

import re

EXPERT_SUFFIXES: dict[str, str] = {
    "ffn_gate_exps": "gate",
    "ffn_up_exps": "up",
    "ffn_down_exps": "down",
    "ffn_gate_up_exps": "gate_up",
}
"""Tensor suffix -> projection of a routed expert."""

PROJECTIONS: tuple[str, ...] = ("gate", "up", "gate_up", "down")
"""The projections in the order in which a MoE layer computes with them."""

ROUTED_EXPERT = "routed expert"
SHARED_EXPERT = "shared expert"
ROUTER = "router"
ATTENTION = "attention"
DENSE_FFN = "dense ffn"
EMBEDDING = "embedding"
OUTPUT = "output"
NORM = "norm"
OTHER = "other"

ROLES: tuple[str, ...] = (
    EMBEDDING,
    ATTENTION,
    NORM,
    DENSE_FFN,
    ROUTER,
    SHARED_EXPERT,
    ROUTED_EXPERT,
    OUTPUT,
    OTHER,
)
"""Every role that `role_of` gives, in the order in which a token meets them."""

_EXPERT_NAME = re.compile(
    r"blk\.(0|[1-9][0-9]{0,5})\.(" + "|".join(EXPERT_SUFFIXES) + r")\.weight", re.ASCII
)
_LAYER_NAME = re.compile(r"blk\.([0-9]{1,6})\.", re.ASCII)
_BLOCK_NAME = re.compile(r"(?:(?:enc|dec)\.)?blk\.[0-9]+\.(.+)", re.ASCII)

_ROUTER_PARTS = ("ffn_gate_inp", "exp_probs_b", "exp_probs_b_vl", "ffn_gate_tid2eid")
_ATTENTION_PREFIXES = (
    "attn",
    "cross_attn",
    "vis_attn",
    "indexer",
    "ssm_",
    "time_mix_",
    "shortconv",
)
_FFN_PREFIXES = ("ffn_", "ffn.", "channel_mix_", "vis_")
_EMBEDDINGS = ("token_embd", "position_embd", "token_types", "per_layer_token_embd")
_NORM_WORD = re.compile(r"(?:^|_)norm(?:_|$)", re.ASCII)


def parse_expert_tensor(name: str) -> tuple[int, str] | None:
    """Return ``(layer, projection)`` of a routed-expert tensor, or None for any other name.

    The match is exact: ``blk.3.ffn_up_exps.weight`` is one, ``blk.3.ffn_up_exps.bias`` is not.
    """
    match = _EXPERT_NAME.fullmatch(name)
    if match is None:
        return None
    return int(match[1]), EXPERT_SUFFIXES[match[2]]


def layer_of(name: str) -> int | None:
    """Return the layer of a tensor named ``blk.<layer>.<rest>``, or None for any other name."""
    match = _LAYER_NAME.match(name)
    return int(match[1]) if match else None


def role_of(name: str) -> str:
    """Return what a tensor of this name does in the model, one of `ROLES`.

    "attention" covers everything that mixes tokens (state-space and convolution blocks too). The
    look-alikes of routed experts (see the module's docstring) are "norm" or "dense ffn".
    """
    if parse_expert_tensor(name) is not None:
        return ROUTED_EXPERT
    block = _BLOCK_NAME.fullmatch(name)
    if block is None:
        return _global_role(name)
    return _block_role(block[1])


def _global_role(name: str) -> str:
    stem = name.rsplit(".", 1)[0]
    if _NORM_WORD.search(stem):
        return NORM
    if stem in _EMBEDDINGS:
        return EMBEDDING
    if stem in ("output", "cls", "cls.output"):
        return OUTPUT
    return OTHER


def _block_role(rest: str) -> str:
    part = rest.split(".", 1)[0]
    stem = rest.rsplit(".", 1)[0]
    if part.endswith("_shexp"):
        return SHARED_EXPERT
    if part in _ROUTER_PARTS:
        return ROUTER
    if _NORM_WORD.search(stem.replace(".", "_")):
        return NORM
    if part.startswith(_ATTENTION_PREFIXES):
        return ATTENTION
    if part.startswith(_FFN_PREFIXES):
        return DENSE_FFN
    return OTHER
