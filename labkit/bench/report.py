"""A benchmark in words: the verdict, the remarks on single cases, what was not controlled."""

from __future__ import annotations

import pandas as pd

from labkit.bench.result import BenchResult
from labkit.bench.summary import first_token_ratio, identity, speed_ratio, summary

_FAR = 10
_DOUBTFUL = 1.5  # times that a quotient of speeds may differ from the ratio
_STOCK_AT_THE_LIMIT = ("mmap", "mmap-random")


def verdict(result: BenchResult, table: pd.DataFrame | None = None) -> str:
    """Whether streaming is worth it for this model on this machine, in two or three sentences.

    The best streamed case is held against the better of the stock ways that ran under the same
    conditions. `table` is a `summary` that is at hand already.
    """
    table = summary(result) if table is None else table
    done = table[table["status"] == "ok"]
    streamed = done[done["kind"].str.startswith("stream")]
    stock = done[done["kind"].isin(_STOCK_AT_THE_LIMIT)]
    if streamed.empty or stock.empty:
        missing = "streamed case" if streamed.empty else "stock case (mmap or mmap-random)"
        return f"No {missing} ran to its end, so the two cannot be compared here."
    best = streamed.sort_values("decode_tok_s").iloc[-1]
    rival = stock.sort_values("decode_tok_s").iloc[-1]
    found = speed_ratio(result, rival["case"], best["case"])
    if found is None:
        return "The streamed and the stock cases share no round, so they cannot be compared."
    where = _where(result)
    speeds = (
        f"{best['case']} decodes {_rate(best['decode_tok_s'])} tokens a second and "
        f"{rival['case']}, the better stock way, {_rate(rival['decode_tok_s'])}: "
        f"{found.value:.2f} times as fast, 95 % interval {found.low:.2f} to {found.high:.2f}"
    )
    if found.low > 1:
        head = f"Streaming is worth it here{where}"
    elif found.high < 1:
        head = f"For speed streaming is not worth it here{where}"
    else:
        head = f"Streaming makes no clear difference to speed here{where}"
    doubt = _doubt(found.value, best, rival)
    return " ".join([f"{head}: {speeds}.{doubt}", *_more(result, done, best)])


def _doubt(ratio: float, best: pd.Series, rival: pd.Series) -> str:
    """Speeds are of each case's own median round, the ratio is taken within rounds."""
    quotient = best["decode_tok_s"] / rival["decode_tok_s"]
    if max(quotient / ratio, ratio / quotient) < _DOUBTFUL:
        return ""
    return (
        f" But these two speeds are {quotient:.2f} of one another, for rounds differ by up to "
        f"{max(best['spread_pct'], rival['spread_pct']):.0f} %: other work took part of the "
        "machine. Repeat it with more rounds before you believe it."
    )


def remarks(result: BenchResult, table: pd.DataFrame | None = None) -> list[str]:
    """What a reader has to know about single cases: failures, short runs, differing bits."""
    table = summary(result) if table is None else table
    found = []
    for row in table.to_dict("records"):
        if row["status"] != "ok" or row["failed"]:
            whole = row["status"] if row["status"] != "ok" else f"{row['failed']} runs failed"
            found.append(f"{row['case']}: {whole}: {row['reason']}")
    asked = result.facts["n"]
    done = result.runs[result.runs["status"] == "ok"]
    for case, runs in done.groupby("case", sort=False):
        least = int(runs["n_tokens"].min())
        if least < asked:
            found.append(
                f"{case}: a run measured {least} of {asked} tokens before its time was up; "
                "ratios compare the tokens that both cases had."
            )
    return [*found, *_outliers(result), bits_in_words(result)]


def _outliers(result: BenchResult) -> list[str]:
    """Tokens so slow that a case's mean speed, and with it the ratio, hangs on one of them."""
    found = []
    tokens = result.measured()
    for case, of in tokens.groupby("case", sort=False):
        slow = of.sort_values("wall_ms").iloc[-1]
        middle = of["wall_ms"].median()
        if slow["wall_ms"] > _FAR * middle and slow["wall_ms"] > of["wall_ms"].sum() / 4:
            found.append(
                f"{case}: one token took {_time(slow['wall_ms'])}, "
                f"{slow['wall_ms'] / middle:.0f} times its median, and its mean speed hangs on it. "
                "Was the process stopped meanwhile? The percentiles say what is usual."
            )
    return found


def _time(ms: float) -> str:
    """Milliseconds with three digits, from a second on in seconds."""
    return f"{ms / 1e3:,.1f} s" if ms >= 1000 else f"{ms:.3g} ms"


def bits_in_words(result: BenchResult) -> str:
    """Whether all cases gave the same logits, and why one may not have."""
    table = identity(result)
    compared = table[table["compared"] > 0]
    exact = compared[compared["exact"]]
    differing = exact[exact["same_bits"] == False]  # noqa: E712  (None is neither)
    parts = []
    if len(differing):
        names = ", ".join(
            f"{r.case} (from token {int(str(r.differs_at))} on)" for r in differing.itertuples()
        )
        parts.append(f"The logits DIFFER where they must not: {names}. That is a fault in labkit.")
    elif len(exact) > 1:
        n = int(exact["compared"].min())
        parts.append(
            f"Bit identity: {len(exact)} cases gave the same logits, all {n} rows (sha256)."
        )
    for row in compared[~compared["exact"]].itertuples():
        same = "has the same logits, but need not" if row.same_bits else "has other logits"
        parts.append(
            f"{row.case} {same}: repacked weights are multiplied by other kernels, which may add "
            "up in another order."
        )
    return " ".join(parts) or "Nothing could be compared bit for bit."


def _where(result: BenchResult) -> str:
    limit, size = result.facts["memory_limit_mib"], result.facts["model_mib"]
    if limit is None:
        return ", without a memory limit"
    return f", with {limit:,.0f} MiB of memory for a model of {size:,.0f} MiB"


def _more(result: BenchResult, done: pd.DataFrame, best: pd.Series) -> list[str]:
    parts = []
    stock = done[done["kind"].isin(_STOCK_AT_THE_LIMIT)]
    rival = stock.sort_values("first_token_s").iloc[0]
    cold = first_token_ratio(result, rival["case"], best["case"])
    if cold == cold:
        parts.append(
            f"From a cold start its first token is there after {best['first_token_s']:.2f} s, with "
            f"{rival['case']}, the earlier stock way, after {rival['first_token_s']:.2f} s "
            f"({cold:.2f} times as fast)."
        )
    whole = done[done["kind"] == "resident"]
    if len(whole):
        top = whole.iloc[0]
        share = 100 * best["decode_tok_s"] / top["decode_tok_s"]
        reach = "is no slower than" if share > 100 else f"reaches about {share:.0f} % of"
        spread = f" (its rounds differ by {top['spread_pct']:.0f} %)" if top["rounds"] > 1 else ""
        parts.append(
            f"With the whole model in memory it was about {_rate(top['decode_tok_s'])} tokens a "
            f"second{spread}; streaming {reach} that with a cache of "
            f"{_mib(best['cache_mib'])} MiB for {_mib(result.facts['expert_mib'])} MiB of experts."
        )
    return parts


def _rate(tok_s: float) -> str:
    """Three digits: a benchmark of a few rounds knows no more."""
    return f"{tok_s:,.0f}" if tok_s >= 100 else f"{tok_s:.3g}"


def _mib(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
