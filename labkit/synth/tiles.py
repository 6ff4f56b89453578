"""Weights at disk speed: a pattern of quantised blocks, repeated.

A pattern of real quantised values repeats through a tensor. Its number of blocks is a prime, so no
two experts of a tensor begin at the same place in it: every slice has bytes of its own, and the
values stay those of a quantised normal distribution (blocks of plain random bits have a mean that
is not zero, and every token then goes to the same experts).
"""

from __future__ import annotations

import functools
from typing import BinaryIO

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from labkit.synth.quantise import quantise
from labkit.synth.values import generator, spread

_PATTERN_VALUES = 1 << 20
_CHUNK_BYTES = 8 << 20


def write_tiled(
    file: BinaryIO, name: str, row_length: int, nbytes: int, kind: GGMLQuantizationType, seed: int
) -> None:
    """Write `nbytes` of a tensor whose rows have `row_length` values, as `kind`.

    Where in the pattern the tensor begins follows from its name and the seed.
    """
    pattern, period = _pattern(kind, spread(name, row_length), seed)
    _, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = period // block_bytes
    position = int(generator(seed, name).integers(blocks)) * block_bytes
    while nbytes:
        size = min(nbytes, len(pattern) - position)
        file.write(pattern[position : position + size])
        nbytes -= size
        position = (position + size) % period


@functools.lru_cache(maxsize=4)
def _pattern(kind: GGMLQuantizationType, scale: float, seed: int) -> tuple[memoryview, int]:
    """Normal values of a standard deviation: (repeats of the pattern, bytes of one of them)."""
    block, _ = GGML_QUANT_SIZES[kind]
    blocks = _prime_below(_PATTERN_VALUES // block)
    random = generator(seed, f"pattern/{kind.name}/{scale}")
    values = random.standard_normal((blocks, block), dtype=np.float32)
    period = quantise(values * np.float32(scale), kind)
    repeats = -(-_CHUNK_BYTES // len(period)) + 1
    return memoryview(period * repeats), len(period)


def _prime_below(limit: int) -> int:
    number = limit - 1
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number -= 1
    return number
