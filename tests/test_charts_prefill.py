"""Charts of prefill: they draw, say what kind of figures they hold, compute what Python does."""

from __future__ import annotations

import math
import re
from typing import Any

import pandas as pd
import pytest
import vl_convert

from labkit import charts
from labkit.charts import prefill as drawn
from labkit.charts import prefill_model as modelled
from labkit.charts.renderer import vegalite5
from labkit.device.pipeline import Job, schedule
from labkit.device.pipeline_closed import chunk_table, closed_prefill_s
from labkit.device.pipeline_rates import Rates
from labkit.device.pipeline_recorded import recorded_prefills
from labkit.device.pipeline_request import amdahl
from labkit.device.pipeline_work import read_layers
from labkit.device.recorded import htp_points, prefill_runs
from labkit.prefill_lab.check import OwnPrefill, replay_table
from labkit.prefill_lab.result import PrefillResult

RATES = Rates(read_gb_s=2.5, device_gflop_s=1000, cpu_gflop_s=100, sync_ms=0.4)


def svg(chart: Any, **values: float) -> str:
    """The chart drawn with its sliders at these values."""
    spec = vegalite5(chart.to_dict())
    for param in spec.get("params", []):
        if param["name"] in values:
            param["value"] = values[param["name"]]
    return vl_convert.vegalite_to_svg(spec, vl_version="5.8")


@pytest.fixture(scope="module")
def measured() -> PrefillResult:
    facts: dict[str, Any] = {"paths": {"mmap": "", "layers": "", "device:X0": ""}, "notes": []}
    prefills, requests = [], []
    for path, tok_s in (("mmap", 100.0), ("layers", 200.0), ("device:X0", 400.0)):
        for number in (1, 2):
            for n in (8, 64):
                row = {"round": number, "path": path, "tokens": n}
                prefills.append({**row, "ttft_s": n / tok_s / number})
            for out in (1, 8):
                row = {"round": number, "path": path, "tokens": 64, "outputs": out}
                requests.append({**row, "request_s": 64 / tok_s + 0.1 * (out - 1)})
    return PrefillResult.of(facts, [], prefills, requests, [])


def slots() -> pd.DataFrame:
    layers = pd.DataFrame(
        {"chunk": 0, "layer": [1, 2], "prepare_s": 0.2, "wait_s": [0.2, 0.0], "compute_s": 0.3}
    ).assign(read_bytes=1)
    runs = [OwnPrefill(64, 64, 0.8, 0.4, layers), OwnPrefill(64, 32, 0.9, 0.4, layers)]
    return replay_table(runs)


def test_measured_charts_say_that_they_are_measured(measured: PrefillResult):
    rate = drawn.rates_by_length(measured.rates())
    whole = drawn.whole_requests(measured.request_table())
    own = drawn.own_slots(slots())
    for chart in (rate, whole, own):
        assert charts.finding(chart).startswith("Measured here")
        assert charts.png(chart.to_dict()).startswith(b"\x89PNG")
    assert "600 tokens a second at 64 tokens with device:X0" in charts.finding(rate)
    assert "device:X0 is done first" in charts.finding(whole)


def test_recorded_charts_say_whose_they_are_and_hold_no_own_figures():
    points = htp_points()
    points = points[points["test"].str.fullmatch(r"pp\d+") & (points["model"] == "qwen3-4B")]
    points = points.assign(tokens=points["test"].str[2:].astype(int))
    made = [
        drawn.recorded_pairs(prefill_runs()),
        drawn.recorded_prefills(recorded_prefills()),
        drawn.recorded_curve(points),
    ]
    for chart in made:
        assert charts.finding(chart).startswith("Recorded")
        assert charts.png(chart.to_dict()).startswith(b"\x89PNG")


@pytest.mark.parametrize(("device", "flash", "chunk"), [(972, 2.5, 512), (4000, 0.8, 64)])
def test_sliders_compute_what_python_does(device: float, flash: float, chunk: int):
    _, layers = read_layers("qwen3.6-35b-a3b")
    grid = chunk_table(layers, 1418, [64, 512, 1418], RATES)
    chart = modelled.sliders(
        grid,
        model="a model",
        tokens=1418,
        decode_s=0.2,
        device_gflop_s=500,
        read_gb_s=1.0,
        chunk=512,
        outputs=64,
    )
    title = charts.finding(chart)
    assert title.startswith("Modelled, not measured")
    assert "chunks of 512" in title
    row = grid[grid["chunk"] == chunk].iloc[0]
    expected = f"{1418 / closed_prefill_s(row, flash, device):,.0f}"
    drawn_text = svg(chart, device=device, flash=flash, chunk=chunk)
    shown = re.findall(r">\s*([0-9,]+)\s*</text>", drawn_text)
    assert expected in shown
    bars = re.findall(r"seconds of the request: ([0-9.]+); row: [^;]*; part: ([^;]*);", drawn_text)
    seconds = {part: float(value) for value, part in bars}
    answer = 63 * 0.2
    assert seconds["further tokens"] == pytest.approx(answer, abs=0.01)
    assert sum(seconds.values()) - answer == pytest.approx(
        closed_prefill_s(row, flash, device), abs=0.02
    )


def test_a_timeline_is_labelled_and_cut():
    made = schedule([Job(0, n, read_s=1, compute_s=2, fallbacks=1) for n in range(3)], sync_s=0.1)
    whole = modelled.timeline(made, label="Modelled")
    assert charts.finding(whole).startswith("Modelled: the prompt takes 7.3 s")
    part = modelled.timeline(made, label="Replayed", layers=1, device="compute").to_dict()
    rows = next(iter(part["datasets"].values()))
    assert max(row["end_s"] for row in rows) == 3.0  # the first layer: read for 1 s, computed for 2
    assert {row["worker"] for row in rows} == {"preparation", "compute"}
    assert "The first 3.0 s" in part["title"]["subtitle"][0]


def test_amdahl_names_its_ends():
    chart = modelled.saved_by_prefill(
        amdahl(4.0, 0.1, [1, 41, 1000], [2, 1e9]), label="From what was measured here"
    )
    assert "a prefill in no time saves 100 % of a request with 1 answer token" in (
        charts.finding(chart)
    )
    assert charts.png(chart.to_dict()).startswith(b"\x89PNG")


def test_a_model_without_reads_still_draws():
    made = schedule([Job(0, 0, compute_s=1.0)])
    assert math.isnan(made.hidden_pct)
    assert charts.finding(modelled.timeline(made, label="Modelled")).endswith("takes 1.0 s")
