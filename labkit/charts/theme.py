"""How labkit's charts look: one Altair theme, colour-blind-safe palettes, and titles that wrap.

A chart sits on a card of its own: a transparent one would need one text colour for light and dark
pages, and none is readable on both from the back of a classroom. The colours here are those of the
light card, which a picture always has; `labkit.charts.dark` has what an interactive chart makes of
them on a dark page.
"""

from __future__ import annotations

import textwrap
from typing import Any

import altair as alt

#: Okabe and Ito's colours without yellow (lost on a light card); distinct for all common kinds of
#: colour blindness and in print. First to last is the order in which to use them.
CATEGORICAL = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5F6B7A"]

#: Light to dark in one hue: the order survives grey-scale printing. For loads, counts, bytes.
SEQUENTIAL = ["#F3F6FA", "#CFE0F0", "#9CC3E2", "#5C9CCB", "#2B74AE", "#114D83", "#082A4F"]

#: Blue through pale grey to orange: below and above a middle value, told apart by everybody.
DIVERGING = ["#0B4F8A", "#4C8DC4", "#A9CBE5", "#F2F2EF", "#F6C48F", "#E0862B", "#A84E00"]

#: One colour for each role that `labkit.architectures.role_of` tells apart; related roles are kin.
ROLE_COLOURS = {
    "routed expert": "#0072B2",
    "shared expert": "#56B4E9",
    "router": "#D55E00",
    "attention": "#009E73",
    "dense ffn": "#CC79A7",
    "embedding": "#E69F00",
    "output": "#B8860B",
    "norm": "#8A94A3",
    "other": "#5F6B7A",
}

CARD = "#FCFCFD"
INK = "#1B2430"
FAINT_INK = "#55606E"
GRID = "#E4E8EE"
FONT = "Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif"


def config() -> dict[str, Any]:
    """Return the Vega-Lite ``config`` object of the theme (Vega-Lite 5.6 knows every key)."""
    return {
        "background": CARD,
        "font": FONT,
        "padding": 14,
        "view": {"stroke": None, "continuousWidth": 560, "continuousHeight": 240},
        "title": {
            "anchor": "start",
            "frame": "group",
            "color": INK,
            "fontSize": 16,
            "fontWeight": 600,
            "lineHeight": 20,
            "subtitleColor": FAINT_INK,
            "subtitleFontSize": 12.5,
            "subtitleLineHeight": 16,
            "subtitlePadding": 5,
            "offset": 12,
        },
        "axis": {
            "labelColor": INK,
            "labelFontSize": 12,
            "titleColor": FAINT_INK,
            "titleFontSize": 12.5,
            "titleFontWeight": 500,
            "titlePadding": 8,
            "gridColor": GRID,
            "domainColor": "#9AA4B1",
            "tickColor": "#9AA4B1",
        },
        "legend": {
            "labelColor": INK,
            "labelFontSize": 12,
            "titleColor": FAINT_INK,
            "titleFontSize": 12.5,
            "titleFontWeight": 500,
            "gradientThickness": 12,
            "symbolStrokeWidth": 2,
        },
        "header": {
            "labelColor": INK,
            "labelFontSize": 13,
            "labelFontWeight": 600,
            "titleColor": FAINT_INK,
        },
        "range": {
            "category": CATEGORICAL,
            "ordinal": SEQUENTIAL,
            "heatmap": SEQUENTIAL,
            "ramp": SEQUENTIAL,
            "diverging": DIVERGING,
        },
        "line": {"strokeWidth": 2},
        "rule": {"color": FAINT_INK},
        "text": {"color": INK, "fontSize": 12},
    }


@alt.theme.register("labkit", enable=True)
def theme() -> alt.theme.ThemeConfig:
    """Return the Altair theme; importing `labkit.charts` enables it."""
    return alt.theme.ThemeConfig(config=config())  # type: ignore[typeddict-item]


def title(finding: str, detail: str = "", *, width_px: int = 560) -> alt.TitleParams:
    """Make a chart title that says what the chart shows, wrapped to `width_px`.

    `finding` is a sentence computed from the data; `detail` is the small print: what was measured,
    over what, and what a reader may compare it with.
    """
    columns = max(24, int(width_px / 7.9))
    small = max(30, int(width_px / 6.0))
    lines = textwrap.wrap(finding, columns, break_on_hyphens=False) or [""]
    if detail:
        return alt.TitleParams(text=lines, subtitle=textwrap.wrap(detail, small))
    return alt.TitleParams(text=lines)
