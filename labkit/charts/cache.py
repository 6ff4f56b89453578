"""Charts of a cache of experts: what a budget buys, what more would, and where the misses are."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from labkit.charts.theme import CATEGORICAL, FAINT_INK, INK, title

_WIDTH = 560
#: One colour and dash for each policy, in every chart. A policy with shares by layer has the colour
#: of the one that it shares out, dashed; the optimum is in ink.
_SOLID, _BY_LAYER, _OPTIMUM = [1, 0], [2, 2], [6, 3]
_LOOKS = {
    "lru": (CATEGORICAL[0], _SOLID),
    "lfu": (CATEGORICAL[1], _SOLID),
    "lrfu": (CATEGORICAL[5], _SOLID),
    "slru": (CATEGORICAL[3], _SOLID),
    "s3-fifo": (CATEGORICAL[4], _SOLID),
    "layer-lru": (CATEGORICAL[0], _BY_LAYER),
    "layer-lfu": (CATEGORICAL[1], _BY_LAYER),
    "echo": (CATEGORICAL[2], _SOLID),
    "random": (CATEGORICAL[6], _SOLID),
    "belady": (INK, _OPTIMUM),
}


def hit_rate_curves(curve: pd.DataFrame, cycle_mib: float, tokens: int) -> alt.VConcatChart:
    """Draw hit rate and bytes read per token against the budget, with a slider that reads them off.

    `curve` is a table of `labkit.replay.replay` at evenly spaced budgets, `cycle_mib` the token
    cycle, `tokens` how many tokens the trace has, prompts included.
    """
    curve = curve.assign(token_mib=curve["read_mib"] / max(tokens, 1))
    budgets = np.sort(curve["budget_mib"].unique())
    place = len(budgets) // 3
    middle = float(budgets[place])
    step = float(np.diff(budgets).min()) if len(budgets) > 1 else max(middle, 1.0)
    # Rounded for people: the chart takes the nearest budget. Its end is a whole number of steps
    # from its beginning, for a slider goes no further than its last whole step.
    low, stride = _short(budgets[0]), _short(step)
    stops = [round(low + i * stride, 6) for i in range(len(budgets))]
    slider = alt.param(
        name="budget",
        value=stops[place],
        bind=alt.binding_range(min=low, max=stops[-1], step=stride, name="budget (MiB) "),
    )
    near = f"abs(datum.budget_mib - budget) <= {step * 0.5001!r}"
    detail = (
        f"Dashed line: the token cycle of {cycle_mib:,.1f} MiB, what one token needs in all "
        "layers. belady is the optimum, which knows the future. The figures at the right are those "
        "at the thin line; move it with the slider."
    )
    panels = [
        _curve(curve, "hit_pct", "lookups that hit (%)", ".1f", near, cycle_mib),
        _curve(curve, "token_mib", "MiB read per token", ".2f", near, cycle_mib),
    ]
    return (
        alt.vconcat(*panels, spacing=14)
        .add_params(slider)
        .properties(title=_title(_what_a_budget_buys(curve, middle), detail))
    )


def marginal_value(
    curve: pd.DataFrame, tokens: int, policy: str = "lru"
) -> alt.LayerChart | alt.FacetChart:
    """Draw what the next 100 MiB of budget save per token, under `policy` and the optimum.

    Where all budgets are below 1,000 MiB it is the next MiB. `curve` and `tokens` as in
    `hit_rate_curves`; it must hold `policy` and "belady".
    """
    most = float(curve["budget_mib"].max())
    step, unit, per_mib = (100, "MiB", 1) if most >= 1000 else (1, "KiB", 1024)
    table = pd.concat(
        [_saved(curve, name, tokens, step * per_mib) for name in (policy, "belady")],
        ignore_index=True,
    )
    named = f"{step} MiB" if step > 1 else "MiB"
    base = alt.Chart(table, width=_WIDTH, height=190).encode(
        x=alt.X("budget_mib:Q", title="budget (MiB)"),
        y=alt.Y("saved:Q", title=f"{unit} saved per token and {named}"),
        color=_policies(table),
        tooltip=["policy", _figure("budget_mib", ",.1f"), _figure("saved", ".1f")],
    )
    lines = base.mark_line(interpolate="step")
    detail = (
        f"A slope: how much less is read per token from one budget to the next, per {named}. "
        "It holds between these two only."
    )
    finding = _what_more_is_worth(table[table["policy"] == policy], policy, named, unit)
    return alt.layer(lines, base.mark_point(filled=True, size=28)).properties(
        title=_title(finding, detail)
    )


def _saved(curve: pd.DataFrame, policy: str, tokens: int, step: float) -> pd.DataFrame:
    """Between each two budgets, how much less is read per token, for `step` of budget."""
    rows = curve[curve["policy"] == policy].sort_values("budget_mib")
    more = rows["budget_mib"].diff()
    saved = -step * rows["read_mib"].diff() / max(tokens, 1) / more
    middle = rows["budget_mib"] - more / 2
    return pd.DataFrame({"budget_mib": middle, "policy": policy, "saved": saved}).iloc[1:]


def _what_more_is_worth(saved: pd.DataFrame, policy: str, named: str, unit: str) -> str:
    if not saved["saved"].gt(0).any():
        return f"More memory saves nothing under {policy} here"
    best, last = saved.iloc[int(saved["saved"].argmax())], saved.iloc[-1]
    text = "{:.0f}" if best["saved"] >= 10 else "{:.2g}"
    return (
        f"Under {policy} memory is worth most at {best['budget_mib']:,.1f} MiB: there each {named} "
        f"saves {text.format(best['saved'])} {unit} of reads per token; at "
        f"{last['budget_mib']:,.1f} MiB {text.format(round(last['saved'], 3) + 0.0)} {unit}"
    )


def misses_by_layer(batches: pd.DataFrame, budget_mib: float, policy: str) -> alt.Chart:
    """Draw the bytes read in each layer, for the prompts and for the generated tokens.

    `batches` is a table of `labkit.replay.replay_batches`.
    """
    table = batches.groupby(["layer", "phase"], as_index=False)[["misses", "read_bytes"]].sum()
    table["read_mib"] = table["read_bytes"] / 2**20
    by_layer = table.groupby("layer")["read_mib"].sum()
    total = table["read_mib"].sum()
    prompt = table.loc[table["phase"] == "prefill", "read_mib"].sum()
    finding = (
        f"Layer {by_layer.idxmax()} reads most: {100 * by_layer.max() / total:.0f} % of all bytes "
        f"(an even share: {100 / len(by_layer):.0f} %); the prompts cause "
        f"{100 * prompt / total:.0f} %"
        if total
        else "Nothing had to be read"
    )
    detail = f"Policy {policy} with {budget_mib:,.1f} MiB."
    return (
        alt.Chart(table.drop(columns="read_bytes"), width=_WIDTH, height=190)
        .mark_bar()
        .encode(
            x=alt.X("layer:O", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("read_mib:Q", title="MiB read"),
            color=alt.Color(
                "phase:N", scale=alt.Scale(domain=["decode", "prefill"], range=CATEGORICAL[:2])
            ),
            tooltip=["layer", "phase", "misses", _figure("read_mib", ".1f")],
        )
        .properties(title=_title(finding, detail))
    )


def predicted_and_live(curve: pd.DataFrame, live: pd.DataFrame) -> alt.LayerChart | alt.FacetChart:
    """Draw what a replay predicts for the run itself, and what the live cache then did.

    `curve` is a table of `labkit.replay.replay`; `live` has columns budget_mib, policy, hit_pct
    (measured) and predicted_pct.
    """
    off = float((live["hit_pct"] - live["predicted_pct"]).abs().max())
    finding = (
        "The live cache does exactly what the replay predicts"
        if off < 0.005
        else f"The live cache differs from the replay by {off:.2f} points at most"
    )
    detail = "Lines: replay of one recorded run. Circles: the same run again, live, at each budget."
    lines = (
        alt.Chart(curve[curve["policy"].isin(live["policy"])], width=_WIDTH, height=220)
        .mark_line()
        .encode(
            x=alt.X("budget_mib:Q", title="budget (MiB)"),
            y=alt.Y("hit_pct:Q", title="lookups that hit (%)", scale=alt.Scale(domain=[0, 100])),
            color=_policies(live),
        )
    )
    points = (
        alt.Chart(live)
        .mark_point(size=110, strokeWidth=2.2, filled=False)
        .encode(
            x="budget_mib:Q",
            y="hit_pct:Q",
            color=_policies(live),
            tooltip=[
                "policy",
                _figure("budget_mib", ",.2f"),
                _figure("hit_pct", ".2f"),
                _figure("predicted_pct", ".2f"),
            ],
        )
    )
    return alt.layer(lines, points).properties(title=_title(finding, detail))


def _curve(
    curve: pd.DataFrame, column: str, name: str, form: str, near: str, cycle_mib: float
) -> alt.LayerChart | alt.FacetChart:
    top = 100.0 if column.endswith("_pct") else float(curve[column].max()) or 1.0
    y = alt.Y(f"{column}:Q", title=name, scale=alt.Scale(domain=[0, top], nice=False))
    base = alt.Chart(curve, width=_WIDTH, height=210).encode(
        x=alt.X("budget_mib:Q", title="budget (MiB)", scale=alt.Scale(nice=False)),
        y=y,
        color=_policies(curve, legend=None),
        tooltip=["policy", _figure("budget_mib", ",.1f"), _figure(column, form)],
    )
    lines = base.mark_line().encode(strokeDash=_dashes(curve))
    picked = base.transform_filter(near)
    points = picked.mark_point(filled=True, size=55, opacity=1)
    marker = (
        alt.Chart(curve[["budget_mib"]].drop_duplicates())
        .transform_filter(near)
        .mark_rule(color=FAINT_INK, strokeWidth=1)
        .encode(x="budget_mib:Q")
    )
    figures = _read_off(curve, column, form, near, y, top)
    cliff = (
        alt.Chart(pd.DataFrame({"budget_mib": [cycle_mib]}))
        .mark_rule(strokeDash=[3, 4], color=FAINT_INK, strokeWidth=1.5)
        .encode(x="budget_mib:Q")
    )
    return alt.layer(cliff, marker, lines, points, *figures)


def _read_off(
    curve: pd.DataFrame, column: str, form: str, near: str, y: alt.Y, top: float
) -> list[alt.Chart]:
    """The legend beside the right edge: a line, a name and the figure at the slider's budget."""
    places = {name: top * (0.96 - 0.105 * i) for i, name in enumerate(_names(curve))}
    table = curve.assign(shown=curve[column])
    table[column] = table["policy"].map(places)
    base = (
        alt.Chart(table)
        .transform_filter(near)
        .transform_calculate(text=f"datum.policy + '  ' + format(datum.shown, '{form}')")
        .encode(y=y, color=_policies(curve, legend=None))
    )
    words = base.mark_text(align="left", dx=44, fontSize=12).encode(
        x=alt.value(_WIDTH), text="text:N"
    )
    lines = base.mark_rule(strokeWidth=2.5).encode(
        x=alt.value(_WIDTH + 12), x2=alt.value(_WIDTH + 38), strokeDash=_dashes(curve)
    )
    return [lines, words]


