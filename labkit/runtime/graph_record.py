"""The routing of one graph, noted as it comes, and then as traces and steps want it.

Compute waits while a layer's choice is noted, so `choose` and `weigh` only copy. The rest is worked
out when somebody looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import pandas as pd

from labkit.policy.base import Entry
from labkit.trace import RoutingBlock, routing_rows

Routing = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""A token's layers (L,), experts (L, k), weights (L, k), whether each was resident (L, k)"""


class GraphRecord(Protocol):
    """The routing of a graph.

    Attributes:
        turn, phase: as in the trace.
        position: of the first token.
    """

    turn: int
    phase: str
    position: int

    def choose(self, layer: int, experts: np.ndarray, missing: Sequence[Entry]) -> None:
        """A layer chose `experts` (n_tokens, k), copied here; `missing` were not resident."""
        ...

    def weigh(self, weights: np.ndarray) -> None:
        """The weights (n_tokens, k), copied here, of the layer that chose last."""
        ...

    def routing_of(self, index: int) -> Routing:
        """The routing of the graph's token `index`."""
        ...

    def table(self) -> pd.DataFrame:
        """Rows of the trace, as `RoutingBlock.table` gives them for a layer."""
        ...

    def __bool__(self) -> bool:
        """Whether anything was routed."""
        ...


class TokenRecord:
    """A `GraphRecord` of a single token, of which every layer chooses equally many experts.

    Args:
        entry_bytes: bytes of an expert entry, by each layer that may route.
    """

    def __init__(self, turn: int, phase: str, position: int, entry_bytes: dict[int, int]) -> None:
        self.turn, self.phase, self.position = turn, phase, position
        self._entry_bytes = entry_bytes
        self._layers: list[int] = []
        self._experts = np.empty((0, 0), np.int32)
        self._weights = np.empty((0, 0), np.float32)
        self._missing: list[tuple[int, Sequence[Entry]]] = []

    def choose(self, layer: int, experts: np.ndarray, missing: Sequence[Entry]) -> None:
        """See `GraphRecord`."""
        row = len(self._layers)
        if row == 0:
            shape = len(self._entry_bytes), experts.shape[1]
            self._experts = np.empty(shape, np.int32)
            self._weights = np.empty(shape, np.float32)
        if missing:
            self._missing.append((row, missing))
        self._experts[row] = experts
        self._layers.append(layer)

    def weigh(self, weights: np.ndarray) -> None:
        """See `GraphRecord`."""
        self._weights[len(self._layers) - 1] = weights

    def routing_of(self, index: int) -> Routing:
        """See `GraphRecord`."""
        assert index == 0
        n = len(self._layers)
        experts = self._experts[:n]
        hit = np.ones(experts.shape, np.bool_)
        for row, missing in self._missing:
            hit[row] = ~np.isin(experts[row], [expert for _, expert in missing])
        return np.array(self._layers, np.int32), experts, self._weights[:n], hit

    def table(self) -> pd.DataFrame:
        """See `GraphRecord`."""
        layers, experts, weights, hit = self.routing_of(0)
        entry_bytes = np.array([self._entry_bytes[layer] for layer in self._layers])
        read_bytes = np.where(hit, 0, entry_bytes[:, None])
        steps = np.array(self.position)
        return routing_rows(self.turn, self.phase, steps, layers, experts, weights, hit, read_bytes)

    def __bool__(self) -> bool:
        return bool(self._layers)


class BatchRecord:
    """A `GraphRecord` of many tokens, which not every layer may route.

    Args:
        outputs: for each token, whether its logits are wanted.
        entry_bytes: bytes of an expert entry, by layer.
    """

    def __init__(
        self,
        turn: int,
        phase: str,
        position: int,
        outputs: Sequence[bool],
        entry_bytes: dict[int, int],
    ) -> None:
        self.turn, self.phase, self.position = turn, phase, position
        self._outputs = outputs
        self._entry_bytes = entry_bytes
        self._choices: list[tuple[int, np.ndarray, Sequence[Entry]]] = []
        self._weights: list[np.ndarray] = []
        self._blocks: list[RoutingBlock] | None = None

    def choose(self, layer: int, experts: np.ndarray, missing: Sequence[Entry]) -> None:
        """See `GraphRecord`."""
        self._choices.append((layer, experts.copy(), missing))

    def weigh(self, weights: np.ndarray) -> None:
        """See `GraphRecord`."""
        self._weights.append(weights.copy())

    def routing_of(self, index: int) -> Routing:
        """See `GraphRecord`."""
        rows = []
        for block in self.blocks():
            found = np.flatnonzero(block.positions == self.position + index)
            if len(found):
                rows.append((block, int(found[0])))
        return (
            np.array([block.layer for block, _ in rows], np.int32),
            _stack([block.experts[row] for block, row in rows], np.int32, -1),
            _stack([block.weights[row] for block, row in rows], np.float32, np.nan),
            _stack([block.resident[row] for block, row in rows], np.bool_, True),
        )

    def table(self) -> pd.DataFrame:
        """See `GraphRecord`."""
        return pd.concat([block.table() for block in self.blocks()], ignore_index=True)

    def blocks(self) -> list[RoutingBlock]:
        """A block for each layer that routed, in the graph's order."""
        if self._blocks is None:
            self._blocks = [*self._make_blocks()]
        return self._blocks

    def __bool__(self) -> bool:
        return bool(self._choices)

    def _make_blocks(self) -> Iterator[RoutingBlock]:
        positions = np.arange(self.position, self.position + len(self._outputs))
        with_logits = positions[np.asarray(self._outputs, bool)]
        for (layer, experts, missing), weights in zip(self._choices, self._weights, strict=True):
            n = len(experts)
            # Before its last layer llama.cpp drops the tokens whose logits nobody asked for.
            who = next((p for p in (positions, with_logits) if len(p) == n), np.full(n, -1))
            resident = np.ones(experts.shape, bool)
            read_bytes = np.zeros(experts.shape, np.int64)
            if missing:
                missed = np.fromiter((expert for _, expert in missing), np.int32)
                resident = ~np.isin(experts, missed)
                distinct, first = np.unique(experts, return_index=True)
                first = first[np.isin(distinct, missed)]
                read_bytes.reshape(-1)[first] = self._entry_bytes[layer]
            yield RoutingBlock(
                self.turn, self.phase, layer, who, experts, weights, resident, read_bytes
            )


def _stack(rows: list[np.ndarray], dtype: type, fill: float) -> np.ndarray:
    """Rows one above the other; those of layers that choose fewer experts end in `fill`."""
    k = max(map(len, rows), default=0)
    stacked = np.full((len(rows), k), fill, dtype)
    for row, values in enumerate(rows):
        stacked[row, : len(values)] = values
    return stacked
