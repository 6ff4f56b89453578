"""The tables behind the routing charts: load, change over time, and what two runs share.

A routing table is `RouteTrace.table`: one row per token, layer and slot, with columns `phase`,
`step` (the token's position), `layer`, `expert`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd


def load_table(table: pd.DataFrame, n_expert: int) -> pd.DataFrame:
    """Return a row for every layer and expert: tokens, share_pct, times_fair.

    `tokens` chose the expert; `share_pct` is their part of all tokens that the layer routed;
    `times_fair` is that share over the one of even routing (top-k / experts). Experts that no token
    chose are there with 0. Empty input gives an empty table.
    """
    layers = np.sort(table["layer"].unique())
    grid = pd.MultiIndex.from_product([layers, np.arange(n_expert)], names=["layer", "expert"])
    counts = table.groupby(["layer", "expert"]).size().reindex(grid, fill_value=0)
    out = counts.rename("tokens").reset_index()
    routed = table.groupby("layer")["step"].nunique()
    slots = table.groupby("layer").size() / routed
    share = out["tokens"] / out["layer"].map(routed)
    return out.assign(share_pct=100 * share, times_fair=share * n_expert / out["layer"].map(slots))


def over_time_table(table: pd.DataFrame, n_expert: int, window: int = 16) -> pd.DataFrame:
    """Return step, churn_pct, active_pct for every token from the second on; means over layers.

    Churn is the part of a token's experts in a layer that the token before did not choose. The
    active set is the part of a layer's experts that the last `window` tokens chose together; it is
    missing (NaN) for tokens with fewer before them. Layers that did not route a token are left out
    of its means.
    """
    chosen = _one_hot(table, n_expert)  # (tokens, layers, experts)
    steps = np.sort(table["step"].unique())
    routed = np.asarray(chosen.any(axis=2))
    both = routed[1:] & routed[:-1]
    fresh = (chosen[1:] & ~chosen[:-1]).sum(axis=2) / np.maximum(chosen[1:].sum(axis=2), 1)
    churn = _mean_where(fresh, both)
    # how often each expert was chosen in the window that ends with a token, by running sums
    sums = np.concatenate([np.zeros_like(chosen[:1], dtype=np.int32), chosen.cumsum(axis=0)])
    active = np.full(len(steps), np.nan)
    if len(steps) >= window:
        in_window = (sums[window:] - sums[:-window]) > 0
        active[window - 1 :] = in_window.mean(axis=(1, 2))
    return pd.DataFrame(
        {"step": steps[1:], "churn_pct": 100 * churn, "active_pct": 100 * active[1:]}
    )


def overlap_table(one: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Return how much two runs share, token by token: token, layer, overlap_pct.

    Both tables hold the same tokens in the same order; `token` numbers them from 0. The overlap is
    the part of the experts that the token chose in both runs. Only layers that routed the token in
    both are there.
    """
    left, right = (_numbered(table) for table in (one, other))
    keys = ["token", "layer", "expert"]
    slots = left.groupby(["token", "layer"]).size().rename("slots")
    both_routed = slots.index.intersection(right.groupby(["token", "layer"]).size().index)
    shared = left[keys].merge(right[keys], on=keys).groupby(["token", "layer"]).size()
    shared = shared.reindex(both_routed, fill_value=0)
    out = (100 * shared / slots.reindex(both_routed)).rename("overlap_pct")
    return out.reset_index()


def _numbered(table: pd.DataFrame) -> pd.DataFrame:
    order = {step: i for i, step in enumerate(np.sort(table["step"].unique()))}
    return table.assign(token=table["step"].map(order))


def _one_hot(table: pd.DataFrame, n_expert: int) -> np.ndarray:
    """Return (tokens, layers, experts) bool: who was chosen."""
    steps, token = np.unique(table["step"].to_numpy(), return_inverse=True)
    layers, layer = np.unique(table["layer"].to_numpy(), return_inverse=True)
    chosen: np.ndarray = np.zeros((len(steps), len(layers), n_expert), dtype=bool)
    chosen[token, layer, table["expert"].to_numpy()] = True
    return chosen


def _mean_where(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis of the `values` that `mask` admits; NaN if none."""
    counts = mask.sum(axis=-1)
    sums = np.where(mask, values, 0).sum(axis=-1)
    return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)
