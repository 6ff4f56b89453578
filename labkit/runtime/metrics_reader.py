"""Reading `bmoe_metrics` CSV files: labkit's own and those of BigMoeOnEdge, versions 1 and 2."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from labkit.errors import MetricsError

MIB = 2**20
_MOST_BYTES = 256 * MIB
_MAGIC = re.compile(r"#\s*bmoe_metrics v(\d{1,6})\s*$")
_REQUIRED = ("step", "wall_ms")
#: A negative value of these says that nothing was measured.
_NEGATIVE_IS_UNKNOWN = frozenset(("cache_hit_pct", "dense_resident_frac"))
#: A difference of two clocks, so it may fall below zero by itself.
_MAY_BE_NEGATIVE = frozenset(("compute_ms", "loop_overhead_ms"))


class MetricsWarning(UserWarning):
    """A file was read, but something in it was left out."""


@dataclass(frozen=True)
class Metrics:
    """A file of per-token figures.

    Attributes:
        version: of the format.
        info: the preamble's keys; a later line wins over an earlier one.
        rows: the columns of the file by its own names, float64; NaN is "not measured".
        summaries: the `# summary` lines, one a turn.
    """

    version: int
    info: dict[str, str]
    rows: pd.DataFrame
    summaries: list[dict[str, str]]

    @property
    def overlap(self) -> bool:
        """Whether reads went on while the model computed."""
        return self.info.get("overlap") == "1"

    def table(self) -> pd.DataFrame:
        """The figures under labkit's names and in its units, a row a token.

        wait_ms is the exposed wait: without overlap the file's io_ms, with it its stall_ms.
        read_ms is the file's io_ms: BigMoeOnEdge sums it over its lanes when reads overlap, so it
        can exceed the wall time there. hit_pct counts from the beginning of the run, prompt
        included. Columns that the file does not have are all NaN.
        """
        rows = self.rows
        nothing = pd.Series(np.nan, index=rows.index)

        def column(name: str) -> pd.Series:
            return rows.get(name, nothing)

        return pd.DataFrame(
            {
                "turn": column("turn").fillna(0).astype(np.int64),
                "step": column("step").astype(np.int64),
                "wall_ms": column("wall_ms"),
                "compute_ms": column("compute_ms"),
                "wait_ms": column("stall_ms" if self.overlap else "io_ms"),
                "manage_ms": column("mgmt_ms"),
                "read_ms": column("io_ms"),
                "read_mib": column("read_bytes") / MIB,
                "hit_pct": column("cache_hit_pct"),
                "cpu_ms": column("cpu_ms"),
                "major_faults": column("majflt"),
            }
        )


def read_metrics(path: str | Path) -> Metrics:
    """Read a `bmoe_metrics` CSV.

    Raises:
        MetricsError: it is no such file, or a value in it is none; with the line.

    Warns:
        MetricsWarning: the last line was cut while it was written; it is left out.
    """
    path = Path(path)
    lines = _lines(path)
    found = _MAGIC.match(lines[0]) if lines else None
    if found is None:
        raise MetricsError(
            f"{path}: no bmoe_metrics CSV: its first line is {_shown(lines)}, not "
            "'# bmoe_metrics v2'. `labkit generate --metrics` writes such files; a routing trace "
            "is read by `labkit replay`."
        )
    info: dict[str, str] = {}
    summaries: list[dict[str, str]] = []
    header: list[str] = []
    rows: list[list[float]] = []
    for number, line in enumerate(lines[1:], start=2):
        if line.startswith("# summary"):
            summaries.append(_pairs(line))
        elif line.startswith("#"):
            info |= _pairs(line)
        elif not line.strip():
            continue
        elif not header:
            header = _header(path, number, line)
        else:
            rows.append(_row(path, number, line, header))
    if not header:
        raise MetricsError(f"{path}: there is no header line that names the columns")
    table = pd.DataFrame(np.array(rows, np.float64).reshape(len(rows), len(header)), columns=header)
    return Metrics(int(found[1]), info, _without_filler(table), summaries)


def _lines(path: Path) -> list[str]:
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise MetricsError(
                f"{path}: {size / MIB:.0f} MiB are too many for the figures of one run's tokens"
            )
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise MetricsError(f"{path}: cannot be read as a CSV: {error}") from error
    lines = re.split(r"\r\n|\n|\r", text)
    if lines[-1] and not lines[-1].startswith("#"):
        warnings.warn(
            f"{path}: line {len(lines)} has no line end, so it was cut while it was written; "
            "it is left out",
            MetricsWarning,
            stacklevel=3,
        )
    return lines if lines[-1].startswith("#") else lines[:-1]


def _header(path: Path, number: int, line: str) -> list[str]:
    names = [name.strip() for name in line.split(",")]
    for name in _REQUIRED:
        if name not in names:
            raise MetricsError(f"{path}:{number}: the column {name} is missing from the header")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise MetricsError(f"{path}:{number}: the column {twice!r} is there twice")
    return names


def _row(path: Path, number: int, line: str, header: list[str]) -> list[float]:
    cells = line.split(",")
    if len(cells) != len(header):
        raise MetricsError(f"{path}:{number}: {len(cells)} values for {len(header)} columns")
    return [
        _value(path, number, name, cell.strip()) for name, cell in zip(header, cells, strict=True)
    ]


def _value(path: Path, number: int, name: str, cell: str) -> float:
    if cell == "" and name not in _REQUIRED:
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise MetricsError(f"{path}:{number}: {name} is {cell[:40]!r}, not a number")
    if value < 0 and name in _NEGATIVE_IS_UNKNOWN:
        return math.nan
    if value < 0 and name not in _MAY_BE_NEGATIVE:
        raise MetricsError(f"{path}:{number}: {name} is {cell[:40]}; it cannot be negative")
    if name in ("step", "turn") and (value != int(value) or value >= 2**53):
        raise MetricsError(f"{path}:{number}: {name} is {cell[:40]}, not a whole number")
    return value


def _without_filler(table: pd.DataFrame) -> pd.DataFrame:
    """NaN in place of zeros that stand for "this platform does not tell".

    A token takes processor time, so where every cpu_ms is 0 neither it nor majflt was measured.
    """
    if len(table) and "cpu_ms" in table and (table["cpu_ms"] == 0).all():
        unknown = [name for name in ("cpu_ms", "majflt", "majflt_mib") if name in table]
        if (table[unknown] == 0).to_numpy().all():
            table[unknown] = np.nan
    return table


def _pairs(line: str) -> dict[str, str]:
    parts = (part.split("=", 1) for part in line.lstrip("#").split())
    return {part[0]: part[1] for part in parts if len(part) == 2}


def _shown(lines: list[str]) -> str:
    return repr(lines[0][:60]) if lines else "missing (the file is empty)"
