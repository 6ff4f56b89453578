"""Metadata values: scalars and short arrays decoded, long arrays left in the file."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import ModelFileError
from labkit.gguf_map.cursor import Cursor

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = (
    range(13)
)
VALUE_TYPE_NAMES = (
    *("UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "FLOAT32", "BOOL", "STRING"),
    *("ARRAY", "UINT64", "INT64", "FLOAT64"),
)
_FORMATS = "BbHhIifb..Qqd"
SCALARS = {i: struct.Struct("<" + f) for i, f in enumerate(_FORMATS) if f != "."}

MAX_VALUE_STRING = 4 << 20
"""Longest single string value kept (a chat template is some 10^4 bytes)."""
MAX_ARRAY_BYTES = 256 << 20
"""Longest array of numbers that is walked past; llama.cpp would read it all into memory."""
MAX_STRINGS = 2 << 20
"""Most strings in the arrays of one file: several times the largest vocabulary and merges."""
MAX_RAW_BYTES = 16 << 20
"""Largest vocabulary that is read as a whole (262,144 tokens take some 4 MiB)."""
SHORT_ARRAY = 1024
SHORT_STRING_ARRAY = 64

_ARRAY_HEAD = struct.Struct("<IQ")
_TYPE = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class LazyArray:
    """A long metadata array (a vocabulary, for one) that stays in the file.

    ``len()`` is free; `read` decodes a part of it. ``offset`` is where its first element begins.
    """

    path: Path
    key: str
    type_name: str
    length: int
    offset: int
    nbytes: int
    type_id: int

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"<{self.length} x {self.type_name} of {self.key}, left in the file>"

    def read(self, start: int = 0, count: int = 1000) -> list:
        """Decode up to ``count`` elements from ``start`` on. Strings before ``start`` are walked.

        Raises `ModelFileError` if the file has changed since it was opened.
        """
        start = min(max(start, 0), self.length)
        count = min(max(count, 0), self.length - start)
        with self.path.open("rb", buffering=0) as file:
            cursor = Cursor(file, self.path, self.offset + self.nbytes)
            cursor.skip(self.offset, self.key)
            if self.type_id == STRING:
                cursor.skip_strings(start, self.key)
                return [
                    cursor.string(MAX_VALUE_STRING, self.key).decode("utf-8", "replace")
                    for _ in range(count)
                ]
            width = SCALARS[self.type_id].size
            cursor.skip(start * width, self.key)
            return _unpack_array(cursor, self.type_id, count, self.key)

    def read_raw(self) -> list[bytes]:
        """All strings of a string array, undecoded; `ModelFileError` beyond `MAX_RAW_BYTES`."""
        if self.nbytes > MAX_RAW_BYTES:
            raise ModelFileError(
                f"{self.path}: {self.key} takes {self.nbytes} bytes; no vocabulary needs that many."
            )
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            raw = file.read(self.nbytes)
        strings, pos, unpack_from = [], 0, _U64.unpack_from
        if len(raw) == self.nbytes:
            while pos < self.nbytes:
                end = pos + 8 + unpack_from(raw, pos)[0]
                strings.append(raw[pos + 8 : end])
                pos = end
        if len(strings) != self.length:
            raise ModelFileError(f"{self.path}: {self.key} changed while it was read.")
        return strings


def value_type_name(type_id: int) -> str:
    """Name of a metadata value type in the GGUF specification."""
    if 0 <= type_id < len(VALUE_TYPE_NAMES):
        return VALUE_TYPE_NAMES[type_id]
    return f"unknown type {type_id}"


class ValueReader:
    """Reads the values of one file's metadata, within bounds on what is kept."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._strings_left = MAX_STRINGS

    def read(self, key: str) -> tuple[object, str]:
        """Return ``(value, type)``, the type as ``UINT32`` or ``ARRAY[STRING]``."""
        (type_id,) = self._cursor.unpack(_TYPE, f"the type of key '{key}'")
        if type_id == ARRAY:
            return self._array(key)
        name = value_type_name(type_id)
        if type_id == STRING:
            raw = self._cursor.string(MAX_VALUE_STRING, f"the value of key '{key}'")
            return raw.decode("utf-8", "replace"), name
        if type_id not in SCALARS:
            raise self._bad(key, f"has {name}, which GGUF does not define")
        (value,) = self._cursor.unpack(SCALARS[type_id], f"the value of key '{key}'")
        return (value != 0 if type_id == BOOL else value), name

    def _array(self, key: str) -> tuple[object, str]:
        cursor = self._cursor
        type_id, length = cursor.unpack(_ARRAY_HEAD, f"the array of key '{key}'")
        name = value_type_name(type_id)
        what = f"the array of key '{key}' ({length} x {name})"
        if type_id == ARRAY:
            raise self._bad(key, "is an array of arrays, which llama.cpp does not read")
        if type_id != STRING and type_id not in SCALARS:
            raise self._bad(key, f"is an array of {name}, which GGUF does not define")
        start = cursor.offset
        width = 8 if type_id == STRING else SCALARS[type_id].size
        if length * width > cursor.remaining:
            raise cursor.truncated(length * width, what)
        if type_id == STRING:
            value = self._strings(key, length, what)
        elif length * width > MAX_ARRAY_BYTES:
            raise self._bad(key, f"is an array of {length} x {name}: no model needs that much")
        elif length <= SHORT_ARRAY:
            value = _unpack_array(cursor, type_id, length, what)
        else:
            cursor.skip(length * width, what)
            value = None
        if value is None:
            nbytes = cursor.offset - start
            value = LazyArray(cursor.path, key, name, length, start, nbytes, type_id)
        return value, f"ARRAY[{name}]"

    def _strings(self, key: str, length: int, what: str) -> list[str] | None:
        self._strings_left -= length
        if self._strings_left < 0:
            raise self._bad(
                key, f"brings the file to more than {MAX_STRINGS} strings: no model needs that many"
            )
        if length > SHORT_STRING_ARRAY:
            self._cursor.skip_strings(length, what)
            return None
        limit = MAX_VALUE_STRING // SHORT_STRING_ARRAY
        return [
            self._cursor.string(limit, f"a string of key '{key}'").decode("utf-8", "replace")
            for _ in range(length)
        ]

    def _bad(self, key: str, problem: str) -> ModelFileError:
        return ModelFileError(
            f"{self._cursor.path}: metadata key '{key}' (near offset {self._cursor.offset})"
            f" {problem}. The file is damaged or was written by a tool that does not follow GGUF."
        )


def _unpack_array(cursor: Cursor, type_id: int, length: int, what: str) -> list:
    layout = SCALARS[type_id]
    raw = cursor.take(length * layout.size, what)
    values = list(struct.unpack(f"<{length}{layout.format[1:]}", raw))
    return [v != 0 for v in values] if type_id == BOOL else values
