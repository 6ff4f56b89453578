"""Ask the installed llama.cpp what a model would allocate: weights, KV, compute buffers.

Nothing is loaded: llama.cpp reads the header, builds its graphs and counts, in a process of its
own. So the question takes no memory to speak of, and a file whose tensor data is absent can be
asked about as well.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import LabkitError, SheetError
from labkit.gguf_map import GGUFMap
from labkit.gguf_map.types import GGML_TYPES
from labkit.sheet.cache_rows import CacheOptions
from labkit.sheet.header import open_header
from labkit.sheet.shape import ModelShape, load_shape
from labkit.sheet.shape_header import write_shape_header

_WAIT_S = 120.0
_TYPE_IDS = {name: number for number, (name, _, _) in GGML_TYPES.items()}
_LAST_WORDS = 300


@dataclass(frozen=True, slots=True)
class LlamaMemory:
    """llama.cpp's own count of a model with one context, in bytes.

    `weights_bytes` are the tensors of the file, `kv_bytes` the KV cache and recurrent states,
    `compute_bytes` the scratch buffers of the largest graph. The buffer of the output's logits
    (one row of the vocabulary) comes on top.
    """

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int


def ask_llama(model: str | Path | GGUFMap | ModelShape, options: CacheOptions) -> LlamaMemory:
    """What the installed llama.cpp would allocate on the CPU for a model file.

    Args:
        model: a GGUF file, or its map; tensor data may be absent. A shape is asked about as a file
            of it quantised to Q4_0.
        options: context, batch of prefill, and how the cache is made.

    Raises:
        SheetError: llama.cpp refuses the model, ends its process over it, or cannot be asked here
            (its count is read on Linux on x86-64 only).
        ModelFileError: the file is no model.
    """
    if isinstance(model, ModelShape):
        with tempfile.TemporaryDirectory(prefix="labkit-sheet-") as folder:
            path = write_shape_header(model, Path(folder) / "shape.gguf")
            return _ask_about(open_header(path), options, model.where)
    gguf = model if isinstance(model, GGUFMap) else open_header(model)
    return _ask_about(gguf, options, str(gguf.paths[0]))


def _ask_about(gguf: GGUFMap, options: CacheOptions, where: str) -> LlamaMemory:
    for problem in gguf.load_problems():
        raise SheetError(f"{where}: llama.cpp cannot be asked: {problem}")
    with _with_room_for_data(gguf) as path:
        job = {
            "path": str(path),
            "n_ctx": options.n_ctx,
            "n_ubatch": options.n_ubatch,
            "type_k": _TYPE_IDS[options.type_k],
            "type_v": _TYPE_IDS[options.type_v],
            "swa_full": options.swa_full,
        }
        answer = _ask(job, where)
    return LlamaMemory(answer["weights"], answer["kv"], answer["compute"])


def ask_if_possible(
    source: str | Path | ModelShape, made_from_shape: bool, options: CacheOptions
) -> tuple[LlamaMemory | None, str]:
    """(llama.cpp's answer, "") or (None, why there is none); `source` as `labkit.sheet.sheet`'s."""
    model = load_shape(source) if made_from_shape and isinstance(source, str | Path) else source
    try:
        return ask_llama(model, options), ""
    except LabkitError as error:
        return None, str(error)


def _ask(job: dict[str, object], where: str) -> dict[str, int]:
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", "labkit.sheet.ask_worker", json.dumps(job)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_WAIT_S,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise SheetError(f"{where}: llama.cpp gave no answer: {error}") from error
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        words = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        said = next((w for w in reversed(words) if "ASSERT" in w or "Error" in w), words[-1])
        raise SheetError(
            f"{where}: llama.cpp ended its process when asked: {said[-_LAST_WORDS:]}"
        ) from None
    if reason := answer.get("refused"):
        raise SheetError(f"{where}: llama.cpp refuses this: {reason}")
    if "unknown" in answer:
        raise SheetError(
            f"{where}: the count of this llama.cpp ({answer['unknown']}) cannot be read here"
            " (labkit reads it on Linux on x86-64)."
        )
    return answer


@contextmanager
def _with_room_for_data(gguf: GGUFMap) -> Iterator[Path]:
    """The model's first file, or copies of the headers as long as the whole files would be.

    llama.cpp refuses a file that ends before its tensors. The copies are sparse: their tensor data
    takes no room on the disk.
    """
    ends = [
        max((t.offset + t.nbytes for t in gguf.tensors if t.shard == shard), default=0)
        for shard in range(len(gguf.paths))
    ]
    if all(end <= size for end, size in zip(ends, gguf.sizes, strict=True)):
        yield gguf.paths[0]
        return
    with tempfile.TemporaryDirectory(prefix="labkit-sheet-") as folder:
        copies = []
        for path, end in zip(gguf.paths, ends, strict=True):
            copy = Path(folder) / path.name
            shutil.copyfile(path, copy)
            with copy.open("r+b") as file:
                file.truncate(max(end, path.stat().st_size))
            copies.append(copy)
        yield copies[0]
