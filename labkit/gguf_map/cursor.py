"""Bounded reading of a GGUF header: no allocation before the file is known to hold the bytes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from labkit.errors import ModelFileError, TruncatedFileError

CHUNK_BYTES = 1 << 18
MAX_STRING_BYTES = 1 << 30
"""llama.cpp refuses longer strings."""

_U64 = struct.Struct("<Q")


class Cursor:
    """A forward reader over one file that holds a chunk of it at a time.

    Every read says what it is for, so that the report on a file that ends early can say it too.
    """

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._file = file
        self._base = 0
        self._buffer = b""
        self._pos = 0

    @property
    def offset(self) -> int:
        """Bytes from the start of the file to the next byte to be read."""
        return self._base + self._pos

    @property
    def remaining(self) -> int:
        """Bytes from here to the end of the file."""
        return self.size - self.offset

    def unpack(self, layout: struct.Struct, what: str) -> tuple:
        """Read one fixed layout."""
        if self._pos + layout.size > len(self._buffer):
            self._refill(layout.size, what)
        values = layout.unpack_from(self._buffer, self._pos)
        self._pos += layout.size
        return values

    def take(self, nbytes: int, what: str) -> bytes:
        """Read ``nbytes`` bytes."""
        if self._pos + nbytes > len(self._buffer):
            self._refill(nbytes, what)
        start = self._pos
        self._pos += nbytes
        return self._buffer[start : self._pos]

    def skip(self, nbytes: int, what: str) -> None:
        """Move past ``nbytes`` bytes without reading them."""
        if nbytes > self.remaining:
            raise self.truncated(nbytes, what)
        self._pos += nbytes

    def string(self, limit: int, what: str) -> bytes:
        """Read a length-prefixed string of at most ``limit`` bytes."""
        (length,) = self.unpack(_U64, f"the length of {what}")
        if length > limit:
            raise ModelFileError(
                f"{self.path}: {what} at offset {self.offset} declares {length} bytes, more than"
                f" the {limit} that labkit reads. The file is damaged or not a model."
            )
        return self.take(length, what)

    def skip_strings(self, count: int, what: str) -> None:
        """Move past ``count`` length-prefixed strings, reading only their lengths."""
        unpack_from = _U64.unpack_from
        left = count
        while left:
            buffer, pos, length = self._buffer, self._pos, 0
            last = len(buffer) - 8
            while left and pos <= last:
                (length,) = unpack_from(buffer, pos)
                pos += 8 + length
                left -= 1
            if length > MAX_STRING_BYTES:
                raise ModelFileError(
                    f"{self.path}: {what} holds a string of {length} bytes near offset"
                    f" {self.offset}, more than GGUF readers accept. The file is damaged."
                )
            self._pos = pos
            if self.remaining < 8 * left:
                raise self.truncated(8 * left, what)
            if left:
                self._refill(8, what)

    def truncated(self, nbytes: int, what: str) -> TruncatedFileError:
        """The error for a file that ends before ``nbytes`` more bytes."""
        return TruncatedFileError(
            f"{self.path}: the file ends inside its header: {what} at offset {self.offset} needs"
            f" {nbytes} bytes, but only {max(self.remaining, 0)} of {self.size} are left."
            " The download is incomplete or the file is damaged; fetch it again."
        )

    def _refill(self, nbytes: int, what: str) -> None:
        if nbytes > self.remaining:
            raise self.truncated(nbytes, what)
        start = self.offset
        self._file.seek(start)
        self._buffer = self._file.read(max(nbytes, CHUNK_BYTES))
        self._base, self._pos = start, 0
        if len(self._buffer) < nbytes:
            raise TruncatedFileError(
                f"{self.path}: the file became shorter while it was read (at offset {start})."
            )
