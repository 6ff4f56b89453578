"""`Engine`: an open model with everything that runs its graphs, before any conversation."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from labkit.errors import LlamaError, OptionError, ReadError, StreamingRefusedError
from labkit.gguf_map import GGUFMap, open_gguf
from labkit.policy import make_policy
from labkit.runtime import llama_log
from labkit.runtime.budget import BudgetWarning, budget_warning, default_cache_bytes
from labkit.runtime.capture import GraphCapture
from labkit.runtime.dense import DenseWeights
from labkit.runtime.hook import RouterHook
from labkit.runtime.interrupt import InterruptGuard
from labkit.runtime.native import NativeModel
from labkit.runtime.reader import FileReader
from labkit.runtime.recorder import Recorder
from labkit.runtime.source import ExpertStreamSource
from labkit.runtime.trial import trial_load

Dense = Literal["anonymous", "mmap"]


class Engine:
    """A model, opened resident or streamed. See `Session` for the arguments and the errors.

    Attributes:
        map: what the file holds.
        source: fetches experts; None in a resident run.
        cache_bytes: the source's budget, None in a resident run.
        reader_note: whether reads are direct and why, None in a resident run.
        model, hook, recorder: llama.cpp, its callback, and what the callback saw.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        resident: bool,
        cache_mib: float | None,
        policy: str,
        lanes: int,
        direct_io: bool | None,
        dense: Dense,
        threads: int | None,
        n_ctx: int | None,
        n_ubatch: int,
        trial: bool,
    ) -> None:
        if dense not in ("anonymous", "mmap"):
            raise OptionError(f"dense is {dense!r}; it must be 'anonymous' or 'mmap'")
        self.map: GGUFMap = open_gguf(path)
        self._stamps = [_stamp(shard) for shard in self.map.paths]
        self.source: ExpertStreamSource | None = None
        self.cache_bytes: int | None = None
        self.reader_note: str | None = None
        self._reader: FileReader | None = None
        with contextlib.ExitStack() as undo:
            if not resident:
                self.map.require_streamable()
                self.cache_bytes = _cache_bytes(self.map, cache_mib)
                self._reader = FileReader(self.map.paths, lanes=lanes, direct_io=direct_io)
                undo.callback(self._reader.close)
                self.reader_note = self._reader.direct_io_note
                entry_bytes = {layer: self.map.entry_bytes(layer) for layer in self.map.moe_layers}
                cache = make_policy(policy, self.cache_bytes, entry_bytes)
                self.source = ExpertStreamSource(self.map, self._reader, cache)
                undo.callback(self.source.close)
            if trial:
                trial_load(self.map)
            self.recorder = Recorder(self.map, self.source)
            self.hook = RouterHook(self.recorder.on_routing)
            with InterruptGuard(self.hook.abort):
                self.model = NativeModel(
                    self.map,
                    self.hook,
                    n_ctx=n_ctx,
                    n_ubatch=n_ubatch,
                    threads=threads,
                    skip_experts=not resident,
                )
                undo.callback(self.model.close)
                captured = self._watch_routing()
                if self.source and self._reader:
                    self._bind(undo, captured, self._reader, dense)
            self._undo = undo.pop_all()

    def _watch_routing(self) -> GraphCapture:
        """Find the routing nodes, and where the weights are, from a graph that is not computed."""

        def show_graph() -> None:
            self.hook.abort.set()
            try:
                with llama_log.failure_expected():
                    self.model.decode([0], 0, [True])
            finally:
                self.hook.abort.clear()

        captured = self.hook.capture(show_graph)
        self.model.rewind(0)
        return captured

    def _bind(
        self,
        undo: contextlib.ExitStack,
        captured: GraphCapture,
        reader: FileReader,
        dense: Dense,
    ) -> None:
        if not captured.experts or self.source is None:
            raise StreamingRefusedError(
                f"{self.map.paths[0]}: the file holds experts, but the graph that llama.cpp "
                f"builds for {self.map.architecture} uses none, so there is nothing to stream."
            )
        self.source.bind(captured.experts)
        if dense == "anonymous":
            weights = DenseWeights(self.map, reader, captured.dense)
            undo.callback(weights.close)

    def graph(
        self,
        tokens: Sequence[int],
        position: int,
        outputs: Sequence[bool],
        *,
        turn: int,
        phase: str,
    ) -> None:
        """Run one graph; the recorder then knows its steps.

        Raises:
            KeyboardInterrupt: the abort flag ended it.
            ReadError: a file was changed since it was opened, or cannot be read.
            SessionError, LlamaError: see `NativeModel.decode`.
        """
        self._check_files()
        self.recorder.begin(turn, phase, position, outputs)
        whole = self.model.decode(tokens, position, outputs)
        self.recorder.end()
        self._check_files()
        if error := self.hook.error:
            raise error
        if not whole:
            raise KeyboardInterrupt
        if missed := self.hook.layers_missed():
            raise LlamaError(
                f"The routing of layer {min(missed)} did not reach labkit: something raised inside "
                "llama.cpp's callback (a signal handler?). The step was taken back."
            )

    def _check_files(self) -> None:
        """Weights that are read later must come from the file that was opened."""
        for path, stamp in zip(self.map.paths, self._stamps, strict=True):
            if _stamp(path) != stamp:
                raise ReadError(
                    f"{path}: the file was changed, replaced or removed after it was opened. "
                    "What was computed meanwhile was taken back. Open the model again."
                )

    def close(self) -> None:
        """Give everything back: what computes from memory and what reads into it, then memory."""
        self.model.close()
        if self._reader:
            self._reader.close()
        self._undo.close()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _cache_bytes(gguf: GGUFMap, cache_mib: float | None) -> int:
    if cache_mib is None:
        cache_bytes = default_cache_bytes(gguf)
    elif isinstance(cache_mib, (int, float)) and math.isfinite(cache_mib):
        cache_bytes = int(cache_mib * 2**20)
    else:
        raise OptionError(f"cache_mib is {cache_mib!r}; it must be a number of MiB")
    if warning := budget_warning(gguf, cache_bytes):
        warnings.warn(warning, BudgetWarning, stacklevel=4)
    return cache_bytes
