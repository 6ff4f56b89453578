"""A whole request: the prompt, then the answer. What a faster prefill is worth to who waits."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd

from labkit.device.pipeline import CPU, DECODE, Timeline
from labkit.errors import OptionError


def request_s(ttft_s: float, decode_s: float, outputs: int) -> float:
    """Seconds of a request with `outputs` answer tokens, the first of which comes with `ttft_s`.

    `decode_s` is the time of each further token. An answer of no token ends with the prompt.
    """
    return ttft_s + max(0, outputs - 1) * decode_s


def requests(ttft_s: float, decode_s: float, outputs: Iterable[int]) -> pd.DataFrame:
    """A row per answer length: outputs, ttft_s, decode_s (of all further tokens), request_s,
    prefill_pct (the prompt's part of the request), tok_s (answer tokens a second of the request).
    """
    _check(ttft_s, decode_s)
    rows = []
    for n in outputs:
        whole = request_s(ttft_s, decode_s, _count(n))
        rows.append((n, ttft_s, whole - ttft_s, whole, 100 * ttft_s / whole, n / whole))
    names = ["outputs", "ttft_s", "decode_s", "request_s", "prefill_pct", "tok_s"]
    return pd.DataFrame(rows, columns=names)


def amdahl(
    ttft_s: float, decode_s: float, outputs: Iterable[int], factors: Iterable[float]
) -> pd.DataFrame:
    """What a prefill that is `factor` times as fast makes of a request (Amdahl's law).

    If the prompt is the part p of a request, the request becomes 1 / (1 - p + p / factor) times as
    fast, and never more than 1 / (1 - p). Decode is left as it is.

    Returns a row per answer length and factor: outputs, factor, request_s, speedup, saved_pct (of
    the request's time), limit (the speed-up with a prefill that takes no time; infinite without
    an answer to decode).
    """
    _check(ttft_s, decode_s)
    chosen = list(factors)
    for factor in chosen:
        if not factor > 0:
            raise OptionError(f"a prefill {factor} times as fast does not exist; give more than 0")
    rows = []
    for n in outputs:
        rest = request_s(0.0, decode_s, _count(n))
        whole = ttft_s + rest
        for factor in chosen:
            faster = ttft_s / factor + rest
            limit = whole / rest if rest else math.inf
            rows.append((n, factor, faster, whole / faster, 100 * (1 - faster / whole), limit))
    names = ["outputs", "factor", "request_s", "speedup", "saved_pct", "limit"]
    return pd.DataFrame(rows, columns=names)


def break_even_outputs(ttft_s: float, decode_s: float, share: float = 0.5) -> float:
    """Answer length at which the prompt is `share` of the request: longer answers, less to win."""
    _check(ttft_s, decode_s)
    if not 0 < share < 1:
        raise OptionError(f"share is {share}; it must lie between 0 and 1")
    return 1 + ttft_s * (1 - share) / share / decode_s


def with_decode(timeline: Timeline, decode_s: float, outputs: int) -> pd.DataFrame:
    """A timeline's table with the answer's decoding on the CPU as its last row."""
    start, rest = timeline.total_s, request_s(0.0, decode_s, _count(outputs))
    row = {
        "worker": CPU,
        "work": DECODE,
        "chunk": -1,
        "layer": -1,
        "slot": math.nan,
        "start_s": start,
        "end_s": start + rest,
    }
    return pd.concat([timeline.table, pd.DataFrame([row])], ignore_index=True)


def _count(outputs: int) -> int:
    if outputs < 0:
        raise OptionError(f"an answer of {outputs} tokens does not exist; give 0 or more")
    return outputs


def _check(ttft_s: float, decode_s: float) -> None:
    for name, value in (("ttft_s", ttft_s), ("decode_s", decode_s)):
        if not (math.isfinite(value) and value > 0):
            raise OptionError(f"{name} is {value}; it must be a time in seconds above 0")
