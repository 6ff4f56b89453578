"""Telling what a path is when it is no GGUF model, one distinct message for each kind."""

from __future__ import annotations

import stat
from pathlib import Path

from labkit.errors import ModelFileError, NotAModelError

_LFS = b"version https://git-lfs"
_SMALLEST_FILE = 24


def refuse_non_gguf(path: Path) -> int:
    """Return the size of a regular file that begins like GGUF, or raise `NotAModelError`."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise NotAModelError(f"{path}: not a regular file, so no model can be read from it.")
        with path.open("rb", buffering=0) as file:
            head = file.read(64)
    except (FileNotFoundError, ValueError):  # ValueError: a NUL in the name
        raise NotAModelError(f"{path}: no such file. Check the path of the model.") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}.") from error
    problem = _problem(path, head, status.st_size)
    if problem:
        raise NotAModelError(f"{path}: {problem}")
    return status.st_size


def _problem(path: Path, head: bytes, size: int) -> str | None:
    if size == 0:
        return "the file is empty. The download did not finish; fetch it again."
    if head.startswith(_LFS):
        return (
            "a Git-LFS pointer, not the model itself."
            " Run `git lfs pull` in that repository, or download the file directly."
        )
    if head.startswith(b"GGUF"):
        if size < _SMALLEST_FILE:
            return f"begins like GGUF but has only {size} bytes. Fetch it again."
        return None
    if head.startswith(b"FUGG"):
        return "a GGUF file with its magic in reversed byte order, which no reader accepts."
    if path.suffix == ".safetensors" or _is_safetensors(head, size):
        return (
            "a safetensors file. labkit and llama.cpp read GGUF: convert the model with llama.cpp's"
            " convert_hf_to_gguf.py, or download a GGUF conversion of it."
        )
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive (perhaps a PyTorch checkpoint). labkit reads GGUF files only."
    if head.lstrip()[:1] in (b"<", b"{"):
        return "text (a web page or JSON), not a model. The download link was not the file itself."
    return f"not a GGUF file: it begins with {head[:4]!r} instead of b'GGUF'."


def _is_safetensors(head: bytes, size: int) -> bool:
    length = int.from_bytes(head[:8], "little")
    return len(head) > 9 and 2 <= length <= size - 8 and head[8:9] == b"{"
