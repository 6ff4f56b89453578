"""The planner: its predictions against recorded runs and its own parts, and what it recommends."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table

from labkit.bundled import model_path
from labkit.cli.plan_text import next_step, plan_text
from labkit.device import DeviceProfile, Figure, load_profile
from labkit.device.plan import MMAP, OVERLAPPED, PATHS, RESIDENT, SERIAL, Plan, Request
from labkit.device.plan_memory import compute_mib
from labkit.device.planner import plan
from labkit.device.recorded import prefill_runs, recorded_runs
from labkit.gguf_map import open_gguf
from labkit.replay import demand, replay
from labkit.sheet import ModelSheet, sheet
from labkit.trace import RouteTrace, RoutingBlock

PHONE = load_profile("oneplus-15r")
SHAPES = {
    "gpt-oss-120b": "gpt-oss-120b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Gemma-4-26B-A4B": "gemma-4-26b-a4b",
    "Qwen3.6-35B-A3B": "qwen3.6-35b-a3b",
}
SHORT = Request(n_ctx=256, prompt_tokens=64, output_tokens=64)


def at_size(name: str, gib: float) -> ModelSheet:
    """A published shape at the mean width that makes a file of this size."""
    return sheet(name, bits=8 * gib * 2**30 / sheet(name).total_params)


def routing(model: ModelSheet, *, tokens: int = 60, skew: float = 1.0, **changes) -> RouteTrace:
    """Routing of one prompt of 8 tokens and of generated ones, experts by a fixed popularity."""
    random = np.random.default_rng(3)
    popularity = np.arange(1, model.n_expert + 1.0) ** -skew
    popularity /= popularity.sum()
    known = {
        "architecture": model.architecture,
        "n_expert": model.n_expert,
        "n_expert_used": model.n_expert_used,
    }
    trace = RouteTrace(**(known | changes))
    k = model.n_expert_used
    for step in range(tokens):
        n = 8 if step == 0 else 1
        for layer in model.moe_layers:
            rows = [random.choice(model.n_expert, k, replace=False, p=popularity) for _ in range(n)]
            ids = np.array(rows, np.int32)
            positions = np.arange(n) if step == 0 else np.array([7 + step])
            block = RoutingBlock(
                0, "prefill" if step == 0 else "decode", layer, positions, ids,
                np.full((n, k), 1 / k, np.float32), np.zeros((n, k), bool), np.zeros((n, k), int),
            )  # fmt: skip
            trace.append(block)
    return trace


def small_memory(usable_mib: float) -> DeviceProfile:
    return PHONE.with_figures({"usable_mib": Figure(usable_mib, "assumed", "a test")})


def rates(made: Plan) -> dict[str, float]:
    return {row.path: row.decode_tok_s for row in made.paths}


def test_published_shapes_alone_come_near_the_recorded_rates():
    """From a shape at the file's size, with an assumed hit rate: nothing of the run is known."""
    runs = recorded_runs()
    runs = runs[runs["model"].isin(SHAPES) & runs["decode_tok_s"].notna()]
    runs = runs[~runs["note"].fillna("").str.startswith("lossy") & (runs["path"] != "mmap")]
    off = []
    for row in runs.to_dict("records"):
        model = at_size(SHAPES[row["model"]], row["file_gib"])
        lanes = 4 if math.isnan(row["lanes"]) else int(row["lanes"])
        made = plan(model, small_memory(11000), cache_mib=row["cache_mib"],
                    request=Request(lanes=lanes))  # fmt: skip
        path = OVERLAPPED if row["path"] == "stream+overlap" else SERIAL
        off.append(abs(made.path(path).decode_tok_s / row["decode_tok_s"] - 1))
    print(f"{len(off)} rows, median {100 * np.median(off):.1f} %, worst {100 * max(off):.0f} %")  # noqa: T201
    assert len(off) > 15
    assert np.median(off) < 0.2
    assert max(off) < 0.7


