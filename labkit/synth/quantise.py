"""Weights in the types of GGUF files, quantised by llama.cpp's own functions."""

from __future__ import annotations

import ctypes

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from labkit.errors import LabkitError
from labkit.runtime import ggml

EXPERT_TYPES = ("F32", "F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4")
"""Types that synthetic experts can have."""


def expert_type(name: str) -> GGMLQuantizationType:
    """The type called `name`, such as "Q4_0".

    Raises:
        LabkitError: it is none of `EXPERT_TYPES`.
    """
    if name not in EXPERT_TYPES:
        raise LabkitError(f"no experts of type {name}: choose one of {', '.join(EXPERT_TYPES)}.")
    return GGMLQuantizationType[name]


def block_length(quant: GGMLQuantizationType) -> int:
    """Elements in one block of the type; a row must be a multiple of it."""
    return GGML_QUANT_SIZES[quant][0]


def quantise(values: np.ndarray, quant: GGMLQuantizationType) -> bytes:
    """The bytes of float32 `values` (rows last) as `quant`."""
    if quant is GGMLQuantizationType.F32:
        return values.tobytes()
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    block, block_bytes = GGML_QUANT_SIZES[quant]
    out = ctypes.create_string_buffer(rows.size // block * block_bytes)
    quantise_chunk = ggml.function(
        "ggml_quantize_chunk",
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    )
    # The last argument would be an importance matrix; the types above need none.
    quantise_chunk(int(quant), rows.ctypes.data, out, 0, rows.shape[0], rows.shape[1], None)
    return out.raw
