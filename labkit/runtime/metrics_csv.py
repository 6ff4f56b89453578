"""Per-token figures as a table, and as the `bmoe_metrics` CSV that BigMoeOnEdge writes and reads.

The CSV has a preamble of `# key=value` lines about the run, a row for each generated token, and a
`# summary` line for each turn. Its readers go by column name and take any column as optional, so
what was not measured is simply not there; an empty cell is a single value that is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from labkit import __version__
from labkit.errors import MetricsError
from labkit.runtime.memory import PAGE
from labkit.runtime.steps import Generation, TokenStep

if TYPE_CHECKING:
    from labkit.runtime.session import Session

MIB = 2**20
PERCENTILES = (50, 95, 99)

#: Columns of the CSV that labkit measures, in the order of the format.
CSV_COLUMNS = [
    "step",
    "steps",
    "wall_ms",
    "io_ms",
    "compute_ms",
    "read_bytes",
    "cache_hit_pct",
    "stall_ms",
    "mgmt_ms",
    "majflt",
    "cpu_ms",
    "turn",
    "majflt_mib",
    "cache_budget_mib",
]


def step_table(steps: Iterable[TokenStep]) -> pd.DataFrame:
    """The figures of steps, one row a token.

    Columns: position, phase, token, text, path; batch and batch_tokens (the tokens of one graph
    share its times, so sum them per batch, not per row); wall_ms and its parts compute_ms (what is
    left over), wait_ms (exposed wait) and manage_ms; read_ms (a read was under way); read_mib,
    prefetch_mib; hits, misses, prefetch_hits, hit_pct; cpu_ms, major_faults,
    energy_j (the whole machine's), expert_resident_mib (by the cache's own sums).
    What was not measured is NaN. The routing itself is in the session's trace.
    """
    rows = list(steps)
    batch = np.cumsum([_begins_batch(rows, i) for i in range(len(rows))])
    table = pd.DataFrame(
        {
            "position": _whole(rows, "index"),
            "phase": [step.phase for step in rows],
            "token": _whole(rows, "token"),
            "text": [step.text for step in rows],
            "path": [step.path for step in rows],
            "batch": batch.astype(np.int64) - 1,
            **{name: 1e3 * _real(rows, f"{name[:-3]}_s") for name in _TIMES},
            "read_mib": _real(rows, "bytes_read") / MIB,
            "prefetch_mib": _real(rows, "prefetch_bytes") / MIB,
            "hits": _whole(rows, "hits"),
            "misses": _whole(rows, "misses"),
            "prefetch_hits": _whole(rows, "prefetch_hits"),
            "cpu_ms": 1e3 * _real(rows, "cpu_s"),
            "major_faults": _real(rows, "major_faults"),
            "energy_j": _real(rows, "energy_j"),
            "expert_resident_mib": _real(rows, "resident_bytes") / MIB,
        }
    )
    lookups = (table["hits"] + table["misses"]).to_numpy(float)
    share = np.divide(
        table["hits"], lookups, out=np.full(len(rows), np.nan), where=lookups > 0
    )  # a resident run looks nothing up
    table["hit_pct"] = 100 * share
    table["batch_tokens"] = table.groupby("batch")["batch"].transform("size").astype(np.int64)
    return table


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """p50, p95 and p99 by linear interpolation, of the values that are known; NaN without any.

    Of fewer than 100 values the p99 lies between the two largest: read it as "the worst".
    """
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    found = np.percentile(known, PERCENTILES) if len(known) else np.full(3, np.nan)
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}


def session_info(session: Session, **more: object) -> dict[str, object]:
    """The preamble of a session's file: what it ran and how, by the format's keys.

    `more` adds or replaces keys, such as `temp` and `seed`, which only the caller knows.
    """
    gguf, cache = session.map, session.cache_bytes
    info: dict[str, object] = {
        "engine": f"labkit-{__version__}",
        "model": gguf.paths[0].name,
        "arch": gguf.architecture,
        "n_layer": gguf.n_layers,
        "n_expert": gguf.n_expert,
        "n_expert_used": gguf.n_expert_used,
        "n_ctx": session.n_ctx,
        "moe_stream": int(cache is not None),
        "cache_mb": 0 if cache is None else round(cache / MIB, 3),
        "spec": "off",
    }
    if cache is not None:
        info["overlap"] = int(session.overlap != "serial")
        info["labkit_overlap"] = session.overlap
    return info | more


def write_metrics(
    path: str | Path, turns: Sequence[Generation], info: Mapping[str, object]
) -> None:
    """Write the generated tokens of `turns` as a `bmoe_metrics v2` CSV.

    Args:
        path: is written over.
        turns: generations of one session, in order.
        info: the preamble, see `session_info`.

    Raises:
        MetricsError: the file cannot be written.
    """
    overlap = str(info.get("overlap", 0)) == "1"
    budget = info.get("cache_mb") if str(info.get("moe_stream")) == "1" else None
    lines = ["# bmoe_metrics v2", *_preamble(info)]
    tables = [_rows(turn, i, overlap, budget) for i, turn in enumerate(turns)]
    whole = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=CSV_COLUMNS)
    # A column that nothing was measured for is left out; its readers know that as an older file.
    measured = [c for c in CSV_COLUMNS if c in ("step", "wall_ms") or whole[c].notna().any()]
    lines.append(",".join(measured))
    for turn, table in zip(turns, tables, strict=True):
        for row in table[measured].itertuples(index=False, name=None):
            lines.append(",".join(map(_cell, measured, row)))
        lines.append("# summary " + _pairs(_summary(turn, table, overlap)))
    try:
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    except OSError as error:
        raise MetricsError(
            f"{path}: the figures cannot be written: {error.strerror or error}. "
            "Give a file in a directory that exists and has room."
        ) from error


_TIMES = ("wall_ms", "compute_ms", "wait_ms", "manage_ms", "read_ms")


def _rows(turn: Generation, number: int, overlap: bool, budget: object) -> pd.DataFrame:
    """The CSV's columns for one turn, NaN where something was not measured."""
    table = step_table(turn.steps)
    hits, misses = table["hits"].to_numpy(), table["misses"].to_numpy()
    before_hits, before_misses = turn.hits - hits.sum(), turn.misses - misses.sum()
    found = before_hits + np.cumsum(hits)
    asked = found + before_misses + np.cumsum(misses)
    n = len(table)
    streams = budget is not None
    return pd.DataFrame(
        {
            "step": np.arange(1, n + 1),
            "steps": np.full(n, n),
            "wall_ms": table["wall_ms"],
            # Without overlap the format counts the wait as I/O; with it the wait is the stall.
            "io_ms": table["read_ms"] if overlap else table["wait_ms"],
            "compute_ms": table["compute_ms"].clip(lower=0),
            "read_bytes": (table["read_mib"] * MIB).round(),
            "cache_hit_pct": 100 * found / np.maximum(asked, 1) if streams else np.full(n, -1.0),
            "stall_ms": table["wait_ms"] if overlap else 0.0,
            "mgmt_ms": table["manage_ms"],
            "majflt": table["major_faults"],
            "cpu_ms": table["cpu_ms"],
            "turn": np.full(n, number),
            "majflt_mib": table["major_faults"] * PAGE / MIB,
            "cache_budget_mib": np.full(n, float(str(budget)) if streams else np.nan),
        }
    )


