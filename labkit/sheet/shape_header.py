"""Write the header that a model of a shape would have, so that llama.cpp can be asked about it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from labkit.errors import SheetError
from labkit.gguf_map.types import GGML_TYPES
from labkit.sheet.shape import ModelShape
from labkit.sheet.weights import type_for, weights_of_shape

_UNSIZED: dict[str, object] = {
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.0,
    "rope.dimension_sections": [11, 11, 10, 0],
    "rope.freq_base_swa": 10000.0,
}
"""Keys that some architectures demand and that change no size."""

_TYPE_IDS = {name: number for number, (name, _, _) in GGML_TYPES.items()}


def write_shape_header(shape: ModelShape, path: Path, type_name: str = "Q4_0") -> Path:
    """Write a GGUF file with the shape's metadata and tensor list, and no tensor data.

    Args:
        type_name: ggml type of the matrices, as quantised files have it (see `type_for`).

    Raises:
        SheetError: llama.cpp does not know the shape's architecture.
    """
    import gguf

    if shape.cache_architecture != shape.architecture:
        raise SheetError(
            f"{shape.where}: llama.cpp has no architecture '{shape.architecture}', so it cannot be"
            " asked about this model."
        )
    writer = gguf.GGUFWriter(path, shape.architecture)
    sizes = {} if (rows := _vocabulary(shape)) is None else {"vocab_size": rows}
    defaults = {f"{shape.architecture}.{key}": v for key, v in (_UNSIZED | sizes).items()}
    for key, value in (defaults | shape.metadata).items():
        _add(writer, key, value)
    writer.add_string("tokenizer.ggml.model", "none")
    for weight in weights_of_shape(shape):
        number = gguf.GGMLQuantizationType(_TYPE_IDS[type_for(weight, type_name)])
        _, block, block_bytes = GGML_TYPES[number]
        # The writer wants the slowest dimension first, and rows in bytes.
        rows = (*weight.shape[:0:-1], weight.shape[0] // block * block_bytes)
        nbytes = weight.n_params // block * block_bytes
        writer.add_tensor_info(weight.name, rows, np.dtype(np.uint8), nbytes, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def _vocabulary(shape: ModelShape) -> int | None:
    """Rows of the token embedding."""
    found = dict(shape.tensors).get("token_embd.weight", ())
    return found[1] if len(found) == 2 else None


def _add(writer, key: str, value: object) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)
