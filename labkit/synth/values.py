"""Random weights of sane scale: logits stay finite and vary, and so does the routing.

What a tensor holds follows from its name, as llama.cpp names tensors alike in all architectures.
"""

from __future__ import annotations

import hashlib

import numpy as np

ROUTER_GAIN = 1.5
"""Standard deviation of a router logit for a normalised input."""
ROUTER_SKEW = 0.8
"""Spread of the experts' router rows (log scale): uneven popularity, as in real models."""

ATTENTION_GAIN = 0.6
"""Scale of what attention adds, which in a random model is nearly the same for all tokens of a
context. With much of it they all route alike and generation falls into a loop; with none of it a
token's experts depend on that token alone."""


def spread(name: str, row_length: int) -> float:
    """Standard deviation of a matrix's values."""
    if name == "token_embd.weight":
        return 1.0
    gain = ATTENTION_GAIN if name.endswith("attn_output.weight") else 1.0
    return gain * float(row_length) ** -0.5


def generator(seed: int, name: str) -> np.random.Generator:
    """A stream of its own for each tensor, so that a tensor's values depend on nothing else."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def weights(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Values of one tensor: float32, of numpy shape `shape[::-1]` (rows last)."""
    return _values(name, shape, generator(seed, name)).astype(np.float32, copy=False)


def expert_table(shape: tuple[int, ...], n_expert: int, name: str, seed: int) -> np.ndarray:
    """Experts by token id, of a layer that routes without a router: int32 (tokens, top_k)."""
    top_k, tokens = shape
    order = generator(seed, name).random((tokens, n_expert)).argsort(axis=1)
    return order[:, :top_k].astype(np.int32)


def _values(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    leaf = name.split(".", 2)[2] if name.startswith("blk.") else name
    size = shape[::-1]
    normal = random.standard_normal(size, dtype=np.float32)
    if leaf == "ffn_gate_inp.weight":
        rows = np.exp(ROUTER_SKEW * random.standard_normal((shape[1], 1), dtype=np.float32))
        return (ROUTER_GAIN / np.sqrt(shape[0])) * rows * normal
    if leaf.startswith("rope_f"):
        return np.ones(size, np.float32)
    if leaf.startswith("ssm_a"):
        return -np.exp(0.5 * normal)  # the decay of a state space model is negative
    if leaf == "ssm_dt.bias":
        return normal * 0.5 - 2
    if leaf.endswith(".scale"):
        return 1 + 0.1 * normal
    if "norm" in leaf and leaf.endswith("weight"):
        return 1 + 0.1 * normal
    if len(shape) == 1 or leaf.endswith(".bias"):
        return 0.1 * normal
    return spread(name, shape[0]) * normal
