"""Published measurements of other people's devices, as tables with a source for every row.

They were made under their own conditions and are never ranked together with one's own runs. What
they are for: constants of the phones' profiles, and a check of the model that uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from labkit.bundled import DATA_DIR, BundledDataError
from labkit.device.hits import assumed_hit_pct

if TYPE_CHECKING:
    from labkit.device.profile import DeviceProfile

RECORDED_DIR = DATA_DIR / "recorded"


def recorded_runs() -> pd.DataFrame:
    """Streamed and mapped runs: one row each, with source, url, device, model and settings.

    Columns: moe_layers, experts, top_k, path ("mmap", "stream", "stream+overlap"), cache_mib,
    lanes, threads, prompt_tokens, gen_tokens, decode_tok_s, hit_pct, read_mib_per_token,
    compute_s_per_token, io_s_per_token, stall_s_per_token, runs, note. NaN was not published.
    """
    return _table("recorded_runs")


def recorded_models() -> pd.DataFrame:
    """The files of the recorded runs: token_cycle_mib, expert_mib, dense_mib, dense_token_mib."""
    return _table("recorded_models")


def flash_read_ceiling() -> pd.DataFrame:
    """Flash rate of a phone by read size and lanes: read_kib, lanes, mib_s, latency_ms."""
    return _table("flash_read_ceiling")


def htp_points() -> pd.DataFrame:
    """Prefill and decode rates on a Hexagon processor beside CPU and GPU: backend, test, tok_s."""
    return _table("htp_points")


def prefill_runs() -> pd.DataFrame:
    """Prefill of streamed models on a phone's CPU and HTP: prompt_tokens, prefill_s."""
    return _table("prefill_runs")


def decode_rows(profile: DeviceProfile, *, assume_hits: bool = False) -> pd.DataFrame:
    """The recorded runs as the speed model sees them: what a token asked for, and how fast it was.

    Args:
        profile: whose flash curve gives the rate of each row's reads.
        assume_hits: True takes every hit rate from the assumption, as if nothing were known of
            the routing; False takes the recorded bytes a token and assumes only where none are.

    Returns rows with a decode rate: row (its number in the file, from 0), model, path, weight_mib,
    layers, read_mib, flash_mib_s, overlapped, mapped, decode_tok_s, assumed, lossy, note. Where a
    source does not say how many lanes read, four are taken.
    """
    runs = recorded_runs()
    runs = runs.assign(row=range(len(runs))).dropna(subset=["decode_tok_s"])
    models = recorded_models()[
        ["model", "quant", "projections", "token_cycle_mib", "expert_mib", "dense_mib",
         "dense_token_mib", "top_k"]
    ]  # fmt: skip
    rows = runs.merge(models, on=["model", "quant"], suffixes=("", "_full"), how="left")
    cycle = rows["token_cycle_mib"] * rows["top_k"] / rows["top_k_full"]
    mapped = rows["path"] == "mmap"
    # Of a mapped file the page cache holds what memory is left: it acts as a cache without a cliff.
    page_cache = np.maximum(profile.need("usable_mib") - rows["dense_mib"], 0)
    cache = rows["cache_mib"].where(~mapped, page_cache)
    floor = np.where(mapped, 0, cycle)
    assumed = cycle * (
        1 - assumed_hit_pct(cache.to_numpy(), floor, rows["expert_mib"].to_numpy()) / 100
    )
    known = rows["read_mib_per_token"] * (np.nan if assume_hits else 1.0)
    read_kib = cycle * 1024 / (rows["moe_layers"] * rows["top_k"] * rows["projections"])
    lanes = rows["lanes"].fillna(4)
    rates = [profile.flash_mib_s(kib, int(n)) for kib, n in zip(read_kib, lanes, strict=True)]
    return pd.DataFrame(
        {
            "row": rows["row"],
            "model": rows["model"],
            "path": rows["path"],
            "weight_mib": cycle + rows["dense_token_mib"],
            "layers": rows["moe_layers"],
            "read_mib": known.fillna(assumed),
            "flash_mib_s": rates,
            "overlapped": rows["path"] == "stream+overlap",
            "mapped": mapped,
            "decode_tok_s": rows["decode_tok_s"],
            "assumed": known.isna(),
            "lossy": rows["top_k"] < rows["top_k_full"],
            "note": rows["note"].fillna(""),
        }
    )


def _table(name: str) -> pd.DataFrame:
    path = RECORDED_DIR / f"{name}.csv"
    if not path.is_file():
        raise BundledDataError(
            f"The recorded measurements are not at {path}: this labkit was installed without its "
            "data. Clone the repository and run `pip install -e .` in it."
        )
    return pd.read_csv(path)
