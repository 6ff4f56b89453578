"""Write a GGUF file, or a split set of them, from metadata and tensors that are made on the fly.

The `gguf` package's writer keeps whole tensors or copies them; here each tensor is a producer that
writes its bytes straight to the file, so that a model of many GiB needs no more memory than one
piece of it. Layout (GGUF version 3): header, metadata, tensor infos, padding, tensor data; every
tensor starts at a multiple of `ALIGNMENT` bytes after the start of the data.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from gguf.constants import GGML_QUANT_SIZES

from labkit.errors import LabkitError

ALIGNMENT = 32
_MAGIC = b"GGUF"
_VERSION = 3

_SCALAR_FORMATS = {
    GGUFValueType.UINT16: "<H",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
}
_NUMPY_TYPES = {
    "uint16": GGUFValueType.UINT16,
    "int32": GGUFValueType.INT32,
    "uint64": GGUFValueType.UINT64,
}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written.

    `shape` is in ggml order (ne[0], the row length, first). `write(file)` writes exactly
    `nbytes` bytes at the file's position.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    write: Callable[[BinaryIO], object]

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.shape, self.type)


def tensor_nbytes(shape: Sequence[int], quant: GGMLQuantizationType) -> int:
    """Bytes of a tensor; the row length must be a multiple of the type's block."""
    block, block_bytes = GGML_QUANT_SIZES[quant]
    rows = 1
    for size in shape[1:]:
        rows *= size
    return rows * (shape[0] // block) * block_bytes


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: Sequence[TensorSpec] = (),
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write one GGUF file, which appears under its name only when it is whole.

    Metadata values: bool, int (uint32), float (float32), str, numpy scalars for other widths, and
    non-empty lists of one of these. `progress` is told the bytes of each tensor written.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            _write(file, metadata, tensors, progress)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write(
    file: BinaryIO,
    metadata: dict[str, Any],
    tensors: Sequence[TensorSpec],
    progress: Callable[[int], None] | None,
) -> None:
    file.write(_MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        file.write(_pack_string(key) + _pack_value(value))
    offset = 0
    for tensor in tensors:
        file.write(_pack_string(tensor.name) + struct.pack("<I", len(tensor.shape)))
        file.write(struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape))
        file.write(struct.pack("<IQ", int(tensor.type), offset))
        offset += _padded(tensor.nbytes)
    _pad(file)
    for tensor in tensors:
        start = file.tell()
        tensor.write(file)
        written = file.tell() - start
        if written != tensor.nbytes:
            raise AssertionError(f"{tensor.name}: {written} bytes, declared {tensor.nbytes}")
        _pad(file)
        if progress is not None:
            progress(tensor.nbytes)


def shard_path(path: Path, number: int, shards: int) -> Path:
    """The file of shard `number` (from 0) of a model that is to be written to `path`."""
    if shards == 1:
        return path
    return path.with_name(f"{path.stem}-{number + 1:05d}-of-{shards:05d}.gguf")


def write_shards(
    path: Path,
    metadata: dict[str, Any],
    tensors: Sequence[TensorSpec],
    shards: int = 1,
    progress: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write a model as `shards` files, named as llama.cpp expects, and return their paths.

    One shard is written to `path` itself; several to `<stem>-00001-of-0000N.gguf` beside it, with
    about equal bytes. As llama.cpp's own splitter does, only the first carries the model's
    metadata; each carries its number, the count, and the number of all tensors.

    Raises:
        LabkitError: the disk has no room for the model; nothing was written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _require_room(path.parent, sum(_padded(tensor.nbytes) for tensor in tensors))
    if shards == 1:
        write_gguf(path, metadata, tensors, progress)
        return [path]
    written: list[Path] = []
    try:
        for number, part in enumerate(_cut(tensors, shards)):
            split = {
                "split.no": np.uint16(number),
                "split.count": np.uint16(shards),
                "split.tensors.count": np.int32(len(tensors)),
            }
            shard = shard_path(path, number, shards)
            write_gguf(shard, (metadata if number == 0 else {}) | split, part, progress)
            written.append(shard)
    except BaseException:
        for shard in written:
            shard.unlink(missing_ok=True)
        raise
    return written


_SPARE_BYTES = 64 << 20
"""Left free on the disk, beside headers."""


def _require_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes + _SPARE_BYTES > free:
        raise LabkitError(
            f"the model needs {nbytes / 2**30:.2f} GiB, but {folder} has {free / 2**30:.2f} GiB "
            "free: write elsewhere or make it smaller."
        )


def _cut(tensors: Sequence[TensorSpec], shards: int) -> list[list[TensorSpec]]:
    """Consecutive groups of about equal bytes, none of them empty."""
    total = sum(tensor.nbytes for tensor in tensors)
    groups: list[list[TensorSpec]] = [[]]
    done = 0
    for i, tensor in enumerate(tensors):
        still_to_start = shards - len(groups)
        due = done >= total * len(groups) / shards or len(tensors) - i == still_to_start
        if still_to_start and groups[-1] and due:
            groups.append([])
        groups[-1].append(tensor)
        done += tensor.nbytes
    return groups


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _pad(file: BinaryIO) -> None:
    position = file.tell()
    file.write(bytes(_padded(position) - position))


def _pack_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value_type(value: Any) -> GGUFValueType:
    if isinstance(value, np.generic):
        return _NUMPY_TYPES[value.dtype.name]
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, int):
        return GGUFValueType.UINT32
    if isinstance(value, float):
        return GGUFValueType.FLOAT32
    return GGUFValueType.STRING


def _pack_scalar(value: Any, kind: GGUFValueType) -> bytes:
    if kind is GGUFValueType.STRING:
        return _pack_string(value)
    return struct.pack(_SCALAR_FORMATS[kind], value)


def _pack_value(value: Any) -> bytes:
    if not isinstance(value, (list, tuple, np.ndarray)):
        kind = _value_type(value)
        return struct.pack("<I", kind) + _pack_scalar(value, kind)
    kind = _value_type(value[0])
    head = struct.pack("<IIQ", GGUFValueType.ARRAY, kind, len(value))
    return head + b"".join(_pack_scalar(item, kind) for item in value)
