"""One output that works everywhere: interactive Vega-Lite 5 and a PNG in the same mime bundle.

JupyterLab and VS Code bring a Vega-Lite 5 of their own and draw the first; a notebook converted to
HTML, a code host's preview or a site without scripts shows the second. Nothing is loaded from a
network. Altair writes Vega-Lite 6; the charts of labkit keep to what version 5.6 knows, and the
picture is drawn by a version 5 as well, so that both show the same. The interactive chart follows a
dark page; the picture cannot, and brings its light card along.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import altair as alt
import pandas as pd
import vl_convert
from PIL import Image

from labkit.charts.dark import follow_background

VEGALITE_MIME = "application/vnd.vegalite.v5+json"
SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"

#: Tables above this many rows travel as CSV text (a third of the size of a list of objects).
_CSV_ROWS = 400
#: From this many rows on a chart is drawn at scale 1: its picture is big enough already.
_BIG_ROWS = 2_500
#: Decimal figures kept in CSV text: more than a screen can show.
_SIGNIFICANT = "%.5g"


def compact(data: Any) -> Any:
    """Altair data transformer: any number of rows, and long tables as CSV text.

    Altair refuses tables above 5,000 rows (a heatmap of 48 layers x 128 experts has 6,144) and
    writes each row as an object with its column names. `data` is what Altair hands over: a
    DataFrame, or something that is passed on as it is.
    """
    if not isinstance(data, pd.DataFrame) or len(data) <= _CSV_ROWS:
        return alt.to_values(data)
    parse: dict[str, str] = {}
    for name, column in data.items():
        if pd.api.types.is_bool_dtype(column):
            parse[str(name)] = "boolean"
        elif pd.api.types.is_numeric_dtype(column):
            parse[str(name)] = "number"
        elif not pd.api.types.is_string_dtype(column):
            return alt.to_values(data)  # dates, lists: rare enough to leave to Altair
    text = data.to_csv(index=False, float_format=_SIGNIFICANT, lineterminator="\n")
    return {"values": text, "format": {"type": "csv", "parse": parse}}


def vegalite5(spec: dict[str, Any]) -> dict[str, Any]:
    """Return `spec` declared as Vega-Lite 5 (Altair 6 declares version 6)."""
    return {**spec, "$schema": SCHEMA}


def png(spec: dict[str, Any], *, scale: float | None = None) -> bytes:
    """Draw a Vega-Lite `spec` as PNG bytes; `scale` None picks 2, or 1 for many marks."""
    if scale is None:
        scale = 1.0 if _rows(spec) >= _BIG_ROWS else 2.0
    raw = vl_convert.vegalite_to_png(vegalite5(spec), vl_version="5.8", scale=scale)
    return _smaller(raw)


def still(spec: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Draw `spec` for a mime bundle: PNG as base64 text, and its size and words for metadata.

    The size is that of the chart in CSS pixels: a picture drawn at scale 2 for sharpness must not
    be shown at twice the size. The words are the chart's title, for those who cannot see it.
    """
    scale = 1.0 if _rows(spec) >= _BIG_ROWS else 2.0
    raw = png(spec, scale=scale)
    with Image.open(io.BytesIO(raw)) as image:
        width, height = image.size
    size = {"width": round(width / scale), "height": round(height / scale)}
    return base64.b64encode(raw).decode("ascii"), {**size, "alt": _words(spec)}


def bundle(spec: dict[str, Any], **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Altair renderer: a mime bundle of Vega-Lite 5 JSON and a PNG, and its metadata."""
    picture, facts = still(spec)
    words = f"<chart: {facts['alt']}>"
    drawn = vegalite5(follow_background(spec))
    data = {VEGALITE_MIME: drawn, "image/png": picture, "text/plain": words}
    return data, {"image/png": facts}


def show(chart: Any) -> None:
    """Display an Altair chart in the running notebook, through this renderer."""
    from IPython.display import display

    data, metadata = bundle(chart.to_dict())
    display(data, metadata=metadata, raw=True)


def finding(chart: Any) -> str:
    """Return the title of an Altair chart as one line of plain text, with usual spaces."""
    return _words(chart.to_dict()).replace("\u00a0", " ")


def enable() -> None:
    """Enable the renderer and the data transformer (done by `import labkit.charts`)."""
    alt.renderers.register("labkit", bundle)
    alt.renderers.enable("labkit")
    alt.data_transformers.register("labkit", compact)
    alt.data_transformers.enable("labkit")


def _rows(spec: dict[str, Any]) -> int:
    """Count the data rows that `spec` carries."""
    total = 0
    for values in spec.get("datasets", {}).values():
        total += values.count("\n") if isinstance(values, str) else len(values)
    return total


def _words(spec: dict[str, Any]) -> str:
    """Return the first title in `spec`, or in its parts, as one line."""
    title = spec.get("title")
    text = title.get("text") if isinstance(title, dict) else title
    if text:
        return " ".join(text) if isinstance(text, list) else str(text)
    for parts in ("vconcat", "hconcat", "concat", "layer"):
        for part in spec.get(parts, []):
            if words := _words(part):
                return words
    return _words(spec["spec"]) if "spec" in spec else ""


def _smaller(raw: bytes) -> bytes:
    """Re-encode a PNG with a palette of 256 colours where that is smaller; no dithering."""
    with Image.open(io.BytesIO(raw)) as image:
        flat = image.convert("RGB").quantize(
            colors=256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
        out = io.BytesIO()
        flat.save(out, "PNG", optimize=True)
    return out.getvalue() if out.tell() < len(raw) else raw
