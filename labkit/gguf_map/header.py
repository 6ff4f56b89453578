"""One GGUF file's header: version, metadata, tensor list, and where its data begins.

The rules are those of llama.cpp's own reader (so that a file accepted here is not refused, or
worse, there), each checked before anything is allocated for it, and told with what to do.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

from labkit.errors import ModelFileError
from labkit.gguf_map.cursor import Cursor
from labkit.gguf_map.identify import refuse_non_gguf
from labkit.gguf_map.values import ValueReader

DEFAULT_ALIGNMENT = 32
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 63
MAX_DIMS = 4
MAX_KEPT_BYTES = 16 << 20
MAX_ELEMENTS = (1 << 63) - 1

_HEAD = struct.Struct("<4sI")
_COUNTS = struct.Struct("<QQ")
_NDIMS = struct.Struct("<I")
_DIMS = [struct.Struct(f"<{n}Q") for n in range(MAX_DIMS + 1)]
_TYPE_OFFSET = struct.Struct("<IQ")
_SMALLEST_KEY = 8 + 1 + 4 + 1
_SMALLEST_TENSOR = 8 + 1 + 4 + 4 + 8


@dataclass(slots=True)
class RawTensor:
    """A tensor as the header lists it: ``offset`` is relative to the data section."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(slots=True)
class Header:
    """What one GGUF file says about itself."""

    path: Path
    size: int
    version: int = 0
    metadata: dict[str, object] = field(default_factory=dict)
    value_types: dict[str, str] = field(default_factory=dict)
    tensors: list[RawTensor] = field(default_factory=list)
    alignment: int = DEFAULT_ALIGNMENT
    data_offset: int = 0


def read_header(path: Path, *, header_only: bool = False) -> Header:
    """Read and check the header of one file; tensor data is never touched.

    With ``header_only`` the file may end where its header does. Raises `NotAModelError` for what
    is no GGUF file, `ModelFileError` (or its child `TruncatedFileError`) for one against the rules.
    """
    size = refuse_non_gguf(path)
    header = Header(path, size)
    try:
        with path.open("rb", buffering=0) as file:
            cursor = Cursor(file, path, size)
            n_tensors, n_keys = _read_counts(cursor, header)
            _read_metadata(cursor, header, n_keys)
            header.alignment = _alignment(header)
            _read_tensors(cursor, header, n_tensors)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}.") from error
    header.data_offset = -(-cursor.offset // header.alignment) * header.alignment
    if header.tensors and header.data_offset > size and not header_only:
        raise cursor.truncated(header.data_offset - cursor.offset, "the padding before tensor data")
    return header


def _read_counts(cursor: Cursor, header: Header) -> tuple[int, int]:
    _, version = cursor.unpack(_HEAD, "the magic and version")
    path = header.path
    if version & 0xFFFF == 0 and version:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise ModelFileError(
            f"{path}: a big-endian GGUF file (version {swapped}). llama.cpp reads only files of"
            " this machine's byte order; convert it with `gguf-convert-endian FILE little`."
        )
    if version == 1:
        raise ModelFileError(
            f"{path}: GGUF version 1, which llama.cpp no longer reads."
            " Download a newer conversion of the model or convert it again."
        )
    if version not in (2, 3):
        raise ModelFileError(
            f"{path}: GGUF version {version}; labkit and the installed llama.cpp read 2 and 3."
        )
    header.version = version
    n_tensors, n_keys = cursor.unpack(_COUNTS, "the numbers of tensors and keys")
    for count, limit, least, what in (
        (n_tensors, MAX_TENSORS, _SMALLEST_TENSOR, "tensors"),
        (n_keys, MAX_KEYS, _SMALLEST_KEY, "metadata keys"),
    ):
        if count > limit or count * least > cursor.remaining:
            raise ModelFileError(
                f"{path}: the header declares {count} {what}, which a file of {header.size} bytes"
                f" cannot hold or labkit does not read (limit {limit}). The file is damaged."
            )
    return n_tensors, n_keys


def _read_metadata(cursor: Cursor, header: Header, n_keys: int) -> None:
    reader = ValueReader(cursor)
    kept = 0
    for index in range(n_keys):
        what = f"metadata key {index}"
        at = cursor.offset
        key = _text(cursor.string(MAX_KEY_BYTES, what), header.path, what, at)
        if key in header.metadata:
            raise ModelFileError(
                f"{header.path}: metadata key '{key}' appears twice (again at offset {at})."
                " A reader would have to guess which one holds; the file is damaged."
            )
        value, header.value_types[key] = reader.read(key)
        header.metadata[key] = value
        kept += len(key) + (len(value) if isinstance(value, str) else 64)
        if isinstance(value, list):
            kept += sum(len(v) if isinstance(v, str) else 32 for v in value)
        if kept > MAX_KEPT_BYTES:
            raise ModelFileError(
                f"{header.path}: its metadata is larger than {MAX_KEPT_BYTES >> 20} MiB at key"
                f" '{key}', vocabulary aside. No model needs that much; the file is damaged."
            )


def _alignment(header: Header) -> int:
    value = header.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    kind = header.value_types.get("general.alignment", "UINT32")
    rule = "it must be a UINT32 that is a power of two and a multiple of 8 (32 is usual)"
    if kind != "UINT32" or not isinstance(value, int):
        raise ModelFileError(f"{header.path}: general.alignment is of type {kind}; {rule}.")
    if value < 8 or value & (value - 1):
        raise ModelFileError(f"{header.path}: general.alignment is {value}; {rule}.")
    return value


def _read_tensors(cursor: Cursor, header: Header, n_tensors: int) -> None:
    seen: set[str] = set()
    for index in range(n_tensors):
        what = f"the name of tensor {index}"
        at = cursor.offset
        name = _text(cursor.string(MAX_NAME_BYTES, what), header.path, what, at)
        if name in seen:
            raise ModelFileError(f"{header.path}: tensor '{name}' is listed twice (offset {at}).")
        seen.add(name)
        where = f"{header.path}: tensor '{name}' (offset {at})"
        (n_dims,) = cursor.unpack(_NDIMS, f"the shape of tensor '{name}'")
        if n_dims > MAX_DIMS:
            raise ModelFileError(f"{where} has {n_dims} dimensions; ggml knows at most {MAX_DIMS}.")
        shape = cursor.unpack(_DIMS[n_dims], f"the shape of tensor '{name}'")
        _check_shape(shape, where)
        type_id, offset = cursor.unpack(_TYPE_OFFSET, f"type and offset of tensor '{name}'")
        header.tensors.append(RawTensor(name, shape, type_id, offset))


def _check_shape(shape: tuple[int, ...], where: str) -> None:
    elements = 1
    for dim in shape:
        if dim == 0:
            raise ModelFileError(f"{where} has a dimension of 0 in its shape {shape}.")
        elements *= dim
    if elements > MAX_ELEMENTS:
        raise ModelFileError(
            f"{where} has the shape {shape}: {elements} elements are more than 64 bits can count."
            " The file is damaged."
        )


def _text(raw: bytes, path: Path, what: str, at: int) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable():
        raise ModelFileError(
            f"{path}: {what} at offset {at} is empty or no printable text ({raw[:32]!r})."
            " The file is damaged."
        )
    return text
