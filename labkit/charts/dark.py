"""Charts that follow the page: light where it is light, dark in JupyterLab's dark theme.

JupyterLab draws Vega-Lite with Vega's own dark theme when it is dark itself, which puts a dark
background behind a chart that names none. So the chart names none, and each colour that needs it
asks what is behind it: Vega knows the background as a signal. Where nobody sets one it is white.
"""

from __future__ import annotations

from typing import Any

from labkit.charts.theme import CARD, FAINT_INK, GRID, INK, SEQUENTIAL

#: The background of Vega's dark theme.
DARK_CARD = "#333333"

#: What a colour of the theme becomes on a dark background; others are readable on both.
ON_DARK = {
    CARD: DARK_CARD,
    INK: "#EEF1F5",
    FAINT_INK: "#BAC2CC",
    GRID: "#4A4F57",
    "#0072B2": "#5585F0",
    "#D55E00": "#F0782A",
    "#009E73": "#22B98C",
    "#5F6B7A": "#A3ADB9",
    "#882255": "#E0607E",
    # more is darker on light, and lighter on dark: the background is nothing
    **dict(zip(SEQUENTIAL, reversed(SEQUENTIAL), strict=True)),
}


def follow_background(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the Vega-Lite `spec` without the theme's background, its colours by what is behind.

    Backgrounds and colours that are not of labkit's theme stay as they are. `spec` is not changed.
    """
    config = {name: value for name, value in spec.get("config", {}).items() if value != CARD}
    if spec.get("background") or config.get("background"):
        return spec  # somebody chose one: the colours of the theme were chosen for it
    # Vega-Lite hands its configured ranges to Vega unread, and Vega's word for "expr" is "signal"
    ranges = {"range": _adapted(config.pop("range", {}), "signal")}
    data = {"datasets": spec["datasets"]} if "datasets" in spec else {}
    rest = {name: part for name, part in spec.items() if name not in ("config", "datasets")}
    return {"config": _adapted(config) | ranges, **_adapted(rest), **data}


def _adapted(part: Any, word: str = "expr") -> Any:
    if isinstance(part, dict):
        # rows of a table are no place for expressions, whatever they say
        return {name: p if name == "data" else _adapted(p, word) for name, p in part.items()}
    if isinstance(part, list):
        return [_adapted(item, word) for item in part]
    if isinstance(part, str) and part in ON_DARK:
        return {word: f"luminance(background) < 0.2 ? '{ON_DARK[part]}' : '{part}'"}
    return part
