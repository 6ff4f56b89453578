"""What cannot be planned is refused in words: files, contexts, dense models, foreign traces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_plan import PHONE, SHORT, routing

from labkit.bundled import model_path
from labkit.device import DeviceProfile
from labkit.device.plan import Request
from labkit.device.planner import plan
from labkit.errors import (
    BudgetError,
    DeviceError,
    LabkitError,
    NotMoEError,
    OptionError,
    PlanError,
    TraceError,
)
from labkit.gguf_map import open_gguf
from labkit.sheet import sheet

MAIN = "import sys; sys.argv[0] = 'labkit'; from labkit.cli import main; main()"
BUNDLED = str(model_path())


def labkit(*args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def dense_shape(folder: Path) -> Path:
    shape = {
        "format": "labkit-shape 1",
        "name": "Tiny dense",
        "architecture": "llama",
        "keys": {
            "block_count": 1,
            "context_length": 512,
            "embedding_length": 64,
            "vocab_size": 100,
            "attention.head_count": 2,
            "attention.head_count_kv": 2,
            "feed_forward_length": 128,
        },
        "tensors": {
            "token_embd.weight": [64, 100],
            "output_norm.weight": [64],
            "output.weight": [64, 100],
            "blk.*.attn_norm.weight": [64],
            "blk.*.attn_q.weight": [64, 64],
            "blk.*.attn_k.weight": [64, 64],
            "blk.*.attn_v.weight": [64, 64],
            "blk.*.attn_output.weight": [64, 64],
            "blk.*.ffn_norm.weight": [64],
            "blk.*.ffn_gate.weight": [64, 128],
            "blk.*.ffn_up.weight": [64, 128],
            "blk.*.ffn_down.weight": [128, 64],
        },
        "sources": ["made up"],
    }
    path = folder / "dense.json"
    path.write_text(json.dumps(shape))
    return path


def test_a_dense_model_is_told_to_have_nothing_to_stream(tmp_path: Path):
    with pytest.raises(NotMoEError, match=r"Tiny dense is a dense model.*nothing to stream.*fits"):
        plan(sheet(dense_shape(tmp_path)), PHONE)


def test_a_context_longer_than_the_models_is_refused():
    request = Request(n_ctx=600, prompt_tokens=64, output_tokens=64)
    with pytest.raises(OptionError, match="600 tokens is longer than the model's own 512"):
        plan(sheet(model_path()), PHONE, request=request)


def test_a_request_that_does_not_fit_its_context_is_refused():
    request = Request(n_ctx=128, prompt_tokens=100, output_tokens=100)
    with pytest.raises(PlanError, match=r"do not fit in a context of 128.*--n-ctx 200"):
        plan(sheet(model_path()), PHONE, request=request)


@pytest.mark.parametrize(
    "wrong", [{"n_ctx": 0}, {"prompt_tokens": 0}, {"output_tokens": -1}, {"lanes": 0}]
)
def test_counts_that_make_no_sense_are_refused(wrong: dict[str, int]):
    with pytest.raises(PlanError, match=f"{next(iter(wrong))} is {next(iter(wrong.values()))}"):
        plan(sheet(model_path()), PHONE, request=Request(**wrong))


@pytest.mark.parametrize("cache_mib", [-1, float("nan"), 0.001])
def test_a_cache_that_makes_no_sense_is_refused(cache_mib: float):
    with pytest.raises(BudgetError, match=r"makes no sense|cannot hold"):
        plan(sheet(model_path()), PHONE, cache_mib=cache_mib, request=SHORT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen3moe"}, "architecture qwen3moe in the trace"),
        ({"n_expert": 128}, "experts a layer 128 in the trace"),
        ({"n_expert_used": 8}, "experts a token 8 in the trace"),
    ],
)
def test_a_trace_of_another_model_is_refused(changes: dict[str, Any], message: str):
    model = sheet(model_path())
    trace = routing(model, tokens=2, **changes)
    with pytest.raises(TraceError, match=message):
        plan(model, PHONE, trace=trace, request=SHORT)


def test_a_foreign_trace_without_a_header_is_known_by_its_rows():
    other = sheet("qwen3-30b-a3b")
    trace = routing(other, tokens=2, architecture="", n_expert=0, n_expert_used=0)
    with pytest.raises(TraceError, match="of another model: it has layer 0"):
        plan(sheet(model_path()), PHONE, trace=trace, request=SHORT)
    mine = sheet(model_path())
    wide = routing(mine, tokens=2, architecture="", n_expert=0, n_expert_used=0)
    wide.table  # noqa: B018
    table = wide.table.assign(expert=wide.table["expert"] + 20)
    with pytest.raises(TraceError, match="it names expert"):
        plan(mine, PHONE, trace=type(wide)(_loaded=table), request=SHORT)


def test_a_trace_without_generated_tokens_is_refused():
    model = sheet(model_path())
    with pytest.raises(TraceError, match="no generated token"):
        plan(model, PHONE, cache_mib=2, trace=routing(model, tokens=1), request=SHORT)


@pytest.mark.parametrize("missing", ["decode_gb_s"])
def test_a_profile_without_a_needed_figure_is_refused(missing: str):
    figures = {k: v for k, v in PHONE.figures.items() if k != missing}
    bare = DeviceProfile("bare", "Bare", figures, PHONE.flash, origin="bare.json")
    with pytest.raises(DeviceError, match=rf"bare\.json: .*{missing}"):
        plan(sheet(model_path()), bare, request=SHORT)


def test_a_profile_without_flash_is_refused():
    bare = DeviceProfile("bare", "Bare", PHONE.figures)
    with pytest.raises(DeviceError, match="no flash rates"):
        plan(sheet(model_path()), bare, request=SHORT)


def test_errors_are_labkits_own():
    assert issubclass(PlanError, LabkitError)
    assert issubclass(DeviceError, LabkitError)


def test_the_command_shows_all_paths_and_a_recommendation():
    done = labkit("plan", "qwen3-30b-a3b", "--device", "oneplus-15r", "--bits", "4.85")
    assert done.returncode == 0, done.stderr
    for word in ("mmap", "resident", "stream-serial", "stream-overlap", "stream it", "assumed"):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_command_gives_json():
    args = ("--device", "oneplus-15r", "--n-ctx", "256", "--prompt", "64", "--output", "64")
    done = labkit("plan", BUNDLED, *args, "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert value["recommended"] == "resident"
    assert value["paths"][0]["path"] == "mmap"


def test_the_command_compares_budgets():
    args = ("plan", "qwen3-30b-a3b", "--device", "oneplus-15r", "--cache-mib", "0,2000,auto,99999")
    done = labkit(*args)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [row[0] for row in rows if row and row[0] in ("0", "2,000")] == ["0", "2,000"]
    assert "no room" in done.stdout
    plans = json.loads(labkit(*args, "--json").stdout)
    assert [made["cache_mib"] for made in plans][:2] == [0, 2000]


def test_the_command_says_what_to_type_next(tmp_path: Path):
    whole = labkit("plan", BUNDLED, "--device", "oneplus-15r")
    assert f"labkit generate {BUNDLED} -p TEXT --resident" in whole.stdout
    cut = tmp_path / "header.gguf"
    cut.write_bytes(model_path().read_bytes()[: open_gguf(BUNDLED).data_offsets[0]])
    header = labkit("plan", cut, "--device", "oneplus-15r")
    assert header.returncode == 0, header.stderr
    assert "labkit generate" not in header.stdout


def test_a_dense_model_is_one_message(tmp_path: Path):
    done = labkit("plan", dense_shape(tmp_path), "--device", "oneplus-15r")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "nothing to stream" in done.stderr


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["no-such-model", "--device", "oneplus-15r"], 1, "no published shape"),
        ([BUNDLED, "--device", "oneplus-15x"], 1, "Did you mean 'oneplus-15r'"),
        (
            [BUNDLED, "--device", "oneplus-15r", "--n-ctx", "600"],
            1,
            "longer than the model's own 512",
        ),
        ([BUNDLED], 2, "which device?"),
        ([BUNDLED, "--device", "oneplus-15r", "--cache-mib", "much"], 2, "no number of MiB"),
        ([BUNDLED, "--device", "oneplus-15r", "--cache-mib", "-3"], 2, "no number of MiB"),
        ([BUNDLED, "--device", "oneplus-15r", "--policy", "best"], 2, "there is no policy"),
        ([BUNDLED, "--device", "oneplus-15r", "--trace", "absent.csv"], 1, "absent.csv"),
    ],
)
def test_bad_use_of_the_command(args: list[str], code: int, message: str, tmp_path: Path):
    done = labkit("plan", *args, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_device_json_in_the_directory_is_the_default(tmp_path: Path):
    PHONE.save(tmp_path / "device.json")
    done = labkit("plan", "olmoe-1b-7b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "OnePlus 15R" in done.stdout


def test_the_device_command_lists_and_shows(tmp_path: Path):
    assert "oneplus-15r" in labkit("device").stdout
    shown = labkit("device", "oneplus-15r")
    assert shown.returncode == 0
    assert "read_share_pct" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    bad = tmp_path / "bad.json"
    bad.write_text('{"format": "labkit-device 1", "name": "x", "title": "x", "figures": {}}')
    done = labkit("device", bad)
    assert done.returncode == 1
    assert "ram_mib (physical memory) is missing" in done.stderr
