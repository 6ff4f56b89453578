"""`GraphRecord`: the routing of one graph, as it came, and as tables and steps want it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from labkit.policy.base import Entry
from labkit.trace import RoutingBlock, routing_rows


class GraphRecord:
    """What each layer chose in one graph, and what had to be read for it.

    While the graph runs, `choose` and `weigh` only note: it waits for them. The rest is worked out
    when somebody looks.

    Args:
        turn, phase: as in the trace.
        position: of the batch's first token.
        outputs: for each token of the batch, whether its logits are wanted.
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
        """A layer chose `experts` (n_tokens, k); of them `missing` were not resident."""
        self._choices.append((layer, experts, missing))

    def weigh(self, weights: np.ndarray) -> None:
        """The weights (n_tokens, k) of the layer that chose last."""
        self._weights.append(weights)

    def table(self) -> pd.DataFrame:
        """Rows of the trace, as `RoutingBlock.table` gives them for a layer."""
        if len(self._outputs) == 1:
            layers, experts, weights, hit = self._single()
            entry_bytes = np.array([self._entry_bytes[layer] for layer in layers.tolist()])
            read_bytes = np.where(hit, 0, entry_bytes[:, None])
            steps = np.array(self.position)
            return routing_rows(
                self.turn, self.phase, steps, layers, experts, weights, hit, read_bytes
            )
        return pd.concat([block.table() for block in self.blocks()], ignore_index=True)

    def blocks(self) -> list[RoutingBlock]:
        """A block for each layer that routed, in the graph's order."""
        if self._blocks is None:
            self._blocks = [*self._make_blocks()]
        return self._blocks

    def __bool__(self) -> bool:
        """Whether anything was routed."""
        return bool(self._choices)

    def routing_of(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The routing of the batch's token `index`.

        Returns:
            layers (L,), experts (L, k), weights (L, k), whether each was resident (L, k).
        """
        if len(self._outputs) == 1:
            return self._single()
        rows = []
        for block in self.blocks():
            found = np.flatnonzero(block.positions == self.position + index)
            if len(found):
                rows.append((block, int(found[0])))
        return (
            np.array([block.layer for block, _ in rows], np.int32),
            _stack([block.experts[row] for block, row in rows], np.int32),
            _stack([block.weights[row] for block, row in rows], np.float32),
            _stack([block.resident[row] for block, row in rows], np.bool_),
        )

    def _single(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """`routing_of` the only token, without a block for each layer."""
        choices = self._choices
        if not choices:
            nothing = np.zeros((0, 0))
            return (
                np.zeros(0, np.int32),
                nothing.astype(np.int32),
                nothing.astype(np.float32),
                nothing.astype(np.bool_),
            )
        experts = np.concatenate([choice[1] for choice in choices])
        hit = np.ones(experts.shape, np.bool_)
        for row, (_, _, missing) in enumerate(choices):
            if missing:
                hit[row] = ~np.isin(experts[row], [expert for _, expert in missing])
        layers = np.fromiter((choice[0] for choice in choices), np.int32, len(choices))
        return layers, experts, np.concatenate(self._weights), hit

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


def _stack(rows: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.stack(rows) if rows else np.zeros((0, 0), dtype)