def _summary(turn: Generation, rows: pd.DataFrame, overlap: bool) -> dict[str, object]:
    """What the format says about a turn, times in seconds; without what was not measured."""
    n = len(rows)
    mean_s = (
        rows[["wall_ms", "compute_ms", "io_ms", "stall_ms", "mgmt_ms", "cpu_ms"]] / 1e3
    ).mean()
    wall_s = mean_s["wall_ms"]
    found: dict[str, Any] = {
        "tokens": n,
        "s/tok": wall_s,
        "tok/s": 1 / wall_s if n and wall_s else None,
        "read_MiB": rows["read_bytes"].sum() / MIB,
        "io_s": rows["io_ms"].sum() / 1e3,
        "compute_s/tok": mean_s["compute_ms"],
        "io_s/tok": mean_s["io_ms"],
        "cache_hit_pct": rows["cache_hit_pct"].iloc[-1] if n else None,
        "n_prompt": len(turn.prompt_tokens),
        "prefill_s": turn.prefill_s,
        "prefill_tps": turn.prefill_tok_s,
        "stall_s/tok": mean_s["stall_ms"] if overlap else 0.0,
        "mgmt_s/tok": mean_s["mgmt_ms"],
        "majflt/tok": rows["majflt"].mean(),
        "cpu_s/tok": mean_s["cpu_ms"],
        # Sampling and everything else between two graphs, which the times above leave out.
        "loop_overhead_s/tok": turn.decode_s / n - wall_s if n else None,
    }
    return {key: value for key, value in found.items() if value is not None and value == value}


def _preamble(info: Mapping[str, object]) -> list[str]:
    """Two lines: the engine, and everything else (the format's readers want `model=` first)."""
    rest = {key: value for key, value in info.items() if key != "engine" and value is not None}
    first = {"engine": info["engine"]} if "engine" in info else {}
    return ["# " + _pairs(part) for part in (first, rest) if part]


def _pairs(values: Mapping[str, object]) -> str:
    def plain(value: object) -> str:
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        return re.sub(r"\s+", "_", text)  # a space would end the value

    return " ".join(f"{key}={plain(value)}" for key, value in values.items())


_WHOLE = frozenset(("step", "steps", "read_bytes", "majflt", "turn"))


def _cell(name: str, value: float) -> str:
    if value != value:
        return ""
    return str(round(value)) if name in _WHOLE else f"{value:.3f}"


def _begins_batch(rows: Sequence[TokenStep], index: int) -> bool:
    """Whether a step began a graph: tokens of one graph have the very same wall time."""
    if index == 0 or rows[index].phase == "decode":
        return True
    return rows[index].wall_s != rows[index - 1].wall_s


def _real(rows: Sequence[TokenStep], name: str) -> np.ndarray:
    return np.array([np.nan if (v := getattr(s, name)) is None else v for s in rows], np.float64)


def _whole(rows: Sequence[TokenStep], name: str) -> np.ndarray:
    return np.array([getattr(step, name) for step in rows], np.int64)
