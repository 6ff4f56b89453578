"""`Recorder`: what happened in each graph, as a trace and as token steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.gguf_map import GGUFMap
from labkit.policy.base import Entry
from labkit.runtime.graph_record import BatchRecord, GraphRecord, TokenRecord
from labkit.runtime.source import ExpertStreamSource
from labkit.runtime.steps import Path, TokenStep
from labkit.runtime.text import TextStream
from labkit.runtime.totals import Totals
from labkit.runtime.usage import usage
from labkit.trace import RouteTrace


@dataclass(frozen=True, slots=True)
class Mark:
    """A place to go back to when a batch is interrupted."""

    n_blocks: int
    n_tokens: int
    totals: Totals


Fetch = Callable[[int, np.ndarray], Sequence[Entry]]
"""(layer, experts (n_tokens, k)) -> the entries that had to be read for them"""


class Recorder:
    """Receives each layer's routing, has its experts fetched, and notes both.

    Args:
        gguf: the model.
        source: None for a resident run, where every expert is always there.

    Attributes:
        trace: the routing since opening or `restart`.
        totals: what the source has done.
        wall_s: wall time of the graph that just ended.
    """

    def __init__(self, gguf: GGUFMap, source: ExpertStreamSource | None) -> None:
        self._gguf = gguf
        self._source = source
        self.totals = source.totals if source else Totals()
        uses = {gguf.experts_used(layer) for layer in gguf.moe_layers}
        self._layers_are_alike = len(uses) <= 1
        self.restart()

    def restart(self) -> None:
        """Begin an empty trace."""
        gguf = self._gguf
        dense: dict[int, int] = {}
        experts = {part.tensor.name for part in gguf.expert_tensors}
        for tensor in gguf.tensors:
            prefix, _, rest = tensor.name.partition("blk.")
            layer = rest.partition(".")[0]
            if not prefix and layer.isdecimal() and tensor.name not in experts:
                dense[int(layer)] = dense.get(int(layer), 0) + tensor.nbytes
        self.trace = RouteTrace(
            model=str(gguf.paths[0]),
            architecture=gguf.architecture,
            n_layers=gguf.n_layers,
            n_expert=gguf.n_expert,
            n_expert_used=gguf.n_expert_used,
            entry_bytes={layer: gguf.entry_bytes(layer) for layer in gguf.moe_layers},
            dense_bytes=dense,
        )

    def begin(
        self,
        turn: int,
        phase: str,
        position: int,
        outputs: Sequence[bool],
        *,
        path: Path,
        fetch: Fetch | None,
    ) -> None:
        """Call before a graph over `len(outputs)` tokens from `position` on.

        `fetch` is called with each layer's choice, before its experts are used; None where they
        are all there.
        """
        self._fetch = fetch
        self._path: Path = path
        entry_bytes = self.trace.entry_bytes
        self._record: GraphRecord
        # A token without an output is not routed by the last layer.
        if len(outputs) == 1 and outputs[0] and self._layers_are_alike:
            self._record = TokenRecord(turn, phase, position, entry_bytes)
        else:
            self._record = BatchRecord(turn, phase, position, outputs, entry_bytes)
        self._before = self.totals.copy()
        self._used_before = usage()
        self._begin_s = time.perf_counter()

    def on_routing(self, layer: int, experts: np.ndarray) -> None:
        """One layer's choice over the batch; on return compute may begin."""
        missing = self._fetch(layer, experts) if self._fetch else ()
        self._record.choose(layer, experts, missing)

    def on_weights(self, _layer: int, weights: np.ndarray) -> None:
        """The weights of the layer that has just chosen."""
        self._record.weigh(weights)

    def end(self) -> None:
        """Call when the graph is over."""
        self.wall_s = time.perf_counter() - self._begin_s
        self._used_after = usage()

    def keep(self) -> None:
        """The graph that just ended is whole: put its routing in the trace."""
        if self._record:
            self.trace.append(self._record)

    @property
    def bytes_read(self) -> int:
        """Bytes that the graph which just ended read."""
        return self.totals.bytes_read - self._before.bytes_read

    def steps(self, tokens: Sequence[int], text: TextStream) -> list[TokenStep]:
        """A step for each token of the graph that just ended."""
        spent = self.totals - self._before
        before, after = self._used_before, self._used_after
        resident_bytes = self._source.policy.resident_bytes if self._source else None
        found = []
        for index, token in enumerate(tokens):
            layers, experts, weights, hit = self._record.routing_of(index)
            step = TokenStep(
                index=self._record.position + index,
                phase=self._record.phase,
                token=token,
                text=text.add(token),
                layers=layers,
                experts=experts,
                weights=weights,
                hit=hit,
                path=self._path,
                wall_s=self.wall_s,
                read_s=spent.read_s,
                wait_s=spent.wait_s,
                manage_s=spent.manage_s,
                cpu_s=after.cpu_s - before.cpu_s,
                major_faults=_difference(after.major_faults, before.major_faults),
                energy_j=_difference(after.energy_j, before.energy_j),
                bytes_read=spent.bytes_read,
                prefetch_bytes=spent.prefetch_bytes,
                hits=spent.hits,
                prefetch_hits=spent.prefetch_hits,
                misses=spent.misses,
                resident_bytes=resident_bytes,
            )
            self.trace.tokens.append((self._record.turn, step.index, token, step.text))
            found.append(step)
        return found

    def mark(self) -> Mark:
        """Where the record stands now."""
        return Mark(self.trace.n_blocks, len(self.trace.tokens), self.totals.copy())

    def rewind(self, mark: Mark) -> None:
        """Take back the routing since `mark`; what was read stays counted, for it was read."""
        self.trace.truncate(mark.n_blocks, mark.n_tokens)

    def totals_since(self, mark: Mark) -> Totals:
        """What happened since `mark`."""
        return self.totals - mark.totals


def _difference(after: Any, before: Any) -> Any:
    return None if after is None or before is None else after - before
