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
import vl_convert
from PIL import Image

from labkit import charts
from labkit.charts import dark, renderer, theme


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


def test_an_interactive_chart_is_dark_on_a_dark_page_and_its_words_stay_readable() -> None:
    vega_dark = {"background": dark.DARK_CARD, "title": {"color": "white"}}
    spec = bundle_of(charts.expert_load(random_routing(), 16))[renderer.VEGALITE_MIME]
    for config, ink in (({}, charts.INK), (vega_dark, dark.ON_DARK[charts.INK])):
        raw = vl_convert.vegalite_to_png(spec, vl_version="5.8", config=config)
        seen = Image.open(io.BytesIO(raw)).convert("RGB")
        card = hex_at(seen, 2, 2)
        assert card == config.get("background", "#ffffff")
        assert ink.lower() in colours(seen)  # the title, drawn on that card
        assert contrast(ink, card) >= 4.5
    for light, on_dark in dark.ON_DARK.items():
        if light not in (charts.GRID, theme.CARD, *charts.SEQUENTIAL):
            assert contrast(on_dark, dark.DARK_CARD) >= 3, light
    for colour in charts.CATEGORICAL:
        assert contrast(dark.ON_DARK.get(colour, colour), dark.DARK_CARD) >= 3


def test_a_chart_that_chose_its_background_keeps_its_colours_and_data_keep_their_words() -> None:
    table = pd.DataFrame({"word": [charts.INK], "n": [1]})
    chart = alt.Chart(table).mark_bar(color=charts.INK).encode(x="n:Q", y="word:N")
    drawn = bundle_of(chart.properties(background="#102030"))[renderer.VEGALITE_MIME]
    assert drawn["mark"]["color"] == charts.INK
    drawn = bundle_of(chart)[renderer.VEGALITE_MIME]
    assert "luminance(background)" in drawn["mark"]["color"]["expr"]
    assert list(drawn["datasets"].values()) == [table.to_dict("records")]


def hex_at(image: Image.Image, x: int, y: int) -> str:
    return "#{:02x}{:02x}{:02x}".format(*np.asarray(image)[y, x])


def colours(image: Image.Image) -> set[str]:
    pixels = np.unique(np.asarray(image).reshape(-1, 3), axis=0)
    return {"#{:02x}{:02x}{:02x}".format(*pixel) for pixel in pixels}


def test_long_titles_wrap() -> None:
    title = charts.title("word " * 40, "small print " * 30, width_px=400).to_dict()
    assert max(len(line) for line in title["text"]) <= 400 / 7.5
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


# ---- routing ------------------------------------------------------------------------------------


def routing(choices: list[list[list[int]]], phase: str = "decode") -> pd.DataFrame:
    """A routing table from choices[token][layer] = chosen experts; an empty list: not routed."""
    rows = [
        {"phase": phase, "step": 10 + step, "layer": layer, "slot": slot, "expert": expert}
        for step, layers in enumerate(choices)
        for layer, experts in enumerate(layers)
        for slot, expert in enumerate(experts)
    ]
    return pd.DataFrame(rows)


def test_load_counts_every_expert_also_those_that_nobody_chose() -> None:
    table = routing([[[0, 1], [2, 3]], [[0, 2], []]])
    load = charts.load_table(table, n_expert=4).set_index(["layer", "expert"])
    assert len(load) == 8
    assert load.loc[(0, 0), "tokens"] == 2
    assert load.loc[(0, 0), "share_pct"] == 100
    assert load.loc[(0, 0), "times_fair"] == 2  # 100 % where even routing gives 50 %
    assert load.loc[(0, 3), "tokens"] == 0
    assert load.loc[(1, 2), "share_pct"] == 100  # of the one token that layer 1 routed


def test_churn_and_active_set_over_time() -> None:
    table = routing([[[0, 1]], [[0, 1]], [[0, 2]], [[3, 4]]])
    series = charts.over_time_table(table, n_expert=8, window=3)
    assert list(series["step"]) == [11, 12, 13]
    assert list(series["churn_pct"]) == [0, 50, 100]
    assert np.isnan(series["active_pct"].iloc[0])
    assert list(series["active_pct"].iloc[1:]) == [100 * 3 / 8, 100 * 5 / 8]


def test_a_layer_that_did_not_route_a_token_is_left_out_of_the_means() -> None:
    table = routing([[[0, 1], []], [[0, 2], [5, 6]], [[0, 2], [5, 7]]])
    series = charts.over_time_table(table, n_expert=8, window=2)
    assert list(series["churn_pct"]) == [50, 25]


def test_overlap_of_the_same_tokens_in_two_runs() -> None:
    one = routing([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    other = routing([[[1, 0], [2, 4]], [[6, 7], [6, 7]]])
    other["step"] += 90  # another place in another text
    overlap = charts.overlap_table(one, other)
    assert overlap.to_dict("list") == {"layer": [0, 1], "overlap_pct": [50, 75]}


def random_routing(
    tokens: int = 60, layers: int = 6, experts: int = 16, k: int = 4
) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    return routing(
        [[list(rng.permutation(experts)[:k]) for _ in range(layers)] for _ in range(tokens)]
    )


def test_titles_are_computed_from_the_data() -> None:
    table = routing([[[3, 1]], [[3, 2]], [[3, 0]]] * 8)
    title = " ".join(charts.expert_load(table, 8).to_dict()["title"]["text"])
    assert "Expert 3 of layer 0 works 4.0 times its fair share" in title
    assert "4 of 8 were never chosen" in title

    title = " ".join(charts.active_set_and_churn(table, 8).to_dict()["title"]["text"])
    assert "50 % of the experts change (random routing: 75 %)" in title
    assert "16 tokens in a row need 50 % of all experts" in title


def test_random_routing_meets_its_own_baselines() -> None:
    table = random_routing(tokens=400)
    series = charts.over_time_table(table, 16)
    assert series["churn_pct"].mean() == pytest.approx(75, abs=2)
    assert series["active_pct"].mean() == pytest.approx(100 * (1 - 0.75**16), abs=2)


def test_two_contexts_side_by_side_share_one_scale() -> None:
    one, other = random_routing(40), random_routing(40)
    other["expert"] = other["expert"] // 2 * 2  # unevenly used, so that the scales would differ
    chart = charts.same_tokens_two_contexts({"prose": one, "code": other}, 16, control_pct=80)
    spec = chart.to_dict()
    domains = [panel["encoding"]["color"]["scale"]["domain"] for panel in spec["hconcat"]]
    assert domains[0] == domains[1]
    assert [panel["title"] for panel in spec["hconcat"]] == ["after prose", "after code"]
    assert "two prose contexts keep 80 %" in " ".join(spec["title"]["subtitle"])


@pytest.mark.parametrize("make", ["load", "time", "contexts"])
def test_routing_charts_are_drawn(make: str) -> None:
    table = random_routing()
    chart = {
        "load": lambda: charts.expert_load(table, 16),
        "time": lambda: charts.active_set_and_churn(table, 16),
        "contexts": lambda: charts.same_tokens_two_contexts({"a": table, "b": table}, 16),
    }[make]()
    image = np.asarray(Image.open(io.BytesIO(charts.png(chart.to_dict()))).convert("RGB"))
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 20
