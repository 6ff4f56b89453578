"""A still picture of a run, for places without a front end: the text, and the heatmap below it."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np
import pandas as pd

from labkit import charts
from labkit.widgets.frames import Shape, routing_bits

if TYPE_CHECKING:
    from labkit.runtime import TokenStep

_DECAY = 0.9  # as in live_store.js
_COLUMNS = 88
_LINES = 9
_LINE_PX = 22
_COLUMN_PX = 8.1
_WIDTH_PX = int(_COLUMNS * _COLUMN_PX)
_MONOSPACE = "DejaVu Sans Mono, Menlo, Consolas, monospace"


def run_picture(steps: Sequence[TokenStep], shape: Shape) -> dict[str, Any]:
    """Return the chart of a run: its last lines of text by entropy, its last token in the heatmap.

    The result is a Vega-Lite spec for `labkit.charts.still` or `png`.
    """
    if not steps:
        empty = charts.title("No run yet", "In JupyterLab: press Play.", width_px=_WIDTH_PX)
        return _text_chart(pd.DataFrame(), empty).to_dict()
    cells, last = _heat(steps, shape), _last_choices(steps[-1])
    generated = sum(step.phase != "prefill" for step in steps)
    hit = np.concatenate([step.hit.ravel() for step in steps if step.phase != "prefill"] or [[]])
    used = {pair for step in steps for pair in _choices(step)}
    finding = (
        f"{generated} generated tokens and their prompt chose {len(used)} of "
        f"{len(shape.layers) * shape.experts} experts"
    )
    if hit.size:
        finding += f"; {100 * hit.mean():.0f} % of the choices while generating were in the cache"
    words = _placed(steps)
    detail = "The prompt is grey."
    bits = words["entropy_bits"].to_numpy()
    if np.isfinite(bits).any():
        low, high = np.nanquantile(bits, (0.04, 0.96))  # odd tokens must not wash out the rest
        words["entropy_bits"] = np.clip(bits, low, high)
        detail = (
            f"Text coloured by the entropy of its routing, {low:.2f} bits (pale) to {high:.2f} "
            "bits (dark: less decided). The prompt is grey."
        )
    text = _text_chart(words, charts.title(finding, detail, width_px=_WIDTH_PX))
    return alt.vconcat(text, _heat_chart(cells, last, shape), spacing=18).to_dict()


def _text_chart(table: pd.DataFrame, title: alt.TitleParams) -> alt.LayerChart | alt.FacetChart:
    if table.empty:
        table = pd.DataFrame({"x": [0.0], "x2": [0.0], "y": [0], "y2": [1], "text": [""]})
        table = table.assign(text_x=0.0, entropy_bits=0.0, prompt=False)
    x_scale = alt.Scale(domain=[0, _COLUMNS], nice=False)
    lines = int(table["y"].to_numpy().max()) + 1
    y_scale = alt.Scale(domain=[0, lines], reverse=True, nice=False)
    base = alt.Chart(table, title=title, width=_WIDTH_PX, height=lines * _LINE_PX)
    shades = alt.Scale(zero=False, range=charts.SEQUENTIAL[:4])
    boxes = base.mark_rect().encode(
        x=alt.X("x:Q", scale=x_scale, axis=None),
        x2="x2:Q",
        y=alt.Y("y:Q", scale=y_scale, axis=None),
        y2="y2:Q",
        color=alt.Color("entropy_bits:Q", legend=None, scale=shades),
    )
    letters = base.mark_text(
        align="left", baseline="middle", font=_MONOSPACE, fontSize=13, dx=1, dy=_LINE_PX / 2
    ).encode(
        x=alt.X("text_x:Q", scale=x_scale, axis=None),
        y=alt.Y("y:Q", scale=y_scale, axis=None),
        text="text:N",
        color=alt.condition("datum.prompt", alt.value(charts.FAINT_INK), alt.value(charts.INK)),
    )
    return alt.layer(boxes, letters)


def _heat_chart(
    cells: pd.DataFrame, last: pd.DataFrame, shape: Shape
) -> alt.LayerChart | alt.FacetChart:
    height = max(110, min(340, 22 * len(shape.layers)))
    x = alt.X("expert:O", axis=alt.Axis(labelAngle=0, labelOverlap=True, ticks=False))
    y = alt.Y("layer:O", axis=alt.Axis(labelOverlap=True, ticks=False))
    state = alt.Color(
        "state:N",
        title="chosen by the last token",
        legend=alt.Legend(orient="bottom"),
        scale=alt.Scale(domain=["in the cache", "had to be read"], range=["#00775A", "#D55E00"]),
    )
    heat = alt.Color(
        "heat:Q",
        title="share of recent tokens",
        legend=alt.Legend(format=".0%", orient="bottom", gradientLength=180),
    )
    base = alt.Chart(cells, width=_WIDTH_PX, height=height)
    old = base.mark_rect().encode(x, y, heat)
    new = alt.Chart(last).mark_rect(stroke="white", strokeWidth=1).encode(x, y, state)
    return alt.layer(old, new).resolve_scale(color="independent")


def _heat(steps: Sequence[TokenStep], shape: Shape) -> pd.DataFrame:
    """Return layer, expert, heat: the decayed share of recent tokens that chose the expert."""
    heat = np.zeros((len(shape.layers), shape.experts))
    row_of = {layer: row for row, layer in enumerate(shape.layers)}
    share = 1.0 - _DECAY
    for age, step in enumerate(reversed(steps[-60:])):
        rows = [row_of[int(layer)] for layer in step.layers]
        heat[np.repeat(rows, step.experts.shape[1]), step.experts.ravel()] += share * _DECAY**age
    layer, expert = np.meshgrid(shape.layers, np.arange(shape.experts), indexing="ij")
    return pd.DataFrame(
        {"layer": layer.ravel(), "expert": expert.ravel(), "heat": heat.ravel().round(4)}
    )


def _choices(step: TokenStep) -> list[tuple[int, int]]:
    layers = np.repeat(step.layers, step.experts.shape[1])
    return list(zip(layers.tolist(), step.experts.ravel().tolist(), strict=True))


def _last_choices(step: TokenStep) -> pd.DataFrame:
    """Return layer, expert, state of one token's choices."""
    slots = step.experts.shape[1]
    return pd.DataFrame(
        {
            "layer": np.repeat(step.layers, slots),
            "expert": step.experts.ravel(),
            "state": np.where(step.hit.ravel(), "in the cache", "had to be read"),
        }
    )


