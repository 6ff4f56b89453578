"""Replay of ever longer traces: do time and memory grow as the trace does?

Each size runs in a process of its own, which reads a generated Parquet trace, replays it and
reports seconds of CPU by step and its peak of memory. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd

from labkit.replay import demand, lru_curve, replay
from labkit.trace import PHASES, RouteTrace

LAYERS, EXPERTS, K = 48, 128, 8
ENTRY_BYTES = 3 * 2**20
BUDGET_MIB = 4000
POLICIES = ("lru", "lfu", "s3-fifo", "layer-lfu", "echo", "belady")


def write_trace(path: Path, rows: int, seed: int = 0) -> None:
    """A trace of a generated model whose tokens have favourites, which change with the text."""
    rng = np.random.default_rng(seed)
    tokens = rows // (LAYERS * K)
    parts = []
    for start in range(0, tokens, 512):
        n = min(512, tokens - start)
        taste = rng.gumbel(size=(1, LAYERS, EXPERTS)) * 1.5
        liking = taste + rng.gumbel(size=(n, LAYERS, EXPERTS))
        parts.append(np.argpartition(-liking, K, axis=2)[:, :, :K].astype(np.int16).ravel())
    expert = np.concatenate(parts)
    place = np.arange(len(expert))
    table = pd.DataFrame(
        {
            "turn": np.zeros(len(expert), np.int32),
            "phase": pd.Categorical.from_codes(
                np.ones(len(expert), np.int8), dtype=pd.CategoricalDtype(list(PHASES))
            ),
            "step": (place // (LAYERS * K)).astype(np.int32),
            "layer": (place // K % LAYERS).astype(np.int32),
            "slot": (place % K).astype(np.int32),
            "expert": expert.astype(np.int32),
            "weight": np.full(len(expert), 1 / K, np.float32),
            "resident": np.zeros(len(expert), bool),
            "read_bytes": np.zeros(len(expert), np.int32),
        }
    )
    trace = RouteTrace(
        n_layers=LAYERS,
        n_expert=EXPERTS,
        n_expert_used=K,
        entry_bytes=dict.fromkeys(range(LAYERS), ENTRY_BYTES),
    )
    trace._loaded = table
    trace.to_parquet(path)


def measure(path: Path) -> dict[str, float]:
    """CPU seconds of each step, and peak memory in MiB, of this process."""
    found: dict[str, float] = {"start_mib": _peak_mib()}
    with _timed(found, "load_s"):
        trace = RouteTrace.from_parquet(path)
    found["rows"] = len(trace.table)
    with _timed(found, "demand_s"):
        asked = demand(trace)
    found["demand_mib"] = _peak_mib()
    del trace
    with _timed(found, "lru_curve_s"):
        lru_curve(asked)
    found["lru_curve_mib"] = _peak_mib()
    for policy in POLICIES:
        with _timed(found, f"{policy}_s"):
            replay(asked, [BUDGET_MIB], [policy])
    found["peak_mib"] = _peak_mib()
    return {name: round(value, 2) for name, value in found.items()}


@contextmanager
def _timed(found: dict[str, float], name: str) -> Iterator[None]:
    begin = time.process_time()
    yield
    found[name] = time.process_time() - begin


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure each size in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1000000,3000000,10000000")
    parser.add_argument("--trace", type=Path, help="measure this trace here (used inside)")
    options = parser.parse_args()
    if options.trace:
        sys.stdout.write(json.dumps(measure(options.trace)) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        for rows in map(int, options.rows.split(",")):
            path = Path(folder) / f"{rows}.parquet"
            write_trace(path, rows)
            command = [sys.executable, __file__, "--trace", str(path)]
            sys.stdout.write(subprocess.check_output(command, text=True))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
