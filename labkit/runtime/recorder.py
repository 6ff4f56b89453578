"""`Recorder`: what happened in each graph, as a trace and as token steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from labkit.gguf_map import GGUFMap
from labkit.runtime.source import ExpertStreamSource
from labkit.runtime.steps import TokenStep
from labkit.runtime.text import TextStream
from labkit.trace import RouteTrace, RoutingBlock


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over graphs; the difference of two is what happened between them."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    manage_s: float = 0.0

    def __sub__(self, other: Totals) -> Totals:
        return Totals(
            self.hits - other.hits,
            self.misses - other.misses,
            self.bytes_read - other.bytes_read,
            self.read_s - other.read_s,
            self.manage_s - other.manage_s,
        )


@dataclass(frozen=True, slots=True)
class Mark:
    """A place to go back to when a batch is interrupted."""

    n_blocks: int
    n_tokens: int
    totals: Totals


class Recorder:
    """Receives each layer's routing, has its experts fetched, and notes both.

    Args:
        gguf: the model.
        source: None for a resident run, where every expert is always there.
    """

    def __init__(self, gguf: GGUFMap, source: ExpertStreamSource | None) -> None:
        self._gguf = gguf
        self._source = source
        self.totals = Totals()
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

    def begin(self, turn: int, phase: str, position: int, outputs: Sequence[bool]) -> None:
        """Call before a graph over `len(outputs)` tokens from `position` on."""
        self._turn, self._phase = turn, phase
        self._positions = np.arange(position, position + len(outputs))
        self._output_positions = self._positions[np.asarray(outputs, bool)]
        self._blocks: list[RoutingBlock] = []
        self._before = self.totals
        self._begin_s = time.perf_counter()

    def end(self) -> None:
        """Call when the graph is over."""
        self._wall_s = time.perf_counter() - self._begin_s

    def on_routing(self, layer: int, experts: np.ndarray, weights: np.ndarray) -> None:
        """One layer's choice over the batch; on return its experts are in memory."""
        if self._source is None:
            resident = np.ones(experts.shape, bool)
            read_bytes = np.zeros(experts.shape, np.int64)
        else:
            ids = experts.ravel()
            fetch = self._source.fetch(layer, ids.tolist())
            resident = _among(ids, fetch.hits).reshape(experts.shape)
            read_bytes = np.zeros(ids.shape, np.int64)
            if fetch.misses:
                missed, first = np.unique(ids, return_index=True)
                first = first[_among(missed, fetch.misses)]
                read_bytes[first] = self._gguf.entry_bytes(layer)
            read_bytes = read_bytes.reshape(experts.shape)
            self.totals = replace(
                self.totals,
                hits=self.totals.hits + len(fetch.hits),
                misses=self.totals.misses + len(fetch.misses),
                bytes_read=self.totals.bytes_read + fetch.read_bytes,
                read_s=self.totals.read_s + fetch.read_s,
                manage_s=self.totals.manage_s + fetch.manage_s,
            )
        block = RoutingBlock(
            self._turn, self._phase, layer, self._who(len(experts)),
            experts, weights, resident, read_bytes,
        )  # fmt: skip
        self._blocks.append(block)
        self.trace.append(block)

    def steps(self, tokens: Sequence[int], text: TextStream) -> list[TokenStep]:
        """A step for each token of the graph that just ended."""
        spent = self.totals - self._before
        result = []
        for position, token in zip(self._positions.tolist(), tokens, strict=True):
            rows = [
                (block, int(row[0]))
                for block in self._blocks
                if len(row := np.flatnonzero(block.positions == position))
            ]
            step = TokenStep(
                index=position,
                phase=self._phase,
                token=token,
                text=text.add(token),
                layers=np.array([block.layer for block, _ in rows], np.int32),
                experts=_stack([block.experts[row] for block, row in rows], np.int32),
                weights=_stack([block.weights[row] for block, row in rows], np.float32),
                hit=_stack([block.resident[row] for block, row in rows], np.bool_),
                wall_s=self._wall_s,
                read_s=spent.read_s,
                manage_s=spent.manage_s,
                bytes_read=spent.bytes_read,
                hits=spent.hits,
                misses=spent.misses,
            )
            result.append(step)
            self.trace.tokens.append((position, token, step.text))
        return result

    def mark(self) -> Mark:
        """Where the record stands now."""
        return Mark(self.trace.n_blocks, len(self.trace.tokens), self.totals)

    def rewind(self, mark: Mark) -> None:
        """Take back the routing since `mark`; what was read stays counted, for it was read."""
        self.trace.truncate(mark.n_blocks, mark.n_tokens)

    def totals_since(self, mark: Mark) -> Totals:
        """What happened since `mark`."""
        return self.totals - mark.totals

    def _who(self, n: int) -> np.ndarray:
        """Positions of a block's n tokens.

        Before its last layer llama.cpp drops the tokens whose logits nobody asked for.
        """
        if n == len(self._positions):
            return self._positions
        if n == len(self._output_positions):
            return self._output_positions
        return np.full(n, -1)


def _among(ids: np.ndarray, wanted: frozenset[int]) -> np.ndarray:
    return np.fromiter((int(i) in wanted for i in ids), bool, len(ids))


def _stack(rows: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.stack(rows) if rows else np.zeros((0, 0), dtype)
