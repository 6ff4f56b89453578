"""Charts of routing: who does the work, how it changes over time, what the context does to it."""

from __future__ import annotations

from collections.abc import Mapping

import altair as alt
import numpy as np
import pandas as pd

from labkit.charts.routing_tables import load_table, over_time_table, overlap_table
from labkit.charts.theme import CATEGORICAL, FAINT_INK, title

_TILE = 240  # pixels: height of a heatmap of many layers


def expert_load(table: pd.DataFrame, n_expert: int) -> alt.Chart:
    """Draw the load of every expert in every layer, in multiples of its fair share.

    `table` is a routing table (see `routing_tables`); `n_expert` counts the experts of a layer.
    """
    load = load_table(table, n_expert)
    top = load.iloc[load["times_fair"].to_numpy().argmax()]
    idle = int((load["tokens"] == 0).sum())
    never = "every expert was chosen" if idle == 0 else f"{idle} of {len(load)} were never chosen"
    finding = (
        f"Expert {top['expert']:.0f} of layer {top['layer']:.0f} works {top['times_fair']:.1f} "
        f"times its fair share; {never}"
    )
    detail = f"Share of {table['step'].nunique()} tokens over the share of even routing (1 = fair)."
    return _load_heatmap(load, width=640).properties(title=title(finding, detail, width_px=640))


def active_set_and_churn(
    table: pd.DataFrame, n_expert: int, *, window: int = 16
) -> alt.VConcatChart:
    """Draw churn and active set along the tokens, each beside what random routing would give."""
    series = over_time_table(table, n_expert, window)
    slots = table.groupby(["step", "layer"]).size().mean()
    random_churn = 100 * (1 - slots / n_expert)
    random_active = 100 * (1 - (1 - slots / n_expert) ** window)
    finding = (
        f"From one token to the next {series['churn_pct'].mean():.0f} % of the experts change "
        f"(random routing: {random_churn:.0f} %)"
    )
    if series["active_pct"].notna().any():
        finding += (
            f"; {window} tokens in a row need {series['active_pct'].mean():.0f} % of all experts "
            f"(random: {random_active:.0f} %)"
        )
    detail = "Means over the layers; dashed: random routing."
    churn = _line(series, "churn_pct", "experts changed (%)", CATEGORICAL[1], random_churn)
    active = _line(
        series, "active_pct", f"experts in {window} tokens (%)", CATEGORICAL[0], random_active
    )
    return alt.vconcat(churn, active, spacing=14).properties(
        title=title(finding, detail, width_px=640)
    )


def same_tokens_two_contexts(
    tables: Mapping[str, pd.DataFrame], n_expert: int, *, control_pct: float | None = None
) -> alt.HConcatChart:
    """Draw two runs of the same tokens side by side: load by layer and expert after two contexts.

    `tables` maps two labels to routing tables of the same tokens. `control_pct` is the overlap of
    two contexts of one kind, if it was measured.
    """
    (one, first), (other, second) = tables.items()
    overlap = overlap_table(first, second)["overlap_pct"].mean()
    slots = first.groupby(["step", "layer"]).size().mean()
    finding = (
        f"The same {first['step'].nunique()} tokens keep {overlap:.0f} % of their experts when "
        f"they follow {other} and not {one}"
    )
    beside = [f"random routing would keep {100 * slots / n_expert:.0f} %"]
    if control_pct is not None:
        beside.insert(0, f"two {one} contexts keep {control_pct:.0f} %")
    detail = f"For comparison: {', '.join(beside)}. Share of the tokens that chose an expert."
    loads = [load_table(table, n_expert) for table in (first, second)]
    top = max(load["share_pct"].max() for load in loads)
    panels = [
        _load_heatmap(load, width=330, value="share_pct", top=top).properties(title=f"after {name}")
        for load, name in zip(loads, (one, other), strict=True)
    ]
    return alt.hconcat(*panels, spacing=20).properties(title=title(finding, detail, width_px=720))


def _load_heatmap(
    load: pd.DataFrame, *, width: int, value: str = "times_fair", top: float | None = None
) -> alt.Chart:
    layers, experts = load["layer"].nunique(), load["expert"].nunique()
    titles = {"times_fair": "times its fair share", "share_pct": "tokens (%)"}
    domain = [0, float(load[value].max() if top is None else top)]
    every = int(np.ceil(experts / (width / 20)))
    ticks = list(range(0, experts, every))
    axis = alt.Axis(values=ticks, labelAngle=0, ticks=False)
    return (
        alt.Chart(load.round({"share_pct": 2, "times_fair": 3}))
        .mark_rect()
        .encode(
            x=alt.X("expert:O", axis=axis),
            y=alt.Y("layer:O", axis=alt.Axis(ticks=False, labelOverlap=True)),
            color=alt.Color(f"{value}:Q", title=titles[value], scale=alt.Scale(domain=domain)),
            tooltip=[
                "layer",
                "expert",
                "tokens",
                alt.Tooltip("share_pct", title="share of the tokens (%)", format=".1f"),
                alt.Tooltip("times_fair", title="times its fair share", format=".2f"),
            ],
        )
        .properties(width=width, height=max(110, min(_TILE, 24 * layers)))
    )


def _line(
    series: pd.DataFrame, column: str, name: str, colour: str, baseline: float
) -> alt.LayerChart | alt.FacetChart:
    y = alt.Y(f"{column}:Q", title=name, scale=alt.Scale(domain=[0, 100]))
    x = alt.X("step:Q", title="position of the token", scale=alt.Scale(zero=False, nice=False))
    tooltip = ["step", alt.Tooltip(column, title=name, format=".0f")]
    base = alt.Chart(series, width=640, height=130).encode(x=x, y=y, tooltip=tooltip)
    thin = base.mark_line(color=colour, opacity=0.35, strokeWidth=1.5)
    smooth = (
        base.transform_window(smooth=f"mean({column})", frame=[-4, 4])
        .mark_line(color=colour)
        .encode(y=alt.Y("smooth:Q", title=name))
    )
    rule = (
        alt.Chart(pd.DataFrame({"random": [baseline]}))
        .mark_rule(strokeDash=[5, 4], color=FAINT_INK)
        .encode(y="random:Q")
    )
    return alt.layer(rule, thin, smooth)
