"""What prefetch brings: sessions without it and with each kind of it, token by token in turns.

    python tests/bench/prefetch.py MODEL --cache-mib 400 1150 --tokens 24 --warmup 4

For each budget and way of overlap the sessions are open side by side and decode the same tokens,
in an order drawn anew for each token: who comes second finds what the first has read in the caches
of a virtual disk. Prints JSON: for each kind the median time of a token, its ratio to the time
without prefetch (median over tokens, with a 95 % bootstrap interval), hits, bytes read, exposed
wait, and how often the predictions and the control were right.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from typing import Any

import numpy as np

from labkit.runtime import Session, TokenStep

KINDS = (None, "previous", "router")


def compare(model: str, options: dict[str, Any], prompt: list[int], warmup: int) -> dict[str, Any]:
    """Figures of each kind of prefetch at one budget."""
    sessions = [
        Session(model, prefetch=kind, prefill="experts", n_ctx=512, **options) for kind in KINDS
    ]
    steps: list[list[TokenStep]] = [[] for _ in KINDS]
    try:
        rng = np.random.default_rng(0)
        for token in prompt:
            for which in rng.permutation(len(KINDS)).tolist():
                sessions[which].generate([token], 0)
                steps[which] += sessions[which].prefill_steps
        tables = [session.prefetch_accuracy for session in sessions]
    finally:
        for session in sessions:
            session.close()
    plain = walls_ms(steps[0][warmup:])
    return {
        kind or "none": figures(steps[i][warmup:], plain) | rightness(tables[i])
        for i, kind in enumerate(KINDS)
    }


def walls_ms(steps: list[TokenStep]) -> np.ndarray:
    return np.array([1e3 * step.wall_s for step in steps])


def figures(steps: list[TokenStep], plain_ms: np.ndarray) -> dict[str, Any]:
    """Means and medians of a session's tokens, beside the times without prefetch."""
    ratios = walls_ms(steps) / plain_ms
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    hits, misses = sum(s.hits for s in steps), sum(s.misses for s in steps)
    return {
        "token_ms": round(float(np.median(walls_ms(steps))), 2),
        "ratio": round(float(np.median(ratios)), 3),
        "interval": [round(float(low), 3), round(float(high), 3)],
        "hit_pct": round(100 * hits / (hits + misses), 1),
        "prefetch_hit_pct": round(100 * sum(s.prefetch_hits for s in steps) / (hits + misses), 1),
        "read_mib": round(float(np.mean([s.bytes_read / 2**20 for s in steps])), 1),
        "prefetch_mib": round(float(np.mean([s.prefetch_bytes / 2**20 for s in steps])), 1),
        "read_ms": round(float(np.median([1e3 * s.read_s for s in steps])), 2),
        "wait_ms": round(float(np.median([1e3 * s.wait_s for s in steps])), 2),
        "manage_ms": round(float(np.median([1e3 * s.manage_s for s in steps])), 2),
    }


def rightness(table: Any) -> dict[str, Any]:
    """How often predictions and the control were right, all layers together."""
    if table.empty:
        return {}
    found = {"recall": round(float(table["right"].sum() / table["chosen"].sum()), 3)}
    if "control_right" in table:
        for name in ("control_right", "control_wrong", "control_ties"):
            found[name] = int(table[name].sum())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--cache-mib", type=float, nargs="+", required=True)
    parser.add_argument("--overlap", nargs="+", default=["serial", "userfaultfd"])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--threads", type=int, help="compute threads; else one for each core")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    tokens = np.random.default_rng(0).integers(10, 400, arguments.tokens + arguments.warmup)
    result = {
        f"{cache_mib:g} MiB, {overlap}": compare(
            arguments.model,
            {"cache_mib": cache_mib, "overlap": overlap, "threads": arguments.threads},
            tokens.tolist(),
            arguments.warmup,
        )
        for cache_mib in arguments.cache_mib
        for overlap in arguments.overlap
    }
    json.dump(result, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
