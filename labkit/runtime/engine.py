"""`Engine`: an open model with everything that runs its graphs, before any conversation."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from labkit.errors import (
    LabkitError,
    LlamaError,
    OptionError,
    ReadError,
    StreamingRefusedError,
)
from labkit.gguf_map import GGUFMap, open_gguf
from labkit.runtime import llama_log
from labkit.runtime.budget import (
    BudgetWarning,
    budget_warning,
    default_cache_bytes,
    largest_cache_bytes,
)
from labkit.runtime.capture import GraphCapture
from labkit.runtime.dense import DenseWeights, warm_dense
from labkit.runtime.hook import RouterHook
from labkit.runtime.interrupt import InterruptGuard
from labkit.runtime.native import NativeModel
from labkit.runtime.recorder import Recorder
from labkit.runtime.streaming import Streaming
from labkit.runtime.trial import trial_load

Dense = Literal["anonymous", "warm", "mmap"]


class Engine:
    """A model, opened resident or streamed. See `Session` for the arguments and the errors.

    Attributes:
        map: what the file holds.
        streaming: brings experts; None in a resident run.
        model, hook, recorder: llama.cpp, its callback, and what the callback saw.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        resident: bool,
        cache_mib: float | str | None,
        policy: str,
        lanes: int,
        direct_io: bool | None,
        overlap: str,
        prefill: str,
        prefetch: str | None,
        hot_list: str | Path | None,
        dense: Dense,
        threads: int | None,
        n_ctx: int | None,
        n_ubatch: int,
        trial: bool,
    ) -> None:
        if dense not in get_args(Dense):
            raise OptionError(f"dense is {dense!r}; it must be 'anonymous', 'warm' or 'mmap'")
        self.map: GGUFMap = open_gguf(path)
        self._stamps = [_stamp(shard) for shard in self.map.paths]
        self.streaming: Streaming | None = None
        with contextlib.ExitStack() as undo:
            if not resident:
                self.map.require_streamable()
                self.streaming = Streaming(
                    self.map,
                    _cache_bytes(self.map, cache_mib),
                    policy=policy,
                    lanes=lanes,
                    direct_io=direct_io,
                    overlap=overlap,
                    prefill=prefill,
                    prefetch=prefetch,
                    hot_list=hot_list,
                )
                undo.callback(self.streaming.close)
            if trial:
                trial_load(self.map)
            source = self.streaming.source if self.streaming else None
            self.recorder = Recorder(self.map, source)
            self.hook = RouterHook(
                self.recorder.on_routing,
                self.recorder.on_weights,
                source.wait_for_down if source else None,
            )
            undo.callback(self.hook.close)
            if self.streaming:
                self.streaming.stop_graph_with(self.hook.abort.set)
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
                if self.streaming:
                    self._bind(undo, captured, self.streaming, dense)
            self._undo = undo.pop_all()
        self._maps_files = resident or dense != "anonymous"

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
        streaming: Streaming,
        dense: Dense,
    ) -> None:
        if not captured.experts:
            raise StreamingRefusedError(
                f"{self.map.paths[0]}: the file holds experts, but the graph that llama.cpp "
                f"builds for {self.map.architecture} uses none, so there is nothing to stream."
            )
        streaming.bind(captured.experts, captured.down_nodes.values())
        if dense == "anonymous":
            weights = DenseWeights(self.map, streaming.reader, captured.dense)
            undo.callback(weights.close)
        elif dense == "warm":
            warm_dense(self.map, captured.dense)
        streaming.look_ahead(captured, lambda: self.hook.router_logits)

    def graph(
        self,
        tokens: Sequence[int],
        position: int,
        outputs: Sequence[bool],
        *,
        turn: int,
        phase: str,
        n_left: int = 0,
    ) -> bool:
        """Run one graph; the recorder then knows its steps.

        Args:
            n_left: tokens of the same prompt that other graphs will take.

        Returns:
            False if the abort flag ended it.

        Raises:
            ReadError: a file was changed since it was opened, or cannot be read.
            SessionError, LlamaError: see `NativeModel.decode`.
        """
        self._check_files()
        whole = self._decode(tokens, position, outputs, turn, phase, n_left)
        self.recorder.end()
        if self._maps_files or self.recorder.bytes_read:
            self._check_files()
        if error := self.hook.error:
            raise error
        missed = self.streaming.source.orphaned if self.streaming else set()
        if missed := missed or self.hook.missed:
            raise LlamaError(
                f"The routing of layer {min(missed)} did not reach labkit: something raised inside "
                "llama.cpp's callback (a signal handler?). The step was taken back."
            )
        if whole:
            self.recorder.keep()
            if self.streaming and phase == "decode":
                self.streaming.overlap.note_token(self.recorder.wall_s, self.recorder.bytes_read)
        return whole

    def _decode(
        self,
        tokens: Sequence[int],
        position: int,
        outputs: Sequence[bool],
        turn: int,
        phase: str,
        n_left: int,
    ) -> bool:
        streaming = self.streaming
        path = streaming.begin_graph(phase, len(tokens), n_left) if streaming else "resident"
        self.hook.stop_before_down = bool(streaming and streaming.overlap.current == "pipeline")
        fetch = streaming.fetch if streaming else None
        self.recorder.begin(turn, phase, position, outputs, path=path, fetch=fetch)
        try:
            whole = self.model.decode(tokens, position, outputs)
        except LabkitError:
            self._settle(whole=False, n_left=n_left)
            raise
        self._settle(whole=whole, n_left=n_left)
        return whole

    def _settle(self, *, whole: bool, n_left: int) -> None:
        """No read that the graph asked for is left, unless a fault left who reads half done."""
        if (fault := self.hook.error) and not isinstance(fault, LabkitError):
            raise fault
        if self.streaming:
            self.streaming.end_graph(whole=whole, n_left=n_left)

    def forget_prompt(self) -> None:
        """The graphs that were to follow the last one will not."""
        if self.streaming:
            self.streaming.leave_layers()

    def _check_files(self) -> None:
        """Weights that are read later must come from the file that was opened."""
        for path, stamp in zip(self.map.paths, self._stamps, strict=True):
            if _stamp(path) != stamp:
                raise ReadError(
                    f"{path}: the file was changed, replaced or removed after it was opened. "
                    "What was computed meanwhile was taken back. Open the model again."
                )

    def close(self) -> None:
        """Give everything back: what computes from memory, then what reads into it, and memory."""
        self.model.close()
        self._undo.close()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _cache_bytes(gguf: GGUFMap, cache_mib: float | str | None) -> int:
    if cache_mib is None:
        cache_bytes = default_cache_bytes(gguf)
    elif cache_mib == "auto":
        cache_bytes = largest_cache_bytes(gguf)
    elif isinstance(cache_mib, (int, float)) and math.isfinite(cache_mib):
        cache_bytes = int(cache_mib * 2**20)
    else:
        raise OptionError(f"cache_mib is {cache_mib!r}; it must be a number of MiB or 'auto'")
    if warning := budget_warning(gguf, cache_bytes):
        warnings.warn(warning, BudgetWarning, stacklevel=4)
    return cache_bytes
