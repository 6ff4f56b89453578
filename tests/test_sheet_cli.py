"""`labkit sheet` as people type it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from labkit.bundled import model_path
from labkit.cli import app
from labkit.errors import LabkitError
from labkit.sheet import shape_names


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["sheet", *map(str, args)])


def shown(*args: str | Path) -> str:
    result = run(*args)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_a_file() -> None:
    text = shown(model_path("main-q8_0"))
    assert "7.74 M, all of which must be stored" in text
    assert "32 a layer, 4 used by a token" in text
    assert "1-6; 1 leading dense" in text
    assert "KV cache 1.75 MiB" in text


def test_a_published_shape_on_a_device() -> None:
    text = shown("qwen3-30b-a3b", "--device", "snapdragon-8-gen-3", "--ctx", "8192")
    assert "30.5 B, all of which must be stored" in text
    assert "3.04 B (10.0%): compute, not memory" in text
    assert "with streamed experts it does" in text
    assert "ridge point 586 FLOP/byte" in text
    assert "source: https://" in text
    assert "labkit plan qwen3-30b-a3b --device snapdragon-8-gen-3" in text


def test_a_window_is_whole_in_a_session() -> None:
    text = shown("gpt-oss-20b", "--no-ask")
    assert "114 MiB (192 MiB in a labkit session, which keeps whole windows)" in text
    assert "at least: logits of one batch" in text


def test_all_published_models() -> None:
    text = shown()
    for name in shape_names():
        assert name in text
    assert "streamed" in text
    rows = json.loads(shown("--json", "--bits", "4", "--device", "snapdragon-8-gen-3"))
    assert len(rows) == len(shape_names())
    verdicts = {row["model"]: row["verdict"] for row in rows}
    assert verdicts["Qwen3-30B-A3B"] == "streamed"
    assert verdicts["OLMoE-1B-7B"] == "resident"


def test_json_of_one() -> None:
    value = json.loads(run("olmoe-1b-7b", "--json", "--no-ask", "--bits", "Q4_0").stdout)
    assert value["total_params"] == 6_919_161_856
    assert value["n_expert_used"] == 8
    assert value["device"] is None
    assert value["compute_asked"] is False
    assert value["kv_bytes"] == 512 * 2**20


def test_llama_cpp_is_asked(synth_model: Callable[..., Path]) -> None:
    path = synth_model("qwen3moe")
    value = json.loads(run(path, "--json", "--ctx", "256").stdout)
    if not value["compute_asked"]:
        pytest.skip("llama.cpp's count cannot be read here")
    assert value["compute_bytes"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("qwen3-30b-a3b", "--ctx", "50000"), "longer than the model's own 40960"),
        (("qwen3-30b",), "Did you mean 'qwen3-30b-a3b'"),
        (("absent.gguf",), "no such file"),
        (("olmoe-1b-7b", "--bits", "Q9"), "no type of ggml"),
        (("olmoe-1b-7b", "--bits", "99"), "from 0.5 to 32"),
        (("olmoe-1b-7b", "--device", "nokia-3310"), "no device profile 'nokia-3310'"),
    ],
)
def test_mistakes(args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert isinstance(result.exception, LabkitError)
    assert message in str(result.exception)


def test_what_is_no_number_of_tokens() -> None:
    assert run("olmoe-1b-7b", "--ctx", "0").exit_code == 2
    assert run("olmoe-1b-7b", "--ctx", "many").exit_code == 2
