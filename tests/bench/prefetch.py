"""What prefetch brings: sessions without it and with each kind of it, token by token in turns.

    python tests/bench/prefetch.py MODEL --cache-mib 400 1150 --tokens 24 --warmup 4
    python tests/bench/prefetch.py MODEL --cache-mib 1150 --hot-list

Prints JSON: for each budget and way of overlap the two tables of `labkit.prefetch_lab`, layers
summed up. With `--hot-list` instead the time from opening to the first token after a short prompt,
with a hot list and without, in turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from labkit.prefetch_lab import compare_prefetch, foretold, text_tokens
from labkit.runtime import Session


def kinds(model: str, tokens: list[int], warmup: int, options: dict[str, Any]) -> dict[str, Any]:
    """Figures of each kind of prefetch at one budget."""
    found = compare_prefetch(model, tokens, warmup=warmup, n_ctx=512, **options)
    told = foretold(found.layers).set_index("prefetch")
    return {
        str(name): {
            key: round(float(value), 3)
            for key, value in (*row.items(), *(told.T.get(name, {}).items()))
            if pd.notna(value)  # what was not measured is left out
        }
        for name, row in found.summary.set_index("prefetch").iterrows()
    }


def first_token(model: str, prompt: list[int], cache_mib: float, directory: str | None) -> Any:
    """Seconds for opening, and from there to the first token; its hits, its MiB."""
    begin = time.perf_counter()
    with Session(model, cache_mib=cache_mib, hot_list=directory, n_ctx=512) as session:
        open_s = time.perf_counter() - begin
        session.generate(prompt, 0)
        return open_s, time.perf_counter() - begin, session.prefill_steps[-1]


def hot_list(model: str, tokens: list[int], cache_mib: float, rounds: int) -> dict[str, Any]:
    """First token with a hot list of some tokens, and without."""
    with tempfile.TemporaryDirectory() as directory:
        with Session(model, cache_mib=cache_mib, hot_list=directory, n_ctx=512) as session:
            for token in tokens:
                session.generate([token], 0)
        ways = {"without": None, "with": directory}
        runs: dict[str, list[Any]] = {way: [] for way in ways}
        rng = np.random.default_rng(1)
        for _ in range(rounds):
            prompt = rng.choice(tokens, 4).tolist()
            for way in rng.permutation(list(ways)).tolist():
                runs[way].append(first_token(model, prompt, cache_mib, ways[way]))
    ratios = [
        after[1] / plain[1] for plain, after in zip(runs["without"], runs["with"], strict=True)
    ]
    found: dict[str, Any] = {"ratio": median(ratios), "rounds": [round(r, 3) for r in ratios]}
    for way, some in runs.items():
        found[way] = {
            "open_s": round(median(run[0] for run in some), 3),
            "first_token_s": round(median(run[1] for run in some), 3),
            "hits": median(run[2].hits for run in some),
            "misses": median(run[2].misses for run in some),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--cache-mib", type=float, nargs="+", required=True)
    parser.add_argument("--overlap", nargs="+", default=["serial", "userfaultfd"])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--threads", type=int, help="compute threads; else one for each core")
    parser.add_argument("--hot-list", action="store_true", help="measure the hot list instead")
    parser.add_argument("--rounds", type=int, default=7, help="of the hot list")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    tokens = text_tokens(arguments.model, arguments.tokens + arguments.warmup)
    result = {}
    for cache_mib in arguments.cache_mib:
        if arguments.hot_list:
            result[f"{cache_mib:g} MiB"] = hot_list(
                arguments.model, tokens, cache_mib, arguments.rounds
            )
            continue
        for overlap in arguments.overlap:
            options = {"cache_mib": cache_mib, "overlap": overlap, "threads": arguments.threads}
            result[f"{cache_mib:g} MiB, {overlap}"] = kinds(
                arguments.model, tokens, arguments.warmup, options
            )
    json.dump(result, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
