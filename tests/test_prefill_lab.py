"""`labkit prefill`: devices, paths and processes as they are here, and tables of known rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from gguf_bytes import tiny_moe
from typer.testing import CliRunner

from labkit.bundled import model_path
from labkit.cli import app
from labkit.errors import BenchError, LlamaError, OptionError
from labkit.gguf_map import open_gguf
from labkit.prefill_lab.device_model import DeviceModel
from labkit.prefill_lab.devices import find_device, ggml_devices
from labkit.prefill_lab.lab import (
    PrefillPlan,
    default_lengths,
    fitting_paths,
    ladder,
    run_prefill,
)
from labkit.prefill_lab.paths import DEFAULT_PATHS, parse_paths
from labkit.prefill_lab.process import ask
from labkit.prefill_lab.result import PrefillResult
from labkit.runtime.stock import StockModel

MODEL = model_path()


def test_the_cpu_is_a_device_like_any_other():
    devices = ggml_devices()
    cpu = next(device for device in devices if device.kind == "CPU")
    assert cpu.is_cpu
    assert find_device(cpu.name.lower()) == cpu
    assert len({device.name for device in devices}) == len(devices)


def test_a_device_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(OptionError, match=r"no device 'HTP9'.*CPU"):
        find_device("HTP9")


def test_layers_on_a_device_compute_what_stock_llama_cpp_does():
    """On the one device that every machine has; another takes the same calls."""
    tokens = list(range(40, 90))
    with (
        DeviceModel(MODEL, "CPU", n_ctx=256, threads=2) as device,
        StockModel(MODEL, "repack", n_ctx=256, threads=2) as stock,
    ):
        for model in (device, stock):
            model.prefill(tokens)
        assert np.abs(device.logits() - stock.logits()).max() < 0.1
        assert device.logits().argmax() == stock.logits().argmax()
        before = device.logits()
        device.reset()
        device.prefill(tokens)
        assert (device.logits() == before).all()
        device.decode(5)
        assert device.n_past == len(tokens) + 1


def test_names_stand_for_paths():
    devices = ggml_devices()
    assert parse_paths(["mmap", "layers"], devices) == ["mmap", "layers"]
    assert parse_paths(["mmap", "device:cpu"], devices) == ["mmap", "device:CPU"]
    others = [f"device:{d.name}" for d in devices if not d.is_cpu]
    assert parse_paths(["mmap", "devices"], devices) == ["mmap", *others]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["mmpa"], "no prefill path 'mmpa'.*mmap"),
        (["mmap", "mmap"], "asked for twice"),
        (["device:HTP0:7"], "no device 'HTP0:7'"),
    ],
)
def test_unknown_paths_are_refused(names: list[str], words: str):
    with pytest.raises(OptionError, match=words):
        parse_paths(names, [])


def test_devices_alone_are_nothing_where_there_is_only_a_cpu():
    with pytest.raises(OptionError, match="no device besides the CPU"):
        parse_paths(["devices"], [find_device("CPU")])


def test_a_dense_model_takes_the_default_paths_that_stream_nothing(tmp_path: Path):
    dense = open_gguf(tiny_moe(dense_layers=3, n_layers=3).write(tmp_path / "dense.gguf"))
    assert fitting_paths(DEFAULT_PATHS, dense) == ["mmap", "resident", "repack", "devices"]
    assert fitting_paths(["layers"], dense) == ["layers"]  # asked for: refused, with the reason
    assert fitting_paths(DEFAULT_PATHS, open_gguf(MODEL)) == DEFAULT_PATHS


def test_lengths_climb_to_the_longest():
    assert ladder(2048) == [8, 32, 128, 512, 2048]
    assert ladder(100) == [8, 32, 100]
    assert ladder(5) == [5]
    assert default_lengths(MODEL, 64) == [8, 32, 128, 448]  # of a context of 512


def test_a_worker_that_dies_is_an_answer():
    job = {"path": "mmap", "model": str(MODEL), "prompt": [1 << 30], "lengths": [1]}
    job |= {"outputs": 1, "threads": 1, "n_ctx": 256, "chunk": 8, "cache_mib": None, "lanes": 1}
    answer = ask(job)
    assert not answer["ok"]
    assert answer["reason"]
    assert not ask({"text": "x", "model": "/nowhere.gguf"})["ok"]


@pytest.fixture(scope="module")
def measured() -> PrefillResult:
    plan = PrefillPlan(
        MODEL,
        paths=["mmap", "resident", "device:CPU"],
        lengths=[8, 64],
        outputs=[1, 3],
        rounds=2,
        chunk=32,
        threads=2,
    )
    return run_prefill(plan)


def test_every_path_is_measured_in_every_round(measured: PrefillResult):
    assert (measured.runs["status"] == "ok").all(), measured.runs["reason"].tolist()
    assert len(measured.runs) == 6
    rates = measured.rates()
    assert set(zip(rates["path"], rates["tokens"], strict=True)) == {
        (path, n) for path in ("mmap", "resident", "device:CPU") for n in (8, 64)
    }
    assert (rates["tok_s"] > 0).all()
    assert (rates["low_tok_s"] <= rates["high_tok_s"]).all()
    assert rates.loc[rates["path"] == "mmap", "speed_ratio"].tolist() == [1.0, 1.0]
    assert rates["read_mib"].isna().all()  # labkit read nothing on these paths


def test_a_request_grows_with_its_answer(measured: PrefillResult):
    table = measured.request_table()
    for path in measured.paths:
        one, three = table[table["path"] == path].to_dict("records")
        assert (one["outputs"], three["outputs"]) == (1, 3)
        assert three["request_s"] > one["request_s"]
        assert one["prefill_pct"] == 100 > three["prefill_pct"]
        assert math.isnan(one["decode_tok_s"])


def test_starts_hold_memory_and_time(measured: PrefillResult):
    starts = measured.starts().set_index("path")
    assert (starts["first_token_s"] > starts["open_s"]).all()
    assert (starts["peak_rss_mib"] > 8).all()
    assert (starts["failed"] == 0).all()


def test_what_is_not_there_is_said(measured: PrefillResult):
    others = [d for d in ggml_devices() if not d.is_cpu]
    assert any("no device besides the CPU" in note for note in measured.facts["notes"]) != bool(
        others
    )


def test_tables_are_saved(measured: PrefillResult, tmp_path: Path):
    measured.save(tmp_path / "deep" / "run")
    saved = pd.read_csv(tmp_path / "deep" / "run" / "prefills.csv")
    assert len(saved) == len(measured.prefills)
    json.dumps(measured.to_json(), allow_nan=False)


def test_a_path_that_fails_leaves_the_others():
    facts: dict[str, Any] = {"paths": {"mmap": "", "layers": ""}, "notes": []}
    runs = [
        {"round": 1, "path": "mmap", "status": "ok", "reason": None, "open_s": 1.0},
        {"round": 1, "path": "layers", "status": "failed", "reason": "no room"},
    ]
    prefills = [{"round": 1, "path": "mmap", "tokens": 8, "ttft_s": 0.5, "storage_bytes": None}]
    result = PrefillResult.of(facts, runs, prefills, [], [])
    assert result.paths == ["mmap"]
    assert result.rates()["tok_s"].tolist() == [16.0]
    _, failed = result.starts().to_dict("records")
    assert (failed["path"], failed["failed"], failed["reason"]) == ("layers", 1, "no room")
    assert math.isnan(failed["open_s"])
    nothing = PrefillResult.of(facts, runs[1:], [], [], [])
    assert (nothing.paths, nothing.base) == ([], None)
    assert len(nothing.rates()) == len(nothing.request_table()) == 0


def test_rounds_are_compared_within_themselves():
    facts: dict[str, Any] = {"paths": {"mmap": "", "repack": ""}, "notes": []}
    rows = [
        {"round": n, "path": path, "tokens": 8, "ttft_s": slow * (1.0 if path == "mmap" else 0.5)}
        for n, slow in ((1, 1.0), (2, 10.0), (3, 1.0))
        for path in ("mmap", "repack")
    ]
    rates = PrefillResult.of(facts, [], rows, [], []).rates().set_index("path")
    assert rates.loc["repack", "speed_ratio"] == 2.0  # although round 2 was ten times as slow


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths": [0, 8]}, "below 1"),
        ({"outputs": []}, "missing"),
        ({"rounds": 0}, "rounds is 0"),
        ({"chunk": -5}, "chunk is -5"),
    ],
)
def test_absurd_plans_are_refused(change: dict, words: str):
    with pytest.raises(OptionError, match=words):
        PrefillPlan(MODEL, **change)


def test_a_prompt_longer_than_the_context_is_refused_before_anything_runs():
    with pytest.raises(OptionError, match=r"longer than the model's context of 512"):
        run_prefill(PrefillPlan(MODEL, lengths=[500], outputs=[64], paths=["mmap"]))


def test_the_command_prints_tables_and_json(tmp_path: Path):
    run = CliRunner().invoke(
        app,
        [
            *("prefill", str(MODEL), "--tokens", "16", "--paths", "mmap", "--outputs", "1,2"),
            *("--rounds", "1", "--json", "-o", str(tmp_path / "out")),
        ],
    )
    assert run.exit_code == 0, run.output
    answer = json.loads(run.stdout)
    assert [row["tokens"] for row in answer["prefill"]] == [8, 16]
    assert answer["prefill"][0]["spread_pct"] is None  # one round has no spread
    assert (tmp_path / "out" / "prefill.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_fails_where_no_path_works():
    run = CliRunner().invoke(
        app,
        [
            *("prefill", str(MODEL), "--tokens", "8", "--paths", "layers", "--rounds", "1"),
            *("--cache-mib", "1"),
        ],
    )
    assert isinstance(run.exception, BenchError)
    assert "two whole layers" in str(run.exception)


@pytest.mark.parametrize("tokens", ["eight", "0", "8,-1"])
def test_the_command_refuses_what_is_no_length(tokens: str):
    run = CliRunner().invoke(app, ["prefill", str(MODEL), "--tokens", tokens])
    assert run.exit_code == 2


def test_a_device_model_says_why_it_cannot(tmp_path: Path):
    broken = tmp_path / "broken.gguf"
    whole = MODEL.read_bytes()
    # A tensor's name that llama.cpp looks for and does not find.
    broken.write_bytes(whole.replace(b"output_norm.weight", b"output_mron.weight", 1))
    with pytest.raises(LlamaError, match="cannot load"):
        DeviceModel(broken, "CPU", n_ctx=256)
