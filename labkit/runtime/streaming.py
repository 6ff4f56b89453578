"""`Streaming`: everything between a model's files and the memory that it computes from."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path as FilePath
from typing import Literal

import numpy as np

from labkit.errors import BudgetError, LabkitError, OptionError, ResourceError, SessionError
from labkit.gguf_map import GGUFMap
from labkit.policy import make_policy
from labkit.policy.base import Entry
from labkit.runtime.budget import MIB
from labkit.runtime.capture import GraphCapture
from labkit.runtime.expert_memory import ExpertMemory
from labkit.runtime.hot_list import HotList
from labkit.runtime.lookahead import Lookahead, PreviousToken
from labkit.runtime.next_router import NextRouter
from labkit.runtime.overlap import OverlapTrial
from labkit.runtime.prefill import PrefillPath
from labkit.runtime.reader import FileReader
from labkit.runtime.source import ExpertStreamSource, Overlap
from labkit.runtime.steps import Path
from labkit.runtime.userfault import UserFault

Prefill = Literal["auto", "experts", "layers"]
Prefetch = Literal["previous", "router"] | None


class Streaming:
    """The reader, the expert cache and the two slots of one open model.

    Args:
        gguf: the model's map; `require_streamable` has passed.
        cache_bytes: the budget for expert weights.
        policy, lanes, direct_io, overlap, prefill, prefetch, hot_list: as for `Session`.

    Attributes:
        source: the expert cache.
        overlap: how its reads overlap with compute.
        layers: the two slots, once bound.
        lookahead: what foretells choices; None without prefetch.

    Raises:
        OptionError, ReadError, BudgetError, ResourceError.
    """

    def __init__(
        self,
        gguf: GGUFMap,
        cache_bytes: int,
        *,
        policy: str,
        lanes: int,
        direct_io: bool | None,
        overlap: str,
        prefill: str,
        prefetch: str | None,
        hot_list: str | FilePath | None = None,
    ) -> None:
        if prefill not in ("auto", "experts", "layers"):
            raise OptionError(f"prefill is {prefill!r}; it must be auto, experts or layers")
        if prefetch not in (None, "previous", "router"):
            raise OptionError(f"prefetch is {prefetch!r}; it must be None, 'previous' or 'router'")
        # Each expert is then read once, and nothing has to be watched for it to come again.
        holds_all = cache_bytes >= gguf.expert_bytes
        self.overlap = OverlapTrial(overlap, may_watch=not holds_all)
        self.cache_bytes = cache_bytes
        self._gguf = gguf
        self._prefill = prefill
        self._prefetch = prefetch
        self._hot_list = None if hot_list is None else HotList(hot_list, gguf)
        self.lookahead: Lookahead | None = None
        if prefetch == "previous":
            self.lookahead = Lookahead(gguf.moe_layers, PreviousToken(gguf.moe_layers))
        self.layers: PrefillPath | None = None
        self._path: Path = "cache"
        self._addresses: dict[str, int] = {}
        with contextlib.ExitStack() as undo:
            self.reader = FileReader(gguf.paths, lanes=lanes, direct_io=direct_io)
            undo.callback(self.reader.close)
            self._memory = _make_memory(gguf, self.overlap.uses_userfault, holds_all)
            undo.callback(self._memory.close)
            self._memory.watch(self.overlap.current == "userfaultfd")
            entry_bytes = {layer: gguf.entry_bytes(layer) for layer in gguf.moe_layers}
            cache = make_policy(policy, cache_bytes, entry_bytes)
            self.source = ExpertStreamSource(gguf, self.reader, cache, self._memory)
            undo.pop_all()

    def bind(self, addresses: dict[str, int], down_stops: Iterable[int]) -> None:
        """Have llama.cpp's expert tensors, by name, compute from here.

        Args:
            addresses: where llama.cpp's tensors are.
            down_stops: layers in which a graph can stop again before the down projections.

        Raises:
            BudgetError: whole layers were asked for, and two of them exceed the budget.
        """
        self._addresses = addresses
        self.source.down_stops = frozenset(down_stops)
        self._memory.bind(addresses)
        self.layers = PrefillPath(self._gguf, self.reader, addresses, self.source.totals)
        if self._prefill == "layers" and self.layers.nbytes > self.cache_bytes:
            raise BudgetError(
                f"prefill='layers' needs two whole layers of experts, "
                f"{self.layers.nbytes / MIB:.1f} MiB, and the budget is "
                f"{self.cache_bytes / MIB:.1f} MiB. Give a larger cache_mib, or prefill='experts'."
            )

    def look_ahead(self, captured: GraphCapture, logits_node: Callable[[], int]) -> None:
        """Prepare to read ahead, and begin with what earlier sessions used most.

        Args:
            captured: a graph of one token, the last that was built.
            logits_node: while `fetch` runs, the address of the layer's router logits node.

        Raises:
            OptionError: no choice of this model's can be foretold in the way asked for.
        """
        if self._prefetch == "router":
            router = NextRouter(self._gguf, captured, logits_node)
            self.lookahead = Lookahead(self._gguf.moe_layers, router)
        if self._hot_list:
            self.source.preload(self._hot_list.hottest())

    def stop_graph_with(self, stop: Callable[[], None]) -> None:
        """`stop` is called, on any thread, when the graph that runs must not go on."""
        self.reader.on_error = lambda _: stop()
        self._memory.on_orphan = stop
        self._memory.look_for_stuck = self.reader.look_for_stuck

    def begin_graph(self, phase: str, n_tokens: int, n_left: int) -> Path:
        """Make ready for a graph; `n_left` tokens of the same prompt will follow in others.

        Raises:
            SessionError: an earlier read did not end.
        """
        if self.reader.stuck:
            raise SessionError(
                "A read of this session did not end, so its memory is in doubt. Close it and open "
                f"the model again. {self.reader.stuck}"
            )
        self._overlap_by(self.overlap.current)
        if phase == "prefill" and self._by_layers(n_tokens):
            assert self.layers
            if self._path != "layers":
                self.source.make_room(self.cache_bytes - self.layers.nbytes)
            self._path = "layers"
            self.layers.begin(more=self._by_layers(min(n_tokens, n_left)))
        else:
            self.leave_layers()
        return self._path

    def _overlap_by(self, way: Overlap) -> None:
        self.source.overlap = way
        watched = way == "userfaultfd"
        if watched != self._memory.is_watched:
            self.source.finish_reads()
            self._memory.watch(watched)

    def fetch(self, layer: int, experts: np.ndarray) -> Sequence[Entry]:
        """A layer has chosen; returns when it may compute. Entries that had to be read.

        What is raised but no error of labkit may have come between two lines that belong together.
        """
        try:
            return self._fetch(layer, experts)
        except LabkitError:
            raise
        except BaseException:
            self._memory.let_sleepers_go()
            raise

    def _fetch(self, layer: int, experts: np.ndarray) -> Sequence[Entry]:
        if self._hot_list:
            self._hot_list.note(layer, experts)
        if self._path == "layers":
            assert self.layers
            self.layers.at_layer(layer)
            return [(layer, expert) for expert in np.unique(experts).tolist()]
        chosen = experts.ravel().tolist()
        if not self.lookahead and self.source.has_all(layer, chosen):
            return ()
        lookup = self.source.request(layer, chosen)
        if self.lookahead and len(experts) == 1:
            self._read_ahead(self.lookahead, layer, chosen)
        self.source.wait(layer, lookup)
        return lookup.misses

    def _read_ahead(self, lookahead: Lookahead, layer: int, chosen: list[int]) -> None:
        """Start to read what the next layer may choose and is not there."""
        begin = time.perf_counter()
        coming, predicted = lookahead.after(layer, chosen)
        self.source.totals.manage_s += time.perf_counter() - begin
        if predicted:
            self.source.prefetch(coming, predicted, [(layer, expert) for expert in chosen])

    def end_graph(self, *, whole: bool, n_left: int) -> None:
        """Call after each graph, whatever became of it. Raises ReadError."""
        if self._path == "layers":
            assert self.layers
            self.layers.end(whole=whole)
            if not whole or not n_left:
                self.leave_layers()
        self.source.settle()

    def close(self) -> None:
        """Give everything back. The model that computed from here is freed before."""
        self.source.stop_reading_ahead()
        if not self.reader.close():
            warnings.warn(
                "A read is still stuck in the system, so its memory is not given back.",
                stacklevel=3,
            )
            return
        if self.layers:
            self.layers.close()
        self._memory.close()
        if self._hot_list:
            self._hot_list.save()

    def _by_layers(self, n_tokens: int) -> bool:
        """Whether a batch so wide streams whole layers: it then uses most experts.

        Reading the others pays once an expert is chosen four times on average, even where a third
        goes unused because experts are unevenly popular (tests/bench/prefill_limit.py).
        """
        if self._prefill == "experts" or self.layers is None or n_tokens < 1:
            return False
        if self._prefill == "layers":
            return n_tokens > 1
        gguf = self._gguf
        uses = min(gguf.experts_used(layer) for layer in gguf.moe_layers)
        wide = n_tokens * uses >= 4 * gguf.n_expert
        return wide and self.layers.nbytes <= self.cache_bytes

    def leave_layers(self) -> None:
        """Experts come through the cache again; the two slots' memory goes back."""
        if self._path == "layers" and self.layers:
            self._path = "cache"
            self.layers.release()
            self._memory.bind(self._addresses)


def _make_memory(gguf: GGUFMap, with_userfault: bool, holds_all: bool) -> ExpertMemory:
    with contextlib.ExitStack() as undo:
        try:
            userfault = UserFault() if with_userfault else None
            if userfault:
                undo.callback(userfault.close)
            memory = ExpertMemory(gguf, userfault, huge=holds_all and not with_userfault)
        except OSError as error:
            raise ResourceError(
                f"The system does not let compute sleep on memory: {error}. Look at `ulimit -n` "
                "and vm.max_map_count, or open the model with overlap='pipeline'."
            ) from error
        undo.pop_all()
    return memory
