"""Measuring this machine, and calibrating a profile with a benchmark.

Timing is not tested here: only that what was measured is what ends up in the profile.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit.bench.result import BenchResult
from labkit.bundled import model_path
from labkit.device import DeviceProfile, Figure, FlashPoint, load_profile
from labkit.device.calibrate import bench_rows, calibrate, fit_bench
from labkit.device.measure import measure_this_machine, speed_figures
from labkit.device.plan import OVERLAPPED, RESIDENT, SERIAL
from labkit.device.planner import plan
from labkit.device.probes import ModelRate, dram_gb_s, flash_rates
from labkit.device.speed import Constants, token_time
from labkit.errors import BenchError, DeviceError, ModelFileError
from labkit.host import usable_memory_bytes
from labkit.sheet import sheet

MIB = 2**20
MODEL = sheet(model_path("main-f16"))
TRUTH = Constants(decode_gb_s=2.0, read_share_pct=60.0, hidden_pct=70.0)


def test_this_machine_becomes_a_profile_that_plans(tmp_path: Path):
    told: list[str] = []
    made = measure_this_machine(model=model_path(), progress=told.append)
    assert len(told) == 3
    assert made.need("usable_mib") <= made.need("ram_mib")
    for name in ("decode_gb_s", "prefill_gflop_s", "dram_read_gb_s", "dram_copy_gb_s", "threads"):
        assert made.figures[name].how == "measured"
        assert made.need(name) > 0
    assert made.get("layer_ms") is None  # the bundled model beside itself tells nothing
    again = load_profile(made.save(tmp_path / "device.json"))
    assert again.to_json() == made.to_json()
    if made.flash:
        assert plan(sheet(model_path()), again).recommended
    else:
        assert "Flash was not measured" in made.notes


def test_a_model_larger_than_memory_cannot_be_measured(monkeypatch: pytest.MonkeyPatch):
    small = 5 * MIB
    monkeypatch.setattr("labkit.device.measure.usable_memory_bytes", lambda: small)
    with pytest.raises(DeviceError, match=r"8 MiB in memory and 5 MiB are free"):
        measure_this_machine(model=model_path())
    assert usable_memory_bytes() > small


def test_what_is_no_model_is_refused(tmp_path: Path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError):
        measure_this_machine(model=bad)


def test_memory_rates_are_numbers():
    read, copied = dram_gb_s(2, mib=8, repeats=2)
    assert math.isfinite(read)
    assert read > 0
    assert copied > 0


def test_flash_rates_cover_sizes_and_lanes_that_the_file_has_room_for(tmp_path: Path):
    path = tmp_path / "data.bin"
    path.write_bytes(np.random.default_rng(0).bytes(16 * MIB))
    found = flash_rates(path, seconds=0.02)
    if isinstance(found, str):
        pytest.skip(found)
    measured = {(rate.read_kib, rate.lanes) for rate in found}
    assert measured == {(128, 4), (512, 4), (1024, 1), (1024, 2), (1024, 4), (1024, 8)}
    assert all(rate.mib_s > 0 for rate in found)


def test_two_models_tell_the_layer_from_the_bytes():
    rate, layer_s = 5e9, 0.0002
    seconds = MODEL.token_bytes / rate + MODEL.n_layers * layer_s
    small_bytes, small_layers = MODEL.token_bytes / 20, 4
    small = (small_bytes / rate + small_layers * layer_s, small_layers, small_bytes)
    figures = speed_figures(MODEL, ModelRate(seconds, 50.0), small, "x")
    assert figures["decode_gb_s"].value == pytest.approx(5, rel=0.01)
    assert figures["layer_ms"].value == pytest.approx(0.2, rel=0.01)
    alone = speed_figures(MODEL, ModelRate(seconds, 50.0), None, "x")
    assert "layer_ms" not in alone
    assert alone["decode_gb_s"].value < 5


def own_profile() -> DeviceProfile:
    figures = {
        "ram_mib": Figure(8192, "measured", "x"),
        "decode_gb_s": Figure(9.0, "measured", "x"),
        "band_pct": Figure(30, "assumed", "x"),
    }
    return DeviceProfile("own", "Own", figures, (FlashPoint(1024, 4, 900, "x"),))


def bench(truth: Constants = TRUTH, *, n: int = 6, **facts: Any) -> BenchResult:
    """A benchmark whose tokens took what the speed model says for `truth`, and read by budget."""
    cases = [{"name": "resident", "kind": "resident", "options": {}}]
    cases += [
        {"name": f"{kind}@{budget}", "kind": kind, "options": {}}
        for kind in ("stream-serial", "stream")
        for budget in (1, 3)
    ]
    cases.append({"name": "repack", "kind": "repack", "options": {}})
    runs, tokens = [], []
    for case in cases:
        budget = float(case["name"].partition("@")[2] or 0)
        read = 0.0 if not budget else 2.0 / budget
        wall = token_time(
            truth,
            weight_mib=MODEL.token_bytes / MIB,
            layers=MODEL.n_layers,
            read_mib=read,
            flash_mib_s=900,
            overlapped=case["kind"] == "stream",
        ).wall_s
        runs.append(
            {
                "round": 1, "place": 0, "case": case["name"], "kind": case["kind"],
                "status": "ok", "n_tokens": n, "decode_tok_s": 1 / float(wall),
                "cache_mib": budget or None, "digests": [],
            }
        )  # fmt: skip
        tokens += [
            {
                "round": 1, "case": case["name"], "index": i, "warmup": False,
                "wall_ms": 1000 * float(wall), "read_mib": read, "hits": 1, "misses": 1,
            }
            for i in range(n)
        ]  # fmt: skip
    known = {
        "model": str(model_path("main-f16")), "model_mib": 15.0, "cases": cases,
        "baseline": "resident", "notes": [], "prompt_tokens": [1], "memory_limit_mib": None,
    }  # fmt: skip
    return BenchResult.of(known | facts, runs, tokens)


def test_calibration_finds_the_constants_of_a_benchmark(tmp_path: Path):
    made = calibrate(own_profile(), bench().save(tmp_path / "bench"))
    assert made.need("decode_gb_s") == pytest.approx(2.0, rel=0.05)
    assert made.need("read_share_pct") == pytest.approx(60, rel=0.05)
    assert made.need("hidden_pct") == pytest.approx(70, rel=0.1)
    assert made.need("band_pct") == 10  # never less, however well a few runs agree
    assert made.figures["decode_gb_s"].how == "fitted"
    assert made.need("ram_mib") == 8192
    load_profile(made.save(tmp_path / "own.json"))


def test_a_wrong_layer_time_does_not_spoil_the_calibration():
    """Measured on a busy machine: the layers alone take longer than a token."""
    busy = own_profile().with_figures({"layer_ms": Figure(20.0, "measured", "x")})
    made = calibrate(busy, bench())
    assert made.need("read_share_pct") == pytest.approx(60, rel=0.05)
    assert made.need("layer_ms") < 20
    row = plan(MODEL, made, cache_mib=0).path(RESIDENT)
    truth = token_time(TRUTH, weight_mib=MODEL.token_bytes / MIB, layers=MODEL.n_layers)
    assert row.decode_tok_s == pytest.approx(1 / float(truth.wall_s), rel=0.02)


def test_the_command_calibrates_the_profile_in_the_directory(tmp_path: Path):
    own_profile().save(tmp_path / "device.json")
    bench().save(tmp_path / "bench")
    code = "import sys; sys.argv[0] = 'labkit'; from labkit.cli import main; main()"
    command = [sys.executable, "-c", code, "device", "--calibrate", "bench", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "written to device.json" in done.stderr
    value = load_profile(tmp_path / "device.json").to_json()
    assert json.loads(done.stdout) == value
    assert value["figures"]["decode_gb_s"]["value"] == pytest.approx(2.0, rel=0.05)


def test_a_calibrated_profile_predicts_a_new_budget():
    made = calibrate(own_profile(), bench())
    read = 1.0
    planned = plan(MODEL, made, cache_mib=0).path(SERIAL)
    assert planned.read_mib_per_token > read
    for path, overlapped in ((SERIAL, False), (OVERLAPPED, True)):
        row = plan(MODEL, made, cache_mib=0).path(path)
        truth = token_time(
            TRUTH,
            weight_mib=MODEL.token_bytes / MIB,
            layers=MODEL.n_layers,
            read_mib=row.read_mib_per_token,
            flash_mib_s=900,
            overlapped=overlapped,
        )
        assert row.decode_tok_s == pytest.approx(1 / float(truth.wall_s), rel=0.05)


def test_rows_of_a_benchmark_leave_out_what_the_model_does_not_cover():
    rows = bench_rows(own_profile(), bench(), MODEL)
    assert rows["case"].tolist() == [
        "resident", "stream-serial@1", "stream-serial@3", "stream@1", "stream@3",
    ]  # fmt: skip
    assert rows["overlapped"].tolist() == [False, False, False, True, True]
    assert (fit_bench(own_profile(), bench(), MODEL).errors["error_pct"].abs() < 5).all()


def test_a_benchmark_without_reads_cannot_calibrate():
    full = bench()
    full.tokens["read_mib"] = 0.0
    with pytest.raises(DeviceError, match=r"nothing to calibrate.*labkit bench MODEL"):
        calibrate(own_profile(), full)


def test_what_is_no_benchmark_is_refused(tmp_path: Path):
    with pytest.raises(BenchError, match="cannot be read"):
        calibrate(own_profile(), tmp_path)
    (tmp_path / "bench.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(BenchError, match="its format is not"):
        calibrate(own_profile(), tmp_path)
