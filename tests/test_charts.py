"""Charts: one bundle that every front end can show, of any size, in Vega-Lite 5."""

from __future__ import annotations

import base64
import io
import json

import altair as alt
import nbformat
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from labkit import charts
from labkit.charts import renderer, theme


def heat_table(layers: int, experts: int) -> pd.DataFrame:
    layer, expert = np.divmod(np.arange(layers * experts), experts)
    load = np.random.default_rng(0).gamma(1, 1, layers * experts)
    return pd.DataFrame({"layer": layer, "expert": expert, "load": load})


def heatmap(table: pd.DataFrame) -> alt.Chart:
    return (
        alt.Chart(table, width=640, height=244)
        .mark_rect()
        .encode(x="expert:O", y="layer:O", color="load:Q")
    )


def bundle_of(chart: alt.Chart) -> dict:
    result = chart._repr_mimebundle_()
    assert isinstance(result, tuple)
    return dict(result[0])


def picture(bundle: dict) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(bundle["image/png"]))).convert("RGB")


def test_importing_charts_makes_altair_emit_vegalite_5_and_a_picture_in_one_bundle() -> None:
    bundle = bundle_of(heatmap(heat_table(4, 8)))
    assert set(bundle) == {"application/vnd.vegalite.v5+json", "image/png", "text/plain"}
    assert "/v5." in bundle["application/vnd.vegalite.v5+json"]["$schema"]
    assert len(picture(bundle).getcolors(maxcolors=100_000) or []) > 10


@pytest.mark.parametrize(("layers", "experts"), [(48, 128), (61, 512)])
def test_heatmaps_of_big_models_are_drawn_in_a_notebook_under_1_mib(
    layers: int, experts: int
) -> None:
    table = heat_table(layers, experts)
    bundle = bundle_of(heatmap(table))
    output = nbformat.v4.new_output("display_data", data=bundle)
    cell = nbformat.v4.new_code_cell("chart", outputs=[output])
    notebook = nbformat.v4.new_notebook(cells=[cell])
    nbformat.validate(notebook)
    assert len(nbformat.writes(notebook)) < 2**20

    # all cells are there: as many numbers as the table has, and the hottest cell is dark
    (text,) = bundle["application/vnd.vegalite.v5+json"]["datasets"].values()
    assert text.count("\n") == len(table) + 1
    back = pd.read_csv(io.StringIO(text))
    assert np.allclose(back["load"], table["load"], rtol=1e-4)
    pixels = np.asarray(picture(bundle)).reshape(-1, 3).sum(axis=1)
    assert (pixels < 400).sum() > 20


def test_compact_data_draws_the_same_picture_as_plain_data() -> None:
    table = heat_table(24, 24).assign(name=lambda t: np.where(t["load"] > 1, 'a, "b"', "c"))
    chart = alt.Chart(table).mark_rect().encode(x="expert:O", y="layer:O", color="name:N")
    compact = chart.to_dict()
    with alt.data_transformers.enable("default"):
        plain = chart.to_dict()
    assert len(json.dumps(compact)) < len(json.dumps(plain)) / 2
    one, other = [
        np.asarray(Image.open(io.BytesIO(renderer.png(spec, scale=1))).convert("RGB"))
        for spec in (compact, plain)
    ]
    assert np.array_equal(one, other)


def test_short_and_odd_tables_travel_as_altair_writes_them() -> None:
    assert isinstance(renderer.compact(heat_table(2, 2))["values"], list)
    dates = pd.DataFrame({"day": pd.date_range("2024-01-01", periods=500)})
    assert isinstance(renderer.compact(dates)["values"], list)


def test_text_on_a_card_keeps_a_readable_contrast() -> None:
    config = theme.config()
    card = config["background"]
    for ink in (charts.INK, charts.FAINT_INK):
        assert contrast(ink, card) >= 4.5
    for colour in charts.CATEGORICAL:
        assert contrast(colour, card) >= 2
    assert min(part["labelFontSize"] for part in (config["axis"], config["legend"])) >= 12


def contrast(one: str, other: str) -> float:
    """WCAG contrast ratio of two #rrggbb colours."""

    def luminance(colour: str) -> float:
        parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_long_titles_wrap() -> None:
    title = charts.title("word " * 40, "small print " * 30, width_px=400).to_dict()
    assert max(len(line) for line in title["text"]) <= 400 / 8
    assert max(len(line) for line in title["subtitle"]) <= 400 / 6


def test_a_sharp_picture_is_shown_at_the_size_of_the_chart_and_says_what_it_shows() -> None:
    chart = heatmap(heat_table(4, 8)).properties(title=charts.title("Expert 3 is busy"))
    result = alt.vconcat(chart)._repr_mimebundle_()
    assert isinstance(result, tuple)
    data, metadata = result
    facts = metadata["image/png"]
    assert facts["alt"] == "Expert 3 is busy"
    width, height = picture(dict(data)).size
    assert (width, height) == pytest.approx((2 * facts["width"], 2 * facts["height"]), abs=1)
