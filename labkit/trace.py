"""`RouteTrace`: which experts each token chose, layer by layer, and what was resident.

It reads and writes the `route_trace v1` CSV of BigMoeOnEdge, whose columns are found by name, and
Parquet. A row is one choice: (turn, phase, step, layer, slot) is unique, `step` is the token's
position in the context, slot 0 is the router's first choice. In prefill many tokens of a batch can
choose an entry that is read once: every such row says that it was not resident, and only the first
carries the bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd

from labkit.errors import TraceError
from labkit.trace_csv import TraceWarning, parse_rows, read_lines

__all__ = ["COLUMNS", "PHASES", "RouteTrace", "RoutingBlock", "TraceWarning"]

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


@dataclass
class RouteTrace:
    """Routing of one run, with the facts of its model that an analysis needs.

    Attributes:
        model, architecture, n_layers, n_expert, n_expert_used: of the model; "" and 0 if unknown.
        entry_bytes: bytes of an expert entry, by MoE layer.
        dense_bytes: bytes of a layer's other weights, by layer.
        tokens: (step, token id, text) of every token, where the run knew them.
    """

    model: str = ""
    architecture: str = ""
    n_layers: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    entry_bytes: dict[int, int] = field(default_factory=dict)
    dense_bytes: dict[int, int] = field(default_factory=dict)
    tokens: list[tuple[int, int, str]] = field(default_factory=list)
    _blocks: list[Routing] = field(default_factory=list, repr=False)
    _loaded: pd.DataFrame | None = field(default=None, repr=False)
    _version: int = field(default=0, repr=False)
    _table: tuple[int, pd.DataFrame] | None = field(default=None, repr=False)

    def append(self, block: Routing) -> None:
        """Add the routing of a batch."""
        self._blocks.append(block)
        self._version += 1

    def truncate(self, n_blocks: int, n_tokens: int) -> None:
        """Take back what an interrupted batch had added."""
        del self._blocks[n_blocks:]
        del self.tokens[n_tokens:]
        self._version += 1

    @property
    def n_blocks(self) -> int:
        """How many batches were added live."""
        return len(self._blocks)

    @property
    def table(self) -> pd.DataFrame:
        """All rows, sorted by turn, phase, step, layer, slot; columns as in `COLUMNS`.

        `phase` is categorical ("prefill", "decode").
        """
        # Another thread may append meanwhile: the table is kept with the version that it shows.
        version, kept = self._version, self._table
        if kept is None or kept[0] != version:
            parts = [block.table() for block in list(self._blocks)]
            if self._loaded is not None:
                codes = self._loaded["phase"].cat.codes
                parts.insert(0, self._loaded.assign(phase=codes))
            table = _finish(pd.concat(parts, ignore_index=True) if parts else _empty())
            self._table = kept = (version, table)
        return kept[1]

    def select(
        self,
        *,
        phase: str | None = None,
        layers: Iterable[int] | None = None,
        turns: Iterable[int] | None = None,
    ) -> RouteTrace:
        """The part of this trace that has all that is asked for, with the same facts of its model.

        Raises:
            ValueError: `phase` is neither "prefill" nor "decode".
        """
        table = self.table
        chosen = np.ones(len(table), bool)
        if phase is not None:
            chosen &= table["phase"].cat.codes.to_numpy() == PHASES.index(phase)
        for name, wanted in (("layer", layers), ("turn", turns)):
            if wanted is not None:
                chosen &= table[name].isin(list(wanted)).to_numpy()
        part = replace(self, _blocks=[], _table=None)
        part._loaded = table[chosen].reset_index(drop=True)
        return part

    @classmethod
    def concat(cls, traces: Iterable[RouteTrace]) -> RouteTrace:
        """One trace after another, as runs of one model: the turns go on counting.

        Raises:
            TraceError: none given, or traces of models of different shape.
        """
        parts = list(traces)
        if not parts:
            raise TraceError("There is no trace to concatenate.")
        whole = replace(parts[0], tokens=[], _blocks=[], _table=None)
        tables, turn = [], 0
        for part in parts:
            shape, own = [(t.n_layers, t.n_expert, t.entry_bytes) for t in (whole, part)]
            if shape != own:
                raise TraceError(
                    "Traces of different models do not concatenate: layers, experts and bytes of "
                    f"an expert are {shape} in the first and {own} in another."
                )
            table = part.table
            tables.append(table.assign(turn=table["turn"] + turn, phase=table["phase"].cat.codes))
            turn += int(table["turn"].max()) + 1 if len(table) else 0
            whole.tokens += part.tokens
        whole._loaded = _finish(pd.concat(tables, ignore_index=True))
        return whole

    def to_csv(self, path: str | Path) -> Path:
        """Write the `route_trace v1` CSV.

        Raises:
            TraceError: the file cannot be written; what was written of it is removed.
        """
        table = self.table
        out = pd.DataFrame(
            {
                "turn": table["turn"],
                "phase": table["phase"].cat.codes,
                "step": table["step"],
                "layer": table["layer"],
                "slot": table["slot"],
                "expert": table["expert"],
                "weight": ["nan" if math.isnan(w) else f"{w:.6g}" for w in table["weight"]],
                "residency": table["resident"].astype(int),
                "expert_bytes": table["read_bytes"],
            }
        )
        text = "\n".join([*self._preamble(), out.to_csv(index=False, lineterminator="\n")])
        return _write(Path(path), text.encode("utf-8", "surrogateescape"))

    def to_parquet(self, path: str | Path) -> Path:
        """Write the table to Parquet with the facts of the model beside it.

        Raises:
            TraceError: the file cannot be written.
        """
        import io

        table = self.table.copy(deep=False)
        table.attrs = {
            "route_trace": 1,
            "model": self.model,
            "architecture": self.architecture,
            "n_layers": self.n_layers,
            "n_expert": self.n_expert,
            "n_expert_used": self.n_expert_used,
            "entry_bytes": {str(k): v for k, v in self.entry_bytes.items()},
            "dense_bytes": {str(k): v for k, v in self.dense_bytes.items()},
            "tokens": [list(token) for token in self.tokens],
        }
        buffer = io.BytesIO()
        table.to_parquet(buffer, index=False)
        return _write(Path(path), buffer.getvalue())

    @classmethod
    def open(cls, path: str | Path, *, n_expert_used: int | None = None) -> RouteTrace:
        """Read a trace by the kind of its file: Parquet if its name ends so, else CSV.

        `n_expert_used` is for the CSV of two columns, see `from_csv`.

        Raises:
            TraceError: see `from_csv` and `from_parquet`.
        """
        if Path(path).suffix == ".parquet":
            return cls.from_parquet(path)
        return cls.from_csv(path, n_expert_used=n_expert_used)

    @classmethod
    def from_csv(cls, path: str | Path, *, n_expert_used: int | None = None) -> RouteTrace:
        """Read a `route_trace v1` CSV of 9 or more columns, by name, or `layer,expert` alone.

        Bare choices come in the order in which they were made: a token begins where the layer
        number falls. How many a token makes in a layer is `n_expert_used`; without it, the fewest
        that occur. The sizes of entries, weights and hits are then unknown.

        A last line without its line end was cut while it was written: it is left out, and a
        `TraceWarning` says so.

        Raises:
            TraceError: not such a file, or a row that makes no sense, with its line.
        """
        path = Path(path)
        lines = read_lines(path)
        trace = cls()
        body = []
        for number, line in enumerate(lines, 1):
            if line.startswith("#"):
                trace._read_preamble(line)
            elif line.strip():
                body.append((number, line))
        table = parse_rows(path, body, n_expert_used)
        if body[0][1].count(",") == 1 and len(table):
            trace.n_layers = int(table["layer"].max()) + 1
            trace.n_expert = int(table["expert"].max()) + 1
            trace.n_expert_used = int(table["slot"].max()) + 1
        trace._loaded = _finish(table)
        return trace

    @classmethod
    def from_parquet(cls, path: str | Path) -> RouteTrace:
        """Read what `to_parquet` wrote.

        Raises:
            TraceError: not a Parquet file, or without the columns of a trace.
        """
        try:
            table = pd.read_parquet(path)
        except (OSError, ValueError) as error:
            raise TraceError(f"{path}: cannot be read as a Parquet trace: {error}") from error
        missing = set(COLUMNS) - set(table.columns)
        if missing:
            raise TraceError(f"{path}: no routing trace, column {min(missing)} is missing")
        facts = table.attrs
        trace = cls(
            model=facts.get("model", ""),
            architecture=facts.get("architecture", ""),
            n_layers=facts.get("n_layers", 0),
            n_expert=facts.get("n_expert", 0),
            n_expert_used=facts.get("n_expert_used", 0),
            entry_bytes={int(k): v for k, v in facts.get("entry_bytes", {}).items()},
            dense_bytes={int(k): v for k, v in facts.get("dense_bytes", {}).items()},
            tokens=[(step, token, text) for step, token, text in facts.get("tokens", [])],
        )
        table.attrs = {}
        trace._loaded = table.loc[:, list(COLUMNS)]
        return trace

    def _preamble(self) -> Iterable[str]:
        yield "# route_trace v1"
        # The format separates by blanks, so a path with blanks is written without them.
        model = re.sub(r"\s", "_", self.model)
        yield (
            f"# model={model} arch={self.architecture} "
            f"n_layer={self.n_layers} n_expert={self.n_expert} n_expert_used={self.n_expert_used}"
        )
        for layer in range(self.n_layers):
            yield (
                f"# layer={layer} expert_bytes={self.entry_bytes.get(layer, 0)} "
                f"dense_bytes={self.dense_bytes.get(layer, 0)}"
            )

    def _read_preamble(self, line: str) -> None:
        facts = dict(pair.split("=", 1) for pair in line[1:].split() if "=" in pair)
        try:
            if "model" in facts:
                self.model, self.architecture = facts["model"], facts.get("arch", "")
                self.n_layers = int(facts.get("n_layer", 0))
                self.n_expert = int(facts.get("n_expert", 0))
                self.n_expert_used = int(facts.get("n_expert_used", 0))
            elif "layer" in facts and int(facts.get("expert_bytes", 0)):
                self.entry_bytes[int(facts["layer"])] = int(facts["expert_bytes"])
            if "layer" in facts and int(facts.get("dense_bytes", 0)):
                self.dense_bytes[int(facts["layer"])] = int(facts["dense_bytes"])
        except ValueError as error:
            raise TraceError(f"the trace's header line {line!r} makes no sense: {error}") from error


def _empty() -> pd.DataFrame:
    one = np.zeros((0, 1), np.int64)
    return RoutingBlock(0, "decode", 0, one[:, 0], one, one * 1.0, one == 0, one).table()


def _finish(table: pd.DataFrame) -> pd.DataFrame:
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


def _write(path: Path, data: bytes) -> Path:
    """Write all or nothing: what is left of a failed write would read like a shorter run."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        partial = target  # a pipe or a device
    else:
        partial = target.with_name(f".{target.name}.partial")
    try:
        try:
            partial.write_bytes(data)
            if partial != target:
                partial.replace(target)
        finally:
            if partial != target:
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(f"{path}: the trace cannot be written: {error.strerror}") from error
    return path
