"""Charts of the two-slot pipeline: all figures are modelled, and their titles say so."""

from __future__ import annotations

import math

import altair as alt
import pandas as pd

from labkit.charts.theme import CARD, CATEGORICAL, FAINT_INK, title
from labkit.device.pipeline import (
    BARRIER,
    COMPUTE,
    COPY,
    CPU,
    DECODE,
    DEVICE,
    FALLBACK,
    LAYOUT,
    READ,
    READER,
    SYNC,
    TAIL,
    WAIT,
    Timeline,
)
from labkit.device.pipeline_closed import closed_prefill_s
from labkit.device.pipeline_request import request_s

_WIDTH = 560
_WORK_COLOURS = {
    READ: CATEGORICAL[5],
    COPY: CATEGORICAL[2],
    LAYOUT: "#44AA99",
    COMPUTE: CATEGORICAL[0],
    WAIT: CATEGORICAL[1],
    BARRIER: CATEGORICAL[6],
    SYNC: CATEGORICAL[4],
    FALLBACK: CATEGORICAL[3],
    TAIL: "#882255",
    DECODE: "#B8860B",
}
_REQUEST_PARTS = {
    "waiting for reads": CATEGORICAL[1],
    "compute of the prompt": CATEGORICAL[0],
    "further tokens": CATEGORICAL[4],
}


def timeline(
    made: Timeline, *, label: str, layers: int | None = None, device: str = DEVICE
) -> alt.Chart:
    """Draw who works when.

    Args:
        made: a schedule.
        label: where its times come from: "Modelled" or "Replayed from measured times".
        layers: draw until so many layers are computed; None is all of it.
        device: what computes.
    """
    computed = made.table.loc[made.table["work"].isin([COMPUTE, TAIL]), "end_s"]
    end = made.total_s if layers is None else float(computed.iloc[:layers].max())
    table = made.table[made.table["start_s"] < end].copy()
    table["end_s"] = table["end_s"].clip(upper=end)
    table["worker"] = table["worker"].replace(DEVICE, device)
    hidden = made.hidden_pct
    finding = f"{label}: the prompt takes {_seconds(made.total_s)}"
    if not math.isnan(hidden):
        finding += (
            f"; {hidden:.0f} % of the preparation runs beside compute, which waits for "
            f"{_seconds(made.wait_s)}"
        )
    detail = "A slot is filled again only when the layer in it is done."
    if end < made.total_s:
        detail = f"The first {_seconds(end)} of it. " + detail
    works = [work for work in _WORK_COLOURS if work in set(table["work"])]
    return (
        alt.Chart(table, width=_WIDTH, height=alt.Step(46))
        .mark_bar(stroke=CARD, strokeWidth=0.6)
        .encode(
            x=alt.X("start_s:Q", title="seconds", scale=alt.Scale(domain=[0, end], nice=False)),
            x2="end_s:Q",
            y=alt.Y("worker:N", title=None, sort=[READER, device, CPU]),
            color=alt.Color(
                "work:N",
                title=None,
                sort=works,
                scale=alt.Scale(domain=works, range=[_WORK_COLOURS[w] for w in works]),
                legend=alt.Legend(orient="bottom", columns=4),
            ),
            tooltip=[
                "worker",
                "work",
                "chunk",
                "layer",
                "slot",
                _figure("start_s", ".4f"),
                _figure("end_s", ".4f"),
            ],
        )
        .properties(title=_title(finding, detail))
    )


