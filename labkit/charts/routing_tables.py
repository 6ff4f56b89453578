"""The tables behind the routing charts, in percent and by token; formulas: `routing_metrics`.

A routing table is `RouteTrace.table`: one row per token, layer and slot, with columns `phase`,
`step` (the token's position), `layer`, `expert`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from labkit import routing_metrics


def load_table(table: pd.DataFrame, n_expert: int) -> pd.DataFrame:
    """Return a row for every layer and expert: tokens, share_pct, times_fair.

    `tokens` chose the expert; `share_pct` is their part of all tokens that the layer routed;
    `times_fair` is that share over the one of even routing (top-k / experts).
    """
    load = routing_metrics.expert_load(table, n_expert)
    routed = load["layer"].map(table.groupby("layer")["step"].nunique())
    return pd.DataFrame(
        {
            "layer": load["layer"],
            "expert": load["expert"],
            "tokens": load["choices"],
            "share_pct": 100 * load["choices"] / routed,
            "times_fair": load["times_fair"],
        }
    )


def over_time_table(table: pd.DataFrame, n_expert: int, window: int = 16) -> pd.DataFrame:
    """Return step, churn_pct, active_pct for every token from the second on; means over layers.

    Churn is the part of a token's experts in a layer that the token before did not choose. The
    active set is the part of a layer's experts that the last `window` tokens chose together; it is
    missing (NaN) for tokens with fewer before them. Layers that did not route a token are left out
    of its means.
    """
    churn = routing_metrics.churn(table).groupby("step")["churn"].mean()
    active = routing_metrics.active_set(table, window).groupby("step")["active"].mean()
    return pd.DataFrame(
        {
            "step": churn.index.to_numpy(),
            "churn_pct": 100 * churn.to_numpy(),
            "active_pct": 100 * active.reindex(churn.index).to_numpy(float) / n_expert,
        }
    )


def overlap_table(one: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Return how much two runs over the same tokens share, by layer: layer, overlap_pct.

    The tokens may lie at different positions: their order counts. The overlap is the part of the
    experts that a token chose in both runs.
    """
    shared = routing_metrics.agreement(_numbered(one), _numbered(other))
    return pd.DataFrame({"layer": shared["layer"], "overlap_pct": 100 * shared["agreement"]})


def _numbered(table: pd.DataFrame) -> pd.DataFrame:
    """The same rows with the tokens numbered from 0, as one turn."""
    order = {step: number for number, step in enumerate(np.sort(table["step"].unique()))}
    return table.assign(turn=0, step=table["step"].map(order))
