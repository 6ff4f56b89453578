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

import numpy as np
import pandas as pd

from labkit.errors import OptionError, TraceError
from labkit.trace_csv import TraceWarning, parse_rows, read_lines
from labkit.trace_table import (
    COLUMNS,
    PHASES,
    Routing,
    RoutingBlock,
    empty_table,
    in_order,
    routing_rows,
)

__all__ = [
    "COLUMNS",
    "PHASES",
    "RouteTrace",
    "Routing",
    "RoutingBlock",
    "TraceWarning",
    "routing_rows",
]


@dataclass
class RouteTrace:
    """Routing of one run, with the facts of its model that an analysis needs.

    Attributes:
        model, architecture, n_layers, n_expert, n_expert_used: of the model; "" and 0 if unknown.
        entry_bytes: bytes of an expert entry, by MoE layer.
        dense_bytes: bytes of a layer's other weights, by layer.
        tokens: (turn, step, token id, text) of every token, where the run knew them.
        domains: what the text of a turn is about, by turn, where somebody said so. Parquet keeps
            it, the CSV does not.
    """

    model: str = ""
    architecture: str = ""
    n_layers: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    entry_bytes: dict[int, int] = field(default_factory=dict)
    dense_bytes: dict[int, int] = field(default_factory=dict)
    tokens: list[tuple[int, int, int, str]] = field(default_factory=list)
    domains: dict[int, str] = field(default_factory=dict)
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
            table = in_order(pd.concat(parts, ignore_index=True) if parts else empty_table())
            self._table = kept = (version, table)
        return kept[1]

    def select(
        self,
        *,
        phase: str | None = None,
        layers: Iterable[int] | None = None,
        turns: Iterable[int] | None = None,
        domain: str | None = None,
    ) -> RouteTrace:
        """The part of this trace that has all that is asked for, with the same facts of its model.

        Raises:
            OptionError: `phase` is neither "prefill" nor "decode", or no turn is of that domain.
        """
        table = self.table
        chosen = np.ones(len(table), bool)
        if phase is not None:
            if phase not in PHASES:
                raise OptionError(f"there is no phase {phase!r}; there are {' and '.join(PHASES)}")
            chosen &= table["phase"].cat.codes.to_numpy() == PHASES.index(phase)
        wanted = [("layer", layers), ("turn", turns)]
        if domain is not None:
            wanted.append(("turn", self._turns_of(domain)))
        for name, values in wanted:
            if values is not None:
                chosen &= table[name].isin(list(values)).to_numpy()
        rows = table[chosen].reset_index(drop=True)
        named = set(rows["turn"].tolist())
        left = set(zip(rows["turn"].tolist(), rows["step"].tolist(), strict=True))
        return replace(
            self,
            tokens=[token for token in self.tokens if token[:2] in left],
            domains={turn: name for turn, name in self.domains.items() if turn in named},
            _blocks=[],
            _table=None,
            _loaded=rows,
        )

    def by_domain(self) -> dict[str, pd.DataFrame]:
        """The table of each domain, as the figures by domain want them."""
        names = dict.fromkeys(self.domains.values())
        return {name: self.select(domain=name).table for name in names}

    def _turns_of(self, domain: str) -> list[int]:
        turns = [turn for turn, name in self.domains.items() if name == domain]
        if not turns:
            known = ", ".join(dict.fromkeys(self.domains.values())) or "none; set `domains`"
            raise OptionError(f"no turn is of the domain {domain!r}; domains: {known}")
        return turns

    @classmethod
    def concat(cls, traces: Iterable[RouteTrace]) -> RouteTrace:
        """One trace after another, as runs of one model: the turns go on counting.

        The shape of a model that was only guessed from the choices (a file of bare choices) fits
        any that is as large.

        Raises:
            TraceError: none given, or traces of models of different shape.
        """
        parts = list(traces)
        if not parts:
            raise TraceError("There is no trace to concatenate.")
        whole = cls._of_all(parts)
        tables, first = [], 0
        for part in parts:
            table = part.table
            tables.append(table.assign(turn=table["turn"] + first, phase=table["phase"].cat.codes))
            whole.tokens += [(turn + first, s, i, text) for turn, s, i, text in part.tokens]
            whole.domains |= {turn + first: name for turn, name in part.domains.items()}
            named = [turn for turn, *_ in part.tokens]
            first += 1 + max([-1, *table["turn"].unique().tolist(), *named, *part.domains])
        some = [table for table in tables if len(table)] or tables[:1]
        whole._loaded = in_order(pd.concat(some, ignore_index=True))
        return whole

    @classmethod
    def _of_all(cls, parts: list[RouteTrace]) -> RouteTrace:
        """An empty trace with the facts of the model that all of `parts` are of."""
        known = [part for part in parts if not part._guessed]
        whole = replace(
            (known or parts)[0], tokens=[], domains={}, _blocks=[], _table=None, _loaded=None
        )
        if not known:
            whole.n_layers = max(part.n_layers for part in parts)
            whole.n_expert = max(part.n_expert for part in parts)
            whole.n_expert_used = max(part.n_expert_used for part in parts)
        for part in parts:
            fits = part.n_layers <= whole.n_layers and part.n_expert <= whole.n_expert
            shape, own = [(t.n_layers, t.n_expert, t.entry_bytes) for t in (whole, part)]
            if not (fits if part._guessed else shape == own):
                raise TraceError(
                    "Traces of different models do not concatenate: layers, experts and bytes of "
                    f"an expert are {shape} in the first and {own} in another."
                )
        return whole

    @property
    def _guessed(self) -> bool:
        """Whether nobody said what model this is of."""
        return not (self.architecture or self.entry_bytes)

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
            "domains": {str(k): v for k, v in self.domains.items()},
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
        trace._loaded = in_order(table)
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
            tokens=[
                (turn, step, token, text) for turn, step, token, text in facts.get("tokens", [])
            ],
            domains={int(k): v for k, v in facts.get("domains", {}).items()},
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
