"""A benchmark in one row a case: speed with spread, ratio with interval, where the time goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from labkit.bench.cases import KINDS
from labkit.bench.result import BenchResult
from labkit.bench.statistics import Ratio, ratio, spread_pct
from labkit.runtime.metrics_csv import percentiles

#: Means over the measured tokens of a case's median round.
_MEANS = [
    "wall_ms", "compute_ms", "wait_ms", "manage_ms", "read_ms", "read_mib", "prefetch_mib",
    "cpu_ms", "major_faults", "energy_j",
]  # fmt: skip
#: Medians over a case's runs.
_MEDIANS = [
    "cache_mib", "open_s", "prefill_s", "first_token_s", "open_read_mib", "load_read_mib",
    "load_major_faults", "peak_rss_mib", "cgroup_peak_mib", "expert_resident_mib",
]  # fmt: skip


def summary(result: BenchResult) -> pd.DataFrame:
    """One row a case.

    Columns: case, kind, limit_mib, status ("ok", or what went wrong), rounds, n_tokens;
    decode_tok_s (of the median round) and spread_pct (largest minus smallest, of the median);
    speed_ratio, speed_ratio_low, speed_ratio_high (times as fast as the baseline, 95 % bootstrap
    interval); p50_ms, p95_ms, p99_ms of all tokens' latency; per token, in the median round,
    wall_ms, compute_ms (a residual), wait_ms, manage_ms, read_ms, read_mib, prefetch_mib, cpu_ms,
    major_faults, energy_j; hit_pct of all lookups; cold start, medians over rounds: open_s,
    prefill_s, first_token_s, first_token_ratio (baseline's time by this), open_read_mib and
    load_read_mib (what storage gave while opening, and until the first token),
    load_major_faults; memory; same_bits (None where nothing can be compared), differs_at.
    """
    bits = identity(result).set_index("case")
    base = result.facts["baseline"]
    rows = []
    for name in result.cases:
        runs = result.runs[result.runs["case"] == name]
        row: dict[str, Any] = {"case": name, **_case(result, runs, name)}
        found = speed_ratio(result, base, name)
        row["speed_ratio"] = found.value if found else np.nan
        row["speed_ratio_low"] = found.low if found else np.nan
        row["speed_ratio_high"] = found.high if found else np.nan
        row["first_token_ratio"] = first_token_ratio(result, base, name)
        row["same_bits"] = bits["same_bits"][name]
        row["differs_at"] = bits["differs_at"][name]
        rows.append(row)
    return pd.DataFrame(rows)


def speed_ratio(result: BenchResult, base: str, case: str) -> Ratio | None:
    """How many times as fast `case` decodes as `base`, over the rounds in which both ran."""
    tokens = result.measured()
    times = {
        name: {int(str(r)): g["wall_ms"].to_numpy() for r, g in of.groupby("round")}
        for name in (base, case)
        if len(of := tokens[tokens["case"] == name])
    }
    if len(times) < len({base, case}):
        return None
    shared = sorted(times[base].keys() & times[case].keys())
    # Only tokens that both had time for: the same token in the same context.
    pairs = [(times[base][r], times[case][r]) for r in shared]
    cut = [(b[: len(c)], c[: len(b)]) for b, c in pairs]
    return ratio([b for b, _ in cut], [c for _, c in cut])


def first_token_ratio(result: BenchResult, base: str, case: str) -> float:
    """Median over rounds of the baseline's open-to-first-token time by this case's."""
    runs = result.runs[result.runs["status"] == "ok"].set_index("round")
    times = [runs.loc[runs["case"] == name, "first_token_s"] for name in (base, case)]
    return float((times[0] / times[1]).median())


def identity(result: BenchResult) -> pd.DataFrame:
    """Whether each case's logits are those of the first exact case, bit for bit.

    Columns: case, exact (whether they are meant to be), compared (logits rows), same_bits (None
    where nothing can be compared), differs_at (0 the prompt's logits, i the i-th token's).
    """
    exact = {case["name"]: KINDS[case["kind"]].exact for case in result.facts["cases"]}
    names = list(result.runs["case"])
    reference = next(
        (d for d, n in zip(result.digests, names, strict=True) if d and exact[n]), None
    )
    rows = []
    for case in result.cases:
        own = [d for d, n in zip(result.digests, names, strict=True) if d and n == case]
        places = [_first_difference(reference, d) for d in own] if reference else []
        found = [place for place in places if place is not None]
        compared = max((min(len(d), len(reference or [])) for d in own), default=0)
        rows.append(
            {
                "case": case,
                "exact": exact[case],
                "compared": compared,
                "same_bits": None if not compared else not found,
                "differs_at": min(found, default=None),
            }
        )
    table = pd.DataFrame(rows)
    for name in ("same_bits", "differs_at"):  # not as NaN: "unknown" is neither yes nor no
        table[name] = pd.Series([row[name] for row in rows], dtype=object)
    return table


def _first_difference(one: list[str], other: list[str]) -> int | None:
    """Digests run on, so all are equal up to the first difference and none after it."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


def _median_round(tokens: pd.DataFrame) -> dict[str, float]:
    """Means over the tokens of the round whose mean wall time is the median one.

    So the parts add up to the wall time, and a round in which the machine was busy has no say.
    """
    if tokens.empty:
        return dict.fromkeys(["decode_tok_s", *_MEANS], np.nan)
    rounds = tokens.groupby("round")[_MEANS].mean().sort_values("wall_ms")
    middle = rounds.iloc[(len(rounds) - 1) // 2]
    means = {name: float(middle[name]) for name in _MEANS}
    return {"decode_tok_s": 1e3 / means["wall_ms"], **means}


def _case(result: BenchResult, runs: pd.DataFrame, name: str) -> dict[str, Any]:
    done = runs[runs["status"] == "ok"]
    failed = runs[runs["status"] != "ok"]
    tokens = result.measured()
    tokens = tokens[tokens["case"] == name]
    lookups = tokens["hits"].sum() + tokens["misses"].sum()
    kind = next(case["kind"] for case in result.facts["cases"] if case["name"] == name)
    return {
        "kind": kind,
        "limit_mib": runs["limit_mib"].max() if len(runs) else np.nan,
        "status": "ok" if len(done) else (failed["status"].iloc[0] if len(failed) else "not run"),
        "reason": failed["reason"].iloc[0] if len(failed) else None,
        "rounds": len(done),
        "failed": len(failed),
        "n_tokens": len(tokens),
        "spread_pct": spread_pct(done["decode_tok_s"].to_numpy()),
        **{f"{p}_ms": v for p, v in percentiles(tokens["wall_ms"].to_numpy()).items()},
        **_median_round(tokens),
        "hit_pct": 100 * tokens["hits"].sum() / lookups if lookups else np.nan,
        **{column: done[column].median() for column in _MEDIANS},
        "overlap": done["overlap"].iloc[0] if len(done) else None,
    }
