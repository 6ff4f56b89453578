"""The network in PyTorch, laid out so that llama.cpp's ``deepseek`` graph computes the same.

Matrix products run in bfloat16 during training (twice to four times as fast on CPUs that have the
instructions), sums and the router in float32. ``TinyMoE.precision`` turns that off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .settings import Shape

PADDING = 32


@dataclass
class Routing:
    """What one MoE layer decided: probabilities (tokens, experts) and chosen ids (tokens, k)."""

    probabilities: Tensor
    chosen: Tensor


def rotation(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, head_dim / 2) of the rotary position encoding."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angle = torch.outer(torch.arange(length, dtype=torch.float64), shape.rope_base**-half)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turns consecutive pairs of the last axis; x is (batch, heads, length, head_dim)."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1)
    return turned.flatten(-2).to(x.dtype)


def matrix(*size: int, fan_in: int, gain: float = 1.0) -> nn.Parameter:
    """A weight drawn from a normal distribution with deviation gain / sqrt(fan_in)."""
    return nn.Parameter(torch.randn(*size) * gain / math.sqrt(fan_in))


class Attention(nn.Module):
    """Causal grouped-query attention; weights are (out, in)."""

    def __init__(self, shape: Shape, gain: float) -> None:
        super().__init__()
        self.shape = shape
        self.norm = nn.Parameter(torch.ones(shape.width))
        heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = matrix(heads, shape.width, fan_in=shape.width)
        self.k = matrix(kv, shape.width, fan_in=shape.width)
        self.v = matrix(kv, shape.width, fan_in=shape.width)
        self.out = matrix(shape.width, heads, fan_in=heads, gain=gain)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], later: Tensor, precision: torch.dtype
    ) -> Tensor:
        """Maps x (batch, length, width); ``later`` is minus infinity where a key lies ahead.

        Written out because it is faster here than the fused kernel, mostly on the way back.
        """
        shape = self.shape
        h = functional.rms_norm(x, (shape.width,), self.norm, shape.eps).to(precision)
        joined = functional.linear(h, torch.cat((self.q, self.k, self.v)).to(precision))
        joined = joined.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        q, k, v = joined.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        q, k = rotate(q, *turn), rotate(k, *turn)
        group = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = (q @ k.mT).float() / math.sqrt(shape.head_dim) + later
        mixed = score.softmax(-1).to(precision) @ v
        return functional.linear(mixed.transpose(1, 2).flatten(2), self.out.to(precision)).float()


class Dense(nn.Module):
    """A gated feed-forward block; also the shared expert. ``gate`` and ``up`` are (ff, width)."""

    def __init__(self, width: int, ff: int, gain: float) -> None:
        super().__init__()
        self.gate = matrix(ff, width, fan_in=width)
        self.up = matrix(ff, width, fan_in=width)
        self.down = matrix(width, ff, fan_in=ff, gain=gain)

    def forward(self, h: Tensor) -> Tensor:
        joined = functional.linear(h, torch.cat((self.gate, self.up)).to(h.dtype))
        gate, up = joined.chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, self.down.to(h.dtype)).float()


class Experts(nn.Module):
    """Routed experts: softmax over all, then the best k, weights scaled and not renormalised.

    ``gate_up`` is (experts, width, 2 ff) and ``down`` (experts, ff, width).
    """

    def __init__(self, shape: Shape, gain: float) -> None:
        super().__init__()
        self.shape = shape
        e, width, ff = shape.experts, shape.width, shape.expert_ff
        self.router = matrix(e, width, fan_in=width)
        self.gate_up = matrix(e, width, 2 * ff, fan_in=width)
        self.down = matrix(e, ff, width, fan_in=ff, gain=gain)

    def forward(self, h: Tensor, precision: torch.dtype) -> tuple[Tensor, Routing]:
        """Maps h (tokens, width) float32; returns the same shape and the routing."""
        shape = self.shape
        probabilities = functional.linear(h, self.router).softmax(-1)
        weights, chosen = probabilities.topk(shape.top_k, -1)
        rows, slots, ends = self._group(chosen)
        scale = torch.zeros(len(rows)).index_copy(0, slots, weights.flatten())
        scale = (scale * shape.expert_scale).to(precision)
        inside = functional.grouped_mm(h.to(precision)[rows], self.gate_up.to(precision), offs=ends)
        gate, up = inside.chunk(2, -1)
        active = functional.silu(gate) * up * scale[:, None]
        outputs = functional.grouped_mm(active, self.down.to(precision), offs=ends)
        total = torch.zeros_like(h).index_add(0, rows, outputs.float())
        return total, Routing(probabilities, chosen)

    def _group(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sorts the assignments by expert, each expert's rows padded to a multiple of 32.

        oneDNN builds a kernel for every new matrix size, so free sizes cost more than the padding
        (rows of token 0 with weight 0). Returns the token of each row, the row of each
        assignment (tokens * k,) and the end of each expert's rows.
        """
        flat = chosen.flatten()
        counts = torch.bincount(flat, minlength=self.shape.experts)
        ends = ((counts + PADDING - 1) // PADDING * PADDING).cumsum(0)
        order = flat.argsort(stable=True)
        shift = (ends - counts.cumsum(0)).roll(1)
        shift[0] = 0
        slots = torch.empty_like(order)
        slots[order] = torch.arange(len(order)) + shift[flat[order]]
        rows = torch.zeros(int(ends[-1]), dtype=torch.long)
        rows[slots] = torch.arange(len(order)) // self.shape.top_k
        return rows, slots, ends.to(torch.int32)


class Block(nn.Module):
    """Attention, then a dense block or routed experts beside a shared one."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        gain = 1 / math.sqrt(2 * shape.layers)
        self.shape = shape
        self.attention = Attention(shape, gain)
        self.norm = nn.Parameter(torch.ones(shape.width))
        if layer < shape.dense_layers:
            self.dense = Dense(shape.width, shape.dense_ff, gain)
            self.experts = None
        else:
            self.dense = Dense(shape.width, shape.shared_ff, gain)
            self.experts = Experts(shape, gain)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], later: Tensor, precision: torch.dtype
    ) -> tuple[Tensor, Routing | None]:
        x = x + self.attention(x, turn, later, precision)
        h = functional.rms_norm(x, (self.shape.width,), self.norm, self.shape.eps)
        dense = self.dense(h.to(precision))
        if self.experts is None:
            return x + dense, None
        routed, routing = self.experts(h.flatten(0, 1), precision)
        return x + dense + routed.view_as(x), routing


class TinyMoE(nn.Module):
    """The whole model; the embedding is also the output matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.precision = torch.bfloat16
        self.embedding = nn.Parameter(torch.randn(shape.vocab, shape.width) * 0.02)
        self.blocks = nn.ModuleList(Block(shape, i) for i in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))
        cosine, sine = rotation(shape, shape.context)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Routing]]:
        """Tokens (batch, length) to logits (batch, length, vocab) and each MoE layer's routing."""
        length = tokens.shape[1]
        turn = (self.cosine[:length], self.sine[:length])
        later = torch.full((length, length), -torch.inf).triu(1)
        x = functional.embedding(tokens, self.embedding)
        routings = []
        for block in self.blocks:
            x, routing = block(x, turn, later, self.precision)
            if routing is not None:
                routings.append(routing)
        h = functional.rms_norm(x, (self.shape.width,), self.norm, self.shape.eps).to(
            self.precision
        )
        return functional.linear(h, self.embedding.to(self.precision)), routings
