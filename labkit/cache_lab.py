"""One run, recorded, replayed and run again: does a cache do what its replay says?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from labkit.replay import replay
from labkit.runtime import Session
from labkit.trace import RouteTrace


def record(
    path: str | Path,
    prompts: Sequence[str],
    n_tokens: int,
    *,
    cache_mib: float | None = None,
    policy: str = "lru",
) -> tuple[RouteTrace, float]:
    """Run each prompt as a conversation of its own, over one cache that stays warm.

    Decoding is greedy, so every run makes the same choices whatever the cache. Returns the trace,
    one turn per prompt, and the live hit rate in % of all lookups (NaN if there were none).
    Errors are those of `Session`.
    """
    traces, hits, misses = [], 0, 0
    # Whole layers would stream past the cache, and the replay is about the cache.
    with Session(path, cache_mib=cache_mib, policy=policy, prefill="experts") as session:
        for prompt in prompts:
            session.reset()
            generation = session.generate(prompt, n_tokens)
            hits, misses = hits + generation.hits, misses + generation.misses
            traces.append(session.trace)
    lookups = hits + misses
    return RouteTrace.concat(traces), 100 * hits / lookups if lookups else float("nan")


def predict_and_run(
    path: str | Path,
    prompts: Sequence[str],
    n_tokens: int,
    budgets_mib: Iterable[float],
    *,
    policies: Sequence[str] = ("lru",),
    trace: RouteTrace,
) -> pd.DataFrame:
    """Run live at each budget under each policy, beside what the replay of `trace` predicts.

    `trace` is what `record` gave for the same prompts. Returns columns budget_mib, policy, hit_pct
    (live), predicted_pct.
    """
    predicted = replay(trace, budgets_mib, policies)
    live = [
        record(path, prompts, n_tokens, cache_mib=budget, policy=policy)[1]
        for budget, policy in zip(predicted["budget_mib"], predicted["policy"], strict=True)
    ]
    return pd.DataFrame(
        {
            "budget_mib": predicted["budget_mib"],
            "policy": predicted["policy"],
            "hit_pct": live,
            "predicted_pct": predicted["hit_pct"],
        }
    )