def sliders(
    chunks: pd.DataFrame,
    *,
    model: str,
    tokens: int,
    decode_s: float,
    device_gflop_s: float,
    read_gb_s: float,
    chunk: int,
    outputs: int,
) -> alt.VConcatChart:
    """Draw a modelled prefill and request, with sliders for what the reader wants to try.

    Args:
        chunks: a table of `labkit.device.pipeline_closed.chunk_table`.
        model, tokens: what is modelled, for the title.
        decode_s: seconds of a further token, on the CPU.
        device_gflop_s, read_gb_s, chunk, outputs: where the sliders stand at first; what a still
            picture shows. `chunk` is taken to the nearest of the table.
    """
    read_gb_s = round(read_gb_s, 2)  # what a slider can show
    start = chunks.iloc[(chunks["chunk"] - chunk).abs().argmin()]
    prefill = closed_prefill_s(start, read_gb_s, device_gflop_s)
    whole = request_s(prefill, decode_s, outputs)
    finding = (
        f"Modelled, not measured: {model}, {tokens} tokens in chunks of {start['chunk']:.0f} take "
        f"{_seconds(prefill)} ({tokens / prefill:,.0f} tok/s), {100 * prefill / whole:.0f} % of a "
        f"request with {outputs} answer tokens"
    )
    detail = (
        f"Sliders start at {device_gflop_s:,.0f} GFLOP/s, {read_gb_s:.2f} GB/s, chunk "
        f"{start['chunk']:.0f}, {outputs} answer tokens; the title speaks of that start. Decode "
        f"stays on the CPU at {1 / decode_s:.1f} tok/s, as the planner expects. Where compute is "
        "above preparation, reads are hidden."
    )
    params = [
        _slider("device", "device (GFLOP/s) ", device_gflop_s, 50.0, 10_000.0, 50.0),
        _slider("flash", "flash (GB/s) ", read_gb_s, 0.1, 8.0, 0.05),
        _slider("outputs", "answer tokens ", float(outputs), 1.0, 2048.0, 1.0),
        alt.param(
            name="chunk",
            value=int(start["chunk"]),
            bind=alt.binding_select(options=[int(c) for c in chunks["chunk"]], name="chunk "),
        ),
    ]
    base = _modelled(alt.Chart(chunks, width=_WIDTH), tokens, decode_s)
    return (
        alt.vconcat(_steps(base), _rate(base), _request(base), spacing=16)
        .resolve_scale(color="independent")
        .add_params(*params)
        .properties(title=_title(finding, detail))
    )


def saved_by_prefill(table: pd.DataFrame, *, label: str) -> alt.LayerChart | alt.FacetChart:
    """Draw what part of a request a faster prefill saves as the answer grows (Amdahl's law).

    Args:
        table: of `labkit.device.pipeline_request.amdahl`.
        label: where the times come from, for the title.
    """
    factors = sorted(table["factor"].unique())
    names = [_factor(f) for f in factors]
    table = table.assign(prefill=table["factor"].map(dict(zip(factors, names, strict=True))))
    top = table[table["factor"] == factors[-1]].sort_values("outputs")
    first, last = top.iloc[0], top.iloc[-1]
    finding = (
        f"{label}: {names[-1]} saves {first['saved_pct']:.3g} % of a request with "
        f"{first['outputs']:.0f} answer token{'s' if first['outputs'] > 1 else ''}, and "
        f"{last['saved_pct']:.2g} % with {last['outputs']:.0f}"
    )
    detail = "Computed by Amdahl's law from time to first token and time per further token."
    colours = [CATEGORICAL[5], CATEGORICAL[0], CATEGORICAL[2], CATEGORICAL[1], CATEGORICAL[6]]
    chart = (
        alt.Chart(table, width=_WIDTH, height=230)
        .mark_line(point=alt.OverlayMarkDef(size=30))
        .encode(
            x=alt.X(
                "outputs:Q",
                title="answer tokens",
                scale=alt.Scale(type="log", base=2, nice=False),
                axis=alt.Axis(values=sorted(table["outputs"].unique()), format="d"),
            ),
            y=alt.Y("saved_pct:Q", title="of the request saved (%)"),
            color=alt.Color(
                "prefill:N",
                title="prefill",
                sort=names[::-1],
                scale=alt.Scale(domain=names[::-1], range=colours[: len(names)][::-1]),
            ),
            tooltip=[
                "outputs",
                "prefill",
                _figure("request_s", ".2f"),
                _figure("speedup", ".2f"),
                _figure("saved_pct", ".1f"),
            ],
        )
    )
    return alt.layer(chart).properties(title=_title(finding, detail))


def _modelled(chart: alt.Chart, tokens: int, decode_s: float) -> alt.Chart:
    """The formula of `labkit.device.pipeline_closed.closed_prefill_s` in Vega's language."""
    d = "datum."
    wait = (
        f"{d}prepare_s + {d}steps * max(0, {d}prepare_s - {d}compute_s)"
        f" + ({d}last_steps - 1) * max(0, {d}prepare_s - {d}last_s)"
    )
    return (
        chart.transform_calculate(prepare_s=f"{d}step_bytes / (1e9 * flash)")
        .transform_calculate(
            compute_s=f"{d}step_gflop / device + {d}step_cpu_s",
            last_s=f"{d}last_gflop / device + {d}last_cpu_s",
        )
        .transform_calculate(
            wait_s=wait,
            busy_s=f"{d}steps * {d}compute_s + {d}last_steps * {d}last_s + {d}rest_gflop / device",
            answer_s=f"max(0, outputs - 1) * {decode_s!r}",
            # One chunk has no step but the last one's.
            step_s=f"{d}steps > 0 ? {d}compute_s : {d}last_s",
        )
        .transform_calculate(tok_s=f"{tokens} / ({d}wait_s + {d}busy_s)")
    )


