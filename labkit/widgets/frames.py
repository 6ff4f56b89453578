"""The wire format of the live view: what one message tells the page about some tokens.

One frame is one whole, new bytes object of at most `MAX_FRAME_BYTES`, little-endian:

====== ======= ==========================================================================
offset type    field
====== ======= ==========================================================================
0      u16     version of this format (1)
2      u16     rows: MoE layers of the model
4      u16     slots: experts per token and layer (top-k)
6      u16     experts per layer
8      u32     run number; a higher one starts over
12     u32     index of the first token of this frame within its run
16     u16     count of tokens in this frame
18     u16     unused
20     3 x f32 totals so far: decode speed (tok/s), hit rate (0..1), bytes read (MiB)
====== ======= ==========================================================================

then, for all tokens of the frame together: expert ids (u16, count x rows x slots, 0xFFFF where a
layer did not route the token), router weights (u8, 255 = all of the token's weight in that layer),
hit bits (packed, least significant first), entropy in bits (f32), wall time in ms (f32), misses
(u16), length of the text in bytes (u16), phase (u8: 0 prompt, 1 generated), and the texts (UTF-8).
`live_store.js` reads it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from labkit.runtime import TokenStep

VERSION = 1
NOT_ROUTED = 0xFFFF
MAX_FRAME_BYTES = 64 * 1024
_HEADER = struct.Struct("<HHHHIIHHfff")
_MAX_TEXT_BYTES = 255
#: Bytes of a token besides its cells and its text: entropy, time, misses, length, phase.
_FIXED_BYTES = 13


@dataclass(frozen=True)
class Shape:
    """What stays the same for all tokens of a model: MoE layers, top-k, experts per layer."""

    layers: tuple[int, ...]
    slots: int
    experts: int

    @property
    def token_bytes(self) -> int:
        """Most bytes that one token takes in a frame."""
        cells = len(self.layers) * self.slots
        return 3 * cells + cells // 8 + 1 + _FIXED_BYTES + _MAX_TEXT_BYTES

    @property
    def tokens_per_frame(self) -> int:
        """Most tokens of a frame that keep it within `MAX_FRAME_BYTES` (at least one)."""
        return max(1, (MAX_FRAME_BYTES - _HEADER.size) // self.token_bytes)


@dataclass(frozen=True)
class Totals:
    """Figures of the run so far; NaN is "not known"."""

    tokens_per_s: float
    hit_rate: float
    read_mib: float


@dataclass
class Decoded:
    """Running sums over the generated tokens of a run."""

    tokens: int = 0
    wall_s: float = 0.0
    hits: int = 0
    misses: int = 0
    bytes_read: int = 0

    def add(self, step: TokenStep) -> None:
        """Count one generated token."""
        self.tokens += 1
        self.wall_s += step.wall_s
        self.hits += step.hits
        self.misses += step.misses
        self.bytes_read += step.bytes_read

    def totals(self) -> Totals:
        """Return the figures that a frame carries."""
        lookups = self.hits + self.misses
        return Totals(
            tokens_per_s=self.tokens / self.wall_s if self.wall_s > 0 else math.nan,
            hit_rate=self.hits / lookups if lookups else math.nan,
            read_mib=self.bytes_read / 2**20 if self.tokens else math.nan,
        )


def missed(step: TokenStep) -> int:
    """Count the choices of a token whose expert was not there when its layer asked."""
    return int(step.hit.size - np.count_nonzero(step.hit))


def routing_bits(weights: np.ndarray) -> float:
    """Return the mean entropy of a token's chosen weights over its layers, in bits.

    `weights` is (layers, slots). 0 bits: every layer gives all weight to one expert; log2(slots)
    bits: every layer shares it evenly. Only the chosen experts enter: it tells how undecided the
    choice was among them. NaN where the graph shows no weights.
    """
    if weights.size == 0 or np.isnan(weights).any():
        return math.nan
    sums = weights.sum(axis=1, keepdims=True)
    shares = np.divide(weights, sums, out=np.zeros_like(weights), where=sums > 0)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    return abs(float((shares * logs).sum(axis=1).mean()))  # abs: no -0.0


def encode(
    steps: Sequence[TokenStep], *, shape: Shape, run: int, first: int, totals: Totals
) -> bytes:
    """Return one frame with `steps`, at most ``shape.tokens_per_frame`` of them.

    A step may lack layers (the last MoE layer routes only the last token of a prompt): their cells
    say so.
    """
    count, rows, slots = len(steps), len(shape.layers), shape.slots
    if count > shape.tokens_per_frame:
        raise ValueError(f"{count} tokens are more than one frame may hold")
    ids = np.full((count, rows, slots), NOT_ROUTED, dtype="<u2")
    weights = np.zeros((count, rows, slots), dtype=np.uint8)
    hits = np.zeros((count, rows, slots), dtype=np.uint8)
    numbers = np.zeros((2, count), dtype="<f4")
    counts = np.zeros((2, count), dtype="<u2")
    phases = np.zeros(count, dtype=np.uint8)
    texts: list[bytes] = []
    row_of = {layer: row for row, layer in enumerate(shape.layers)}
    for i, step in enumerate(steps):
        if len(step.layers) == rows:
            at: slice | list[int] = slice(None)
        else:
            at = [row_of[int(layer)] for layer in step.layers]
        ids[i, at] = step.experts
        weights[i, at] = _byte_shares(step.weights)
        hits[i, at] = step.hit
        numbers[:, i] = routing_bits(step.weights), step.wall_s * 1e3
        text = _cut(step.text.encode())
        counts[:, i] = min(missed(step), 0xFFFF), len(text)
        phases[i] = step.phase != "prefill"
        texts.append(text)
    header = _HEADER.pack(
        VERSION, rows, slots, shape.experts, run, first, count, 0,
        totals.tokens_per_s, totals.hit_rate, totals.read_mib,
    )  # fmt: skip
    bits = np.packbits(hits.reshape(-1), bitorder="little")
    parts = (ids, weights, bits, numbers, counts, phases)
    return b"".join([header, *(part.tobytes() for part in parts), *texts])


def _byte_shares(weights: np.ndarray) -> np.ndarray:
    """Return each slot's share of its layer's weight, 0..255; even shares where not known."""
    known = np.nan_to_num(weights, nan=1.0)
    sums = known.sum(axis=1, keepdims=True)
    return np.clip(255 * known / np.where(sums > 0, sums, 1), 0, 255)


def _cut(text: bytes) -> bytes:
    """Shorten a token's UTF-8 to what a frame holds, at a character's end."""
    if len(text) <= _MAX_TEXT_BYTES:
        return text
    return text[:_MAX_TEXT_BYTES].decode(errors="ignore").encode()
