"""The table of a routing trace: its columns, the rows of a batch, and their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd

PHASES = ("prefill", "decode")
COLUMNS = (
    "turn", "phase", "step", "layer", "slot", "expert", "weight", "resident", "read_bytes",
)  # fmt: skip


class Routing(Protocol):
    """What a trace is made of: the routing of a batch, in one layer or in all."""

    def table(self) -> pd.DataFrame:
        """One row per token and slot, with `COLUMNS`; `phase` is an index into `PHASES`."""
        ...


@dataclass(frozen=True, slots=True)
class RoutingBlock:
    """The routing of one layer over one batch of n tokens.

    Attributes:
        turn, phase, layer: as in the table.
        positions: (n,) context positions.
        experts: (n, k) chosen ids in slot order.
        weights: (n, k) applied routing weights; NaN where the graph shows none.
        resident: (n, k) whether the entry was there before this batch asked.
        read_bytes: (n, k) bytes of the entry on the row that caused its read, else 0.
    """

    turn: int
    phase: str
    layer: int
    positions: np.ndarray
    experts: np.ndarray
    weights: np.ndarray
    resident: np.ndarray
    read_bytes: np.ndarray

    def table(self) -> pd.DataFrame:
        """One row per token and slot, with `COLUMNS`."""
        return routing_rows(
            self.turn, self.phase, self.positions, self.layer,
            self.experts, self.weights, self.resident, self.read_bytes,
        )  # fmt: skip


def routing_rows(
    turn: int,
    phase: str,
    steps: np.ndarray,
    layers: np.ndarray | int,
    experts: np.ndarray,
    weights: np.ndarray,
    resident: np.ndarray,
    read_bytes: np.ndarray,
) -> pd.DataFrame:
    """A table with `COLUMNS`, a row per element of `experts` (n, k) and its like.

    `steps` and `layers` are (n,), or one for all n.
    """
    n, k = experts.shape
    return pd.DataFrame(
        {
            "turn": np.full(n * k, turn, np.int32),
            "phase": np.full(n * k, PHASES.index(phase), np.int8),
            "step": np.repeat(np.broadcast_to(steps, n), k).astype(np.int32),
            "layer": np.repeat(np.broadcast_to(layers, n), k).astype(np.int32),
            "slot": np.tile(np.arange(k, dtype=np.int32), n),
            "expert": experts.ravel(),
            "weight": weights.ravel(),
            "resident": resident.ravel(),
            "read_bytes": read_bytes.ravel(),
        }
    )


def empty_table() -> pd.DataFrame:
    """No rows, `phase` as a number."""
    one = np.zeros((0, 1), np.int64)
    return RoutingBlock(0, "decode", 0, one[:, 0], one, one * 1.0, one == 0, one).table()


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `table`, whose `phase` is a number, sorted and with `COLUMNS`."""
    keys = [table[name].to_numpy() for name in ("slot", "layer", "step", "phase", "turn")]
    tie = np.ones(max(len(table) - 1, 0), bool)
    falls = ~tie
    for key in reversed(keys):  # from turn to slot: sorted rows, the usual case, stay as they are
        falls |= tie & (key[1:] < key[:-1])
        tie &= key[1:] == key[:-1]
    if falls.any():
        table = table.iloc[np.lexsort(keys)]
    table = table.copy(deep=False)
    kind = pd.CategoricalDtype(list(PHASES))
    table["phase"] = pd.Categorical.from_codes(table["phase"].to_numpy(), dtype=kind)
    return table.reset_index(drop=True).loc[:, list(COLUMNS)]