def _steps(base: alt.Chart) -> alt.LayerChart | alt.FacetChart:
    lines = (
        base.transform_fold(["prepare_s", "step_s"], as_=["which", "seconds"])
        .transform_calculate(
            what="datum.which == 'prepare_s' ? 'prepare a layer' : 'compute a layer'"
        )
        .mark_line(point=alt.OverlayMarkDef(size=30))
        .encode(
            x=_chunk_axis(base),
            y=alt.Y("seconds:Q", title="seconds a layer"),
            color=alt.Color(
                "what:N",
                title=None,
                scale=alt.Scale(
                    domain=["prepare a layer", "compute a layer"],
                    range=[CATEGORICAL[5], CATEGORICAL[0]],
                ),
            ),
            tooltip=["chunk:Q", "what:N", _figure("seconds", ".4f")],
        )
    )
    return alt.layer(_marker(base), lines).properties(height=150)


def _rate(base: alt.Chart) -> alt.LayerChart | alt.FacetChart:
    dots = alt.OverlayMarkDef(size=30, color=CATEGORICAL[2])
    line = base.mark_line(point=dots, color=CATEGORICAL[2]).encode(
        x=_chunk_axis(base),
        y=alt.Y("tok_s:Q", title="prefill (tokens a second)"),
        tooltip=["chunk:Q", _figure("tok_s", ",.0f"), _figure("wait_s", ".2f")],
    )
    picked = base.transform_filter("datum.chunk == chunk")
    text = picked.mark_text(dx=-6, dy=-10, align="right").encode(
        x=_chunk_axis(base), y="tok_s:Q", text=alt.Text("tok_s:Q", format=",.0f")
    )
    return alt.layer(_marker(base), line, text).properties(height=150)


def _request(base: alt.Chart) -> alt.LayerChart | alt.FacetChart:
    names = list(_REQUEST_PARTS)
    bar = (
        base.transform_filter("datum.chunk == chunk")
        .transform_fold(["wait_s", "busy_s", "answer_s"], as_=["which", "seconds"])
        .transform_calculate(
            part=f"datum.which == 'wait_s' ? '{names[0]}' : datum.which == 'busy_s' ? '{names[1]}'"
            f" : '{names[2]}'",
            order="datum.which == 'wait_s' ? 0 : datum.which == 'busy_s' ? 1 : 2",
            row="'whole request'",
        )
        .mark_bar(size=30)
        .encode(
            x=alt.X("seconds:Q", title="seconds of the request", stack="zero"),
            y=alt.Y("row:N", title=None),
            color=alt.Color(
                "part:N",
                title=None,
                sort=names,
                scale=alt.Scale(domain=names, range=list(_REQUEST_PARTS.values())),
            ),
            order=alt.Order("order:Q"),
            tooltip=["part:N", _figure("seconds", ".2f")],
        )
    )
    return alt.layer(bar).properties(height=46)


def _marker(base: alt.Chart) -> alt.Chart:
    return (
        base.transform_filter("datum.chunk == chunk")
        .mark_rule(color=FAINT_INK, strokeDash=[3, 4], strokeWidth=1.5)
        .encode(x=_chunk_axis(base))
    )


def _chunk_axis(base: alt.Chart) -> alt.X:
    values = [int(c) for c in base.data["chunk"]]  # type: ignore[index,call-overload]
    return alt.X(
        "chunk:Q",
        title="tokens of a chunk",
        scale=alt.Scale(type="log", base=2, nice=False),
        axis=alt.Axis(values=values, format="d"),
    )


def _slider(
    name: str, label: str, value: float, low: float, high: float, step: float
) -> alt.Parameter:
    low, high = min(low, value), max(high, value)
    return alt.param(
        name=name, value=value, bind=alt.binding_range(min=low, max=high, step=step, name=label)
    )


def _factor(factor: float) -> str:
    return "a prefill in no time" if factor >= 1e6 else f"a prefill {factor:.2g} times as fast"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def _title(finding: str, detail: str) -> alt.TitleParams:
    """A title whose lines do not break before a percent sign."""
    return title(finding.replace(" %", "\u00a0%"), detail, width_px=_WIDTH + 90)


def _figure(column: str, form: str) -> alt.Tooltip:
    return alt.Tooltip(f"{column}:Q", format=form)
