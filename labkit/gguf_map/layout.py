"""Where each tensor's bytes lie, checked against the file: contiguous, aligned, inside."""

from __future__ import annotations

from labkit.architectures import parse_expert_tensor, role_of
from labkit.errors import ModelFileError, TruncatedFileError
from labkit.gguf_map.header import Header, RawTensor
from labkit.gguf_map.types import GGML_TYPES, TensorInfo, type_name

MEMORY_ALIGNMENT = 32
"""llama.cpp ends the process when mapped tensor data does not start at a multiple of this."""


def place_tensors(header: Header, shard: int) -> list[TensorInfo]:
    """Return the tensors of one file with absolute offsets, or raise `ModelFileError`.

    llama.cpp requires each tensor to begin where the one before it ends (rounded up to the
    alignment), which also rules out overlaps and gaps.
    """
    placed: list[TensorInfo] = []
    expected = 0
    for index, raw in enumerate(header.tensors):
        where = f"{header.path}: tensor '{raw.name}'"
        known = raw.type_id in GGML_TYPES
        if expected is not None and raw.offset != expected:
            raise ModelFileError(
                f"{where} begins at offset {raw.offset} of the data, but the tensor before it ends"
                f" at {expected}: overlapping or scattered data. The file is damaged."
            )
        start = header.data_offset + raw.offset
        if start % MEMORY_ALIGNMENT:
            raise ModelFileError(
                f"{where} begins at file offset {start}, not a multiple of {MEMORY_ALIGNMENT}:"
                " llama.cpp cannot map it. Write the file with general.alignment 32."
            )
        nbytes = _nbytes(raw, where) if known else _room(header, index, where)
        info = TensorInfo(
            raw.name,
            shard,
            start,
            nbytes,
            raw.type_id,
            type_name(raw.type_id),
            raw.shape,
            role_of(raw.name),
        )
        if start + nbytes > header.size:
            raise _truncated(header, info)
        placed.append(info)
        expected = _padded(raw.offset + nbytes, header.alignment) if known else _next(header, index)
    return placed


def _nbytes(raw: RawTensor, where: str) -> int:
    name, block, block_bytes = GGML_TYPES[raw.type_id]
    row = raw.shape[0] if raw.shape else 1
    if row % block:
        raise ModelFileError(
            f"{where} of type {name} has rows of {row} elements, not a multiple of {block}."
        )
    blocks = row // block
    for dim in raw.shape[1:]:
        blocks *= dim
    return blocks * block_bytes


def _next(header: Header, index: int) -> int | None:
    if index + 1 < len(header.tensors):
        return header.tensors[index + 1].offset
    return None


def _room(header: Header, index: int, where: str) -> int:
    """Bytes from an unknown-type tensor to the next one or the end of the file."""
    following = _next(header, index)
    end = header.size - header.data_offset if following is None else following
    start = header.tensors[index].offset
    if following is not None and following % header.alignment:
        raise ModelFileError(f"{where} is followed by a tensor at unaligned offset {following}.")
    if end < start:
        raise ModelFileError(
            f"{where} begins at offset {start} of the data, after its end at {end}."
            " The file is damaged or incomplete."
        )
    return end - start


def _padded(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _truncated(header: Header, info: TensorInfo) -> TruncatedFileError:
    detail = ""
    parsed = parse_expert_tensor(info.name)
    if parsed and len(info.shape) == 3:
        slice_bytes = info.nbytes // info.shape[2]
        expert = max(header.size - info.offset, 0) // slice_bytes
        detail = f" (layer {parsed[0]}, {parsed[1]} projection; the first expert cut is {expert})"
    short = info.offset + info.nbytes - header.size
    return TruncatedFileError(
        f"{header.path}: the file ends too early: tensor '{info.name}'{detail} needs bytes"
        f" {info.offset} to {info.offset + info.nbytes}, but the file has {header.size}, so"
        f" {short} bytes of it are missing. The download is incomplete; fetch the file again."
    )