def test_prompts_on_a_phones_cpu_are_predicted_roughly():
    runs = prefill_runs()
    for row in runs[runs["backend"] == "CPU"].to_dict("records"):
        gib = 19.41 if row["quant"] == "Q4_0" else 20.77 if "Qwen" in row["model"] else 15.83
        request = Request(prompt_tokens=row["prompt_tokens"], output_tokens=0)
        made = plan(at_size(SHAPES[row["model"]], gib), PHONE, cache_mib=1500, request=request)
        assert made.path(OVERLAPPED).prefill_s == pytest.approx(row["prefill_s"], rel=0.4), row


def test_a_model_that_fits_is_recommended_resident():
    made = plan(sheet(model_path()), PHONE, request=SHORT)
    assert made.recommended == RESIDENT
    assert all(row.fits for row in made.paths)
    assert made.path(MMAP).decode_tok_s == made.path(RESIDENT).decode_tok_s
    assert made.path(MMAP).remark == ""


def test_a_model_beyond_memory_is_recommended_streamed():
    made = plan(sheet("qwen3-30b-a3b", bits=4.85), PHONE)
    assert made.recommended == OVERLAPPED
    assert math.isnan(made.path(RESIDENT).decode_tok_s)
    assert not made.path(MMAP).fits
    assert "factor" in made.path(MMAP).remark
    assert made.path(MMAP).decode_tok_s < made.path(SERIAL).decode_tok_s
    assert made.path(SERIAL).decode_tok_s < made.path(OVERLAPPED).decode_tok_s
    for row in made.paths:
        if row.path != RESIDENT:
            assert row.low_tok_s < row.decode_tok_s < row.high_tok_s
    assert made.path(OVERLAPPED).memory.total_mib <= 0.9 * made.usable_mib + 1


def test_a_model_that_fits_without_air_is_streamed():
    model = sheet("olmoe-1b-7b", bits=4.85)
    whole = plan(model, small_memory(11000)).path(RESIDENT).memory.total_mib
    tight = plan(model, small_memory(whole * 1.02))
    assert tight.path(RESIDENT).fits
    assert tight.recommended == OVERLAPPED
    assert "no air" in tight.reason


def test_nothing_fits_where_even_dense_weights_do_not():
    made = plan(sheet("gpt-oss-120b"), small_memory(1000))
    assert made.recommended is None
    assert "Even without experts" in made.reason
    assert math.isnan(made.path(OVERLAPPED).decode_tok_s)
    json.dumps(made.to_json(), allow_nan=False)


def test_a_cache_that_does_not_fit_is_said_so():
    made = plan(sheet("qwen3-30b-a3b", bits=4.85), PHONE, cache_mib=5500)
    assert made.recommended is None
    assert "Give a smaller cache, or auto" in made.reason


def test_below_the_token_cycle_the_cache_is_turned_off():
    model = sheet("gpt-oss-120b", bits=4.3)
    beside = plan(model, PHONE, cache_mib=0).path(OVERLAPPED).memory.total_mib
    made = plan(model, small_memory(beside + 1000))
    assert made.cache_mib == 0
    assert made.path(OVERLAPPED).read_mib_per_token == pytest.approx(made.cycle_mib)
    assert "every expert is read anew" in made.reason


def test_more_cache_is_never_slower():
    model = sheet("qwen3-30b-a3b", bits=4.85)
    speeds = [
        plan(model, small_memory(11000), cache_mib=budget).path(SERIAL).decode_tok_s
        for budget in (0, 500, 1500, 3000, 6000)
    ]
    assert speeds == sorted(speeds)
    assert speeds[0] == speeds[1] < speeds[2]