def _names(table: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(table["policy"]))


def _policies(table: pd.DataFrame, **options: Any) -> alt.Color:
    names = _names(table)
    scale = alt.Scale(domain=names, range=[_LOOKS[name][0] for name in names])
    return alt.Color("policy:N", sort=names, scale=scale, **options)


def _dashes(table: pd.DataFrame) -> alt.StrokeDash:
    names = _names(table)
    scale = alt.Scale(domain=names, range=[_LOOKS[name][1] for name in names])
    return alt.StrokeDash("policy:N", sort=names, scale=scale, legend=None)


def _short(mib: float) -> float:
    """The figure to three digits, and no fraction of a large one."""
    return float(f"{mib:.3g}") if mib < 1000 else float(round(mib))


def _title(finding: str, detail: str) -> alt.TitleParams:
    """A title whose lines do not break before a percent sign."""
    return title(finding.replace(" %", "\u00a0%"), detail, width_px=_WIDTH + 90)


def _figure(column: str, form: str) -> alt.Tooltip:
    return alt.Tooltip(f"{column}:Q", format=form)


def _what_a_budget_buys(curve: pd.DataFrame, budget_mib: float) -> str:
    at = curve[np.isclose(curve["budget_mib"], budget_mib)].set_index("policy")["hit_pct"]
    if not curve["hit_pct"].gt(0).any():
        return "No budget finds anything: no expert is asked for twice"
    online = at.drop("belady", errors="ignore")
    best = str(online.idxmax())
    text = f"{budget_mib:,.1f} MiB buy {online[best]:.0f} % hits with {best}, the best policy there"
    if "lru" in online and best != "lru":
        text += f", and {online['lru']:.0f} % with lru"
    if "belady" in at:
        text += f"; the optimum would find {at['belady']:.0f} %"
    return text
