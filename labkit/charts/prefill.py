"""Charts of prefill as it was measured here, and as others recorded it elsewhere."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from labkit.charts.theme import CARD, CATEGORICAL, INK, title

_WIDTH = 560
#: One colour a path, whatever subset is measured; devices take the ones that are left.
_PATH_COLOURS = {
    "mmap": CATEGORICAL[0],
    "mmap-random": CATEGORICAL[5],
    "resident": CATEGORICAL[6],
    "repack": CATEGORICAL[2],
    "experts": CATEGORICAL[4],
    "layers": CATEGORICAL[1],
}
_DEVICE_COLOURS = [CATEGORICAL[3], "#882255", "#44AA99"]


def rates_by_length(rates: pd.DataFrame) -> alt.LayerChart | alt.FacetChart:
    """Draw measured prefill rate against prompt length.

    `rates` is `labkit.prefill_lab.result.PrefillResult.rates()`.
    """
    longest = rates[rates["tokens"] == rates["tokens"].max()].set_index("path")["tok_s"]
    shortest = rates[rates["tokens"] == rates["tokens"].min()].set_index("path")["tok_s"]
    best = str(longest.idxmax())
    finding = (
        f"Measured here: {longest.max():,.0f} tokens a second at {rates['tokens'].max()} tokens "
        f"with {best}"
    )
    if len(longest) > 1:
        worst = str(longest.idxmin())
        finding += f", {longest.max() / longest.min():.1f} times {worst}"
    if rates["tokens"].nunique() > 1:
        finding += f"; {shortest.max():,.0f} at {rates['tokens'].min()} tokens at best"
    detail = (
        "Medians of the rounds; bars reach from the slowest to the fastest round. Both axes are "
    )
    detail += "logarithmic."
    base = alt.Chart(rates, width=_WIDTH, height=260).encode(
        x=alt.X(
            "tokens:Q",
            title="prompt tokens",
            scale=alt.Scale(type="log", base=2, nice=False),
            axis=alt.Axis(values=sorted(rates["tokens"].unique()), format="d"),
        ),
        color=_paths(rates),
        tooltip=[
            "path",
            "tokens",
            _figure("tok_s", ",.0f"),
            _figure("low_tok_s", ",.0f"),
            _figure("high_tok_s", ",.0f"),
            _figure("ttft_s", ".3f"),
            _figure("speed_ratio", ".2f"),
        ],
    )
    reach = [0.8 * rates["low_tok_s"].min(), 1.25 * rates["high_tok_s"].max()]
    scale = alt.Scale(type="log", domain=reach, nice=False)
    rate = alt.Y("tok_s:Q", title="prefill (tokens a second)", scale=scale)
    bars = base.mark_rule(strokeWidth=1.5, opacity=0.55).encode(
        y=alt.Y("low_tok_s:Q", title="prefill (tokens a second)", scale=scale),
        y2="high_tok_s:Q",
    )
    lines = base.mark_line(point=alt.OverlayMarkDef(size=45)).encode(y=rate)
    return alt.layer(bars, lines).properties(title=_title(finding, detail))


def whole_requests(requests: pd.DataFrame) -> alt.FacetChart:
    """Draw measured whole requests by path and answer length, the prompt's part apart.

    `requests` is `labkit.prefill_lab.result.PrefillResult.request_table()`.
    """
    table = requests.assign(prompt_s=requests["request_s"] * requests["prefill_pct"] / 100)
    table["answer_s"] = table["request_s"] - table["prompt_s"]
    parts = table.melt(
        ["path", "outputs", "request_s", "prefill_pct"],
        ["prompt_s", "answer_s"],
        var_name="part",
        value_name="seconds",
    )
    parts["part"] = parts["part"].map(
        {"prompt_s": "prompt, up to the first token", "answer_s": "further tokens"}
    )
    parts["order"] = (parts["part"] == "further tokens").astype(int)
    parts["answer"] = [f"{n} token{'s' if n > 1 else ''} out" for n in parts["outputs"]]
    most = table[table["outputs"] == table["outputs"].max()]
    fastest = most.loc[most["request_s"].idxmin()]
    finding = (
        f"Measured here: with {fastest['outputs']} answer tokens after {fastest['tokens']} of "
        f"prompt, {fastest['path']} is done first, and the prompt is "
        f"{fastest['prefill_pct']:.0f} % of its request"
    )
    detail = "Medians of the rounds. A faster prefill can shorten the blue part alone."
    domain = ["prompt, up to the first token", "further tokens"]
    bars = (
        alt.Chart(parts, width=_WIDTH, height=alt.Step(19))
        .mark_bar()
        .encode(
            x=alt.X("sum(seconds):Q", title="seconds"),
            y=alt.Y("path:N", title=None, sort=list(dict.fromkeys(requests["path"]))),
            color=alt.Color(
                "part:N",
                title=None,
                sort=domain,
                scale=alt.Scale(domain=domain, range=[CATEGORICAL[0], CATEGORICAL[4]]),
                legend=alt.Legend(orient="top"),
            ),
            order="order:Q",
            tooltip=["path", "answer", "part", _figure("seconds", ".3f")],
        )
    )
    answers = list(dict.fromkeys(parts.sort_values("outputs")["answer"]))
    return bars.facet(
        row=alt.Row("answer:N", title=None, sort=answers, header=alt.Header(labelAngle=0))
    ).properties(title=_title(finding, detail))


def own_slots(table: pd.DataFrame) -> alt.LayerChart | alt.FacetChart:
    """Draw labkit's own two-slot prefill by chunk length, and what the two-slot model says.

    `table` is of `labkit.prefill_lab.check.replay_table`, runs of one prompt.
    """
    table = table.groupby("chunk", as_index=False).median()
    table["compute, and the rest"] = table["measured_s"] - table["wait_s"]
    table["waiting for reads"] = table["wait_s"]
    table["label"] = [f"{int(n)}" for n in table["chunk"]]
    first, last = table.iloc[0], table.iloc[-1]
    finding = (
        f"Measured here: two slots hide {last['hidden_pct']:.0f} % of the reads in chunks of "
        f"{last['label']} tokens, {first['hidden_pct']:.0f} % in chunks of {first['label']}; the "
        f"model of it is off by {table['error_pct'].abs().max():.1f} % at most"
    )
    detail = (
        f"One prompt of {int(first['tokens'])} tokens, medians of the runs. Bars: measured. Ticks: "
        "the two-slot model, given each layer's own times. Dots: how long reads were under way."
    )
    parts: list[Any] = ["compute, and the rest", "waiting for reads"]
    order = list(table["label"])
    y = alt.Y("label:N", title="tokens of a chunk", sort=order)
    base = alt.Chart(table, width=_WIDTH, height=alt.Step(30)).encode(y=y)
    domain = [*parts, "model", "reads under way"]
    palette = [CATEGORICAL[0], CATEGORICAL[1], INK, CATEGORICAL[5]]
    color = alt.Color(
        "what:N", title=None, sort=domain, scale=alt.Scale(domain=domain, range=palette)
    )
    tip = [
        "chunk:Q",
        _figure("measured_s", ".4f"),
        _figure("predicted_s", ".4f"),
        _figure("error_pct", "+.1f"),
        _figure("wait_s", ".4f"),
        _figure("read_s", ".4f"),
        _figure("hidden_pct", ".0f"),
    ]
    bars = (
        base.transform_fold(parts, as_=["what", "seconds"])
        .transform_calculate(order=f"datum.what == '{parts[0]}' ? 0 : 1")
        .mark_bar(size=16)
        .encode(
            x=alt.X("seconds:Q", title="seconds of the prompt", stack="zero"),
            color=color,
            order=alt.Order("order:Q"),
            tooltip=tip,
        )
    )
    ticks = (
        base.transform_calculate(what="'model'")
        .mark_tick(thickness=2.5, size=26)
        .encode(x="predicted_s:Q", color=color, tooltip=tip)
    )
    dots = (
        base.transform_calculate(what="'reads under way'")
        .mark_point(filled=True, size=70, opacity=1, stroke=CARD, strokeWidth=1)
        .encode(x="read_s:Q", color=color, tooltip=tip)
    )
    return alt.layer(bars, ticks, dots).properties(title=_title(finding, detail))


def recorded_prefills(table: pd.DataFrame) -> alt.LayerChart | alt.FacetChart:
    """Draw recorded phone prefills on the HTP with the two-slot model's figure for each.

    `table` is `labkit.device.pipeline_recorded.recorded_prefills()`.
    """
    table = table.assign(
        run=[
            f"{m} {q}, {n} tokens{f', {cpu} on CPU' if cpu else ''}"
            for m, q, n, cpu in zip(
                table["model"], table["quant"], table["prompt_tokens"], table["on_cpu"], strict=True
            )
        ]
    )
    error = table["error_pct"].abs()
    finding = (
        f"Recorded on a phone by others: the two-slot model is off by {error.median():.0f} % in "
        f"the middle and {error.max():.0f} % at most"
    )
    if (table["error_pct"] < 0).all():
        finding += ", always on the fast side"
    detail = (
        "A 12 GB phone, Hexagon v81, UFS 4; figures of its authors under their conditions, not to "
        "be ranked with this machine's. Bars: recorded. Ticks: modelled from flash rate and HTP "
        "rate; the HTP's rate was fitted to the difference of two of these rows."
    )
    y = alt.Y("run:N", title=None, sort=list(table["run"]), axis=alt.Axis(labelLimit=400))
    base = alt.Chart(table, width=_WIDTH - 210, height=alt.Step(26)).encode(y=y)
    kinds = alt.Scale(domain=["recorded", "modelled"], range=[CATEGORICAL[5], CATEGORICAL[1]])
    tip = [
        "run",
        _figure("recorded_s", ".2f"),
        _figure("modelled_s", ".2f"),
        _figure("error_pct", "+.0f"),
        "source",
    ]
    bars = base.mark_bar(size=13).encode(
        x=alt.X("recorded_s:Q", title="prefill (seconds)"),
        color=alt.Color("kind:N", title=None, scale=kinds),
        tooltip=tip,
    )
    ticks = base.mark_tick(thickness=3, size=22).encode(
        x="modelled_s:Q", color=alt.Color("kind:N", title=None, scale=kinds), tooltip=tip
    )
    return alt.layer(
        bars.transform_calculate(kind="'recorded'"), ticks.transform_calculate(kind="'modelled'")
    ).properties(title=_title(finding, detail))


def recorded_pairs(runs: pd.DataFrame) -> alt.Chart:
    """Draw recorded prefills of one phone on its CPU and on its HTP.

    `runs` is `labkit.device.recorded.prefill_runs()`.
    """
    table = runs.assign(
        run=[
            f"{m} {q}, {n} tokens"
            for m, q, n in zip(runs["model"], runs["quant"], runs["prompt_tokens"], strict=True)
        ]
    )
    pairs = table.pivot(index="run", columns="backend", values="prefill_s")
    gain = (pairs["CPU"] / pairs["HTP"]).dropna()
    finding = (
        f"Recorded on a phone by others: the HTP takes a prompt {gain.min():.1f} to "
        f"{gain.max():.1f} times as fast as the CPU; least at {gain.idxmin()}"
    )
    detail = (
        "A 12 GB phone, Hexagon v81, experts streamed from UFS 4; whole layers through two slots "
        "for the HTP. Conditions of its authors: not to be ranked with this machine's figures."
    )
    kinds = alt.Scale(domain=["HTP", "CPU"], range=[CATEGORICAL[1], CATEGORICAL[5]])
    return (
        alt.Chart(table, width=_WIDTH - 210, height=alt.Step(15))
        .mark_bar()
        .encode(
            y=alt.Y(
                "run:N",
                title=None,
                sort=list(dict.fromkeys(table["run"])),
                axis=alt.Axis(labelLimit=400),
            ),
            yOffset=alt.YOffset("backend:N", sort=["HTP", "CPU"]),
            x=alt.X("prefill_tok_s:Q", title="prefill (tokens a second)"),
            color=alt.Color("backend:N", title=None, scale=kinds),
            tooltip=[
                "run",
                "backend",
                _figure("prefill_tok_s", ".1f"),
                _figure("prefill_s", ".1f"),
                "ubatch",
                "note",
                "source",
            ],
        )
        .properties(title=_title(finding, detail))
    )


def recorded_curve(points: pd.DataFrame) -> alt.Chart:
    """Draw one recorded HTP's prefill rate against prompt length.

    `points` are rows of `labkit.device.recorded.htp_points()` with a column `tokens`.
    """
    by_length = points.sort_values("tokens")
    peak, first = by_length.iloc[by_length["tok_s"].argmax()], by_length.iloc[0]
    finding = (
        f"Recorded by others: an HTP needs width. {first['tok_s']:,.0f} tokens a second at "
        f"{first['tokens']:.0f} tokens, {peak['tok_s']:,.0f} at {peak['tokens']:.0f}"
    )
    detail = f"{peak['model']} {peak['quant']} on a {peak['device']}, Hexagon {peak['htp']}, "
    detail += f"{peak['source']}; all weights in memory."
    return (
        alt.Chart(points, width=_WIDTH, height=200)
        .mark_line(point=alt.OverlayMarkDef(size=45, color=CATEGORICAL[5]), color=CATEGORICAL[5])
        .encode(
            x=alt.X(
                "tokens:Q",
                title="prompt tokens",
                scale=alt.Scale(type="log", base=2, nice=False),
                axis=alt.Axis(values=sorted(points["tokens"].unique()), format="d"),
            ),
            y=alt.Y("tok_s:Q", title="prefill (tokens a second)"),
            tooltip=["tokens", _figure("tok_s", ",.0f"), "sd", "note"],
        )
        .properties(title=_title(finding, detail))
    )


def _paths(table: pd.DataFrame) -> alt.Color:
    names = list(dict.fromkeys(table["path"]))
    spare = iter(_DEVICE_COLOURS * len(names))
    palette = [_PATH_COLOURS.get(name) or next(spare) for name in names]
    return alt.Color("path:N", sort=names, scale=alt.Scale(domain=names, range=palette))


def _title(finding: str, detail: str) -> alt.TitleParams:
    """A title whose lines do not break before a percent sign."""
    return title(finding.replace(" %", "\u00a0%"), detail, width_px=_WIDTH + 90)


def _figure(column: str, form: str) -> alt.Tooltip:
    return alt.Tooltip(f"{column}:Q", format=form)
