"""`StockModel`: llama.cpp as it is, without a callback: what streaming is measured against."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from labkit.errors import LlamaError, OptionError
from labkit.gguf_map import open_gguf
from labkit.runtime.native import LOAD_COPY, LOAD_MMAP, NativeModel

Load = Literal["mmap", "mmap-random", "resident", "repack"]


class StockModel:
    """A model that stock llama.cpp runs, with nothing of labkit in its graph.

    Args:
        path: a GGUF file, any shard, or a directory with one model.
        load: "mmap" maps the file and reads ahead, as llama.cpp does by default; "mmap-random"
            then tells the kernel not to read ahead (MADV_RANDOM), which is kinder to a model
            larger than memory; "resident" reads the file into memory of its own; "repack" also
            lets llama.cpp lay out weights anew for this processor.
        threads, n_ctx, n_ubatch: as for `Session`.

    Attributes:
        open_s: wall time of loading and of making the context.
        n_past: tokens in the context.

    Raises:
        ModelFileError, LlamaError, OptionError.
    """

    def __init__(
        self,
        path: str | Path,
        load: Load = "mmap",
        *,
        threads: int | None = None,
        n_ctx: int | None = None,
        n_ubatch: int = 512,
    ) -> None:
        if load not in ("mmap", "mmap-random", "resident", "repack"):
            raise OptionError(f"load is {load!r}; it must be mmap, mmap-random, resident or repack")
        if load == "mmap-random" and not sys.platform.startswith("linux"):
            raise OptionError("mmap-random needs Linux: elsewhere labkit does not find the map.")
        self.map = open_gguf(path)
        begin = time.perf_counter()
        self._model = NativeModel(
            self.map,
            None,
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            threads=threads,
            load_mode=LOAD_COPY if load == "resident" else LOAD_MMAP,
            repack=load == "repack",
        )
        if load == "mmap-random":
            self._advise_random()
        self.open_s = time.perf_counter() - begin
        self.n_ctx = self._model.n_ctx
        self.n_past = 0

    def prefill(self, tokens: Sequence[int]) -> float:
        """Run a prompt, a graph per `n_ubatch` tokens; seconds that it took."""
        begin = time.perf_counter()
        width = self._model.n_ubatch
        for low in range(0, len(tokens), width):
            part = tokens[low : low + width]
            last = low + len(part) == len(tokens)
            self._run(part, [False] * (len(part) - 1) + [last])
        return time.perf_counter() - begin

    def decode(self, token: int) -> float:
        """Run one token; seconds that it took."""
        begin = time.perf_counter()
        self._run([token], [True])
        return time.perf_counter() - begin

    def logits(self) -> np.ndarray:
        """(n_vocab,) float32, a copy: the logits of the last token."""
        return self._model.logits(-1)

    def reset(self) -> None:
        """Forget the conversation."""
        self._model.rewind(0)
        self.n_past = 0

    def close(self) -> None:
        """Free the model; a second call does nothing."""
        self._model.close()

    def __enter__(self) -> StockModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, tokens: Sequence[int], outputs: Sequence[bool]) -> None:
        self._model.decode(tokens, self.n_past, outputs)
        self.n_past += len(tokens)

    def _advise_random(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        found = False
        for low, high in _mappings(self.map.paths):
            found = True
            size = ctypes.c_size_t(high - low)
            if libc.madvise(ctypes.c_void_p(low), size, mmap.MADV_RANDOM) != 0:
                self.close()
                raise LlamaError(f"MADV_RANDOM fails: {os.strerror(ctypes.get_errno())}")
        if not found:
            self.close()
            raise LlamaError(f"{self.map.paths[0]}: llama.cpp did not map this file.")


def _mappings(paths: Sequence[Path]) -> Iterator[tuple[int, int]]:
    """Addresses [low, high) at which this process maps one of the files (Linux)."""
    wanted = {path.stat().st_ino for path in paths}
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        if int(inode) in wanted:
            low, _, high = span.partition("-")
            yield int(low, 16), int(high, 16)