def _placed(steps: Sequence[TokenStep]) -> pd.DataFrame:
    """Return a row per piece of text: its box on a grid of characters, its entropy."""
    rows = []
    for step in steps:
        rows += [
            {"x": x, "x2": x + width, "y": line, "text": text, "step": step}
            for x, line, width, text in _pieces(step.text, rows)
        ]
    first = max(0, max(row["y"] for row in rows) - _LINES + 1)
    return pd.DataFrame(
        [
            {
                "x": row["x"],
                "x2": row["x2"],
                # Vega drops spaces at the start of a text, so the text starts after them
                "text_x": row["x"] + len(row["text"]) - len(row["text"].lstrip()),
                "y": row["y"] - first,
                "y2": row["y"] - first + 0.92,
                "text": row["text"],
                "entropy_bits": routing_bits(row["step"].weights),
                "prompt": row["step"].phase == "prefill",
            }
            for row in rows
            if row["y"] >= first
        ]
    )


def _pieces(text: str, before: list[dict]) -> Iterator[tuple[int, int, int, str]]:
    """Cut a token's text at line ends and at the right edge: (column, line, width, piece)."""
    x, line = (before[-1]["x2"], before[-1]["y"]) if before else (0, 0)
    for number, part in enumerate(text.replace("\t", "    ").split("\n")):
        if number:
            x, line = 0, line + 1
        width = sum(_width(character) for character in part)
        if x + width > _COLUMNS and width <= _COLUMNS:
            x, line = 0, line + 1
        yield x, line, width, part
        x += width


def _width(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
