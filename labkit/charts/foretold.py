"""A chart of prefetch: which part of each layer's choices was foretold, beside the control."""

from __future__ import annotations

import altair as alt
import pandas as pd

from labkit.charts.theme import title
from labkit.prefetch_lab import foretold

_NAMES = {
    "router": "next layer's router, this layer's input",
    "previous": "what the token before chose",
    "control": "control: a router on its own input",
}
_COLOURS = ["#0072B2", "#E69F00", "#8A94A3"]


def foretold_by_layer(layers: pd.DataFrame) -> alt.LayerChart | alt.FacetChart:
    """Draw the part of each layer's choices that each kind of prefetch foretold.

    `layers` is that of a `labkit.prefetch_lab.PrefetchComparison`. The control counts tokens whose
    choice a layer's own router explains; near ties are left out.
    """
    found = layers.loc[layers["recall"].notna(), ["layer", "prefetch", "recall"]]
    checked = layers[layers["prefetch"] == "router"]
    shown = found
    if len(checked):
        n_checked = checked["control_right"] + checked["control_wrong"]
        control = checked["control_right"] / n_checked.where(n_checked > 0)
        control = pd.DataFrame({"layer": checked["layer"], "recall": control}).dropna()
        shown = pd.concat([control.assign(prefetch="control"), found], ignore_index=True)
    shown = shown.assign(
        pct=(100 * shown["recall"]).astype(float), by=shown["prefetch"].map(_NAMES)
    )
    together = foretold(layers).set_index("prefetch")["recall_pct"]
    finding = f"The token before foretells {together['previous']:.0f} % of the choices"
    detail = "The routers of this model cannot be asked about the next layer."
    if "router" in together:
        finding = (
            f"The next layer's router foretells {together['router']:.0f} % of the choices, "
            f"the token before {together['previous']:.0f} %"
        )
        right, wrong = int(checked["control_right"].sum()), int(checked["control_wrong"].sum())
        detail = (
            "Control: asked about its own layer's input, a router names what llama.cpp chose "
            f"{right} times of {right + wrong}."
        )
    lines = alt.Chart(shown[["layer", "pct", "by"]], width=560, height=260).encode(
        x=alt.X("layer:O", title="MoE layer", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("pct:Q", title="right, % of its choices", scale=alt.Scale(domain=[0, 100])),
        color=alt.Color(
            "by:N",
            title=None,
            scale=alt.Scale(domain=list(_NAMES.values()), range=_COLOURS),
            legend=alt.Legend(orient="bottom", labelLimit=300, columns=2),
        ),
        tooltip=["layer", "by", alt.Tooltip("pct:Q", format=".1f")],
    )
    chart = alt.layer(lines.mark_line(), lines.mark_point(filled=True, size=45, opacity=1))
    return chart.properties(title=title(finding, detail))