def test_a_trace_takes_the_place_of_the_assumption():
    model = sheet(model_path())
    trace = routing(model)
    budget = 2 * model.token_cycle_bytes / 2**20
    made = plan(model, PHONE, cache_mib=budget, trace=trace, policy="lfu", request=SHORT)
    asked = demand(trace, entry_bytes=model.entry_bytes)
    hit = replay(asked, [budget], ["lfu"])["hit_pct_decode"].iloc[0]
    row = made.path(SERIAL)
    assert row.hit is not None
    assert row.hit.hit_pct == pytest.approx(hit)
    assert row.read_mib_per_token == pytest.approx(made.cycle_mib * (1 - hit / 100))
    assert any("replay of the trace (lfu)" in text for text in made.assumptions)


def test_a_header_alone_gives_the_same_plan(tmp_path: Path):
    whole = open_gguf(model_path())
    cut = tmp_path / "header.gguf"
    with model_path().open("rb") as file:
        cut.write_bytes(file.read(whole.data_offsets[0]))
    of_header, of_file = (plan(sheet(path), PHONE, request=SHORT) for path in (cut, model_path()))
    assert of_header.to_json() == of_file.to_json()


def test_parts_of_the_memory_are_those_of_the_sheet():
    model = sheet("qwen3-30b-a3b", bits=4.85)
    made = plan(model, PHONE, cache_mib=2000)
    memory = made.path(SERIAL).memory
    assert memory.dense_mib == pytest.approx(model.dense_bytes / 2**20)
    assert memory.experts_mib == 2000
    assert memory.kv_mib == pytest.approx(model.kv_bytes(4096) / 2**20)
    assert made.path(RESIDENT).memory.experts_mib == pytest.approx(model.routed_bytes / 2**20)
    parts = made.memory_table().iloc[0]
    assert parts[["dense_mib", "experts_mib", "kv_mib", "compute_mib"]].sum() == pytest.approx(
        parts["total_mib"]
    )


def test_compute_buffers_are_near_llama_cpps_own_count():
    from labkit.errors import SheetError
    from labkit.sheet import CacheOptions
    from labkit.sheet.ask import ask_llama

    try:
        asked = ask_llama(model_path(), CacheOptions(512, 512))
    except SheetError as error:
        pytest.skip(str(error))
    assert compute_mib(sheet(model_path()), Request()) == pytest.approx(
        asked.compute_bytes / 2**20, rel=0.25
    )


def test_the_table_has_a_row_for_each_path_and_json_has_no_nan():
    made = plan(sheet("qwen3-30b-a3b", bits=4.85), PHONE)
    table = made.table()
    assert table["path"].tolist() == list(PATHS)
    assert table["recommended"].sum() == 1
    text = json.dumps(made.to_json(), allow_nan=False)
    assert json.loads(text)["paths"][1]["decode_tok_s"] is None
    assert set(rates(made)) == set(PATHS)
    with pytest.raises(KeyError, match="no path 'fast'"):
        made.path("fast")


def test_a_profile_without_prefill_rate_says_so():
    figures = {k: v for k, v in PHONE.figures.items() if k not in ("prefill_gflop_s", "band_pct")}
    bare = DeviceProfile("bare", "Bare", figures, PHONE.flash)
    made = plan(sheet("qwen3-30b-a3b"), bare)
    assert math.isnan(made.path(OVERLAPPED).prefill_s)
    assert made.path(OVERLAPPED).decode_tok_s > 0
    assert any("prefill_gflop_s" in text for text in made.assumptions)
    assert any("band_pct" in text for text in made.assumptions)


def test_what_is_small_is_not_shown_as_nothing() -> None:
    """A tiny model on a phone: times under 50 ms, reads and a budget of fractions of a MiB."""
    model = sheet(model_path())
    made = plan(model, PHONE, cache_mib=0.7)
    table = next(part for part in plan_text(made) if isinstance(part, Table))
    cells = [[float(str(cell)) for cell in table.columns[i].cells if cell] for i in (2, 5, 6)]
    assert max(cells[0]) > 0
    assert min(*cells[1], *cells[2]) > 0
    step = next_step(made, model)
    assert step is not None
    assert "--resident" in step or "--cache-mib 0.7" in step
