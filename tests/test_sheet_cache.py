"""Weights and KV of the sheet equal llama.cpp's own count, byte by byte, for every architecture.

llama.cpp is loaded with real buffers here, and its count is read through the one function that has
it. Where that function cannot be called (not Linux on x86-64), its log is the reference, which
rounds to 0.01 MiB.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from labkit import synth
from labkit.errors import OptionError, SheetError
from labkit.gguf_map import open_gguf
from labkit.runtime import ggml
from labkit.sheet import (
    CacheOptions,
    ModelShape,
    ModelSheet,
    ask_llama,
    memory_ledger,
    sheet,
)
from labkit.sheet.ask_worker import memory_breakdown
from labkit.sheet.known_caches import CHECKED

OPTIONS = (
    CacheOptions(512, 64),
    CacheOptions(512, 512, swa_full=True),
    CacheOptions(300, 32),
)
NEEDS_HEADS_OF_THEIR_OWN = {  # llama.cpp wants tensors for their multi-token heads
    *("bailingmoe2", "deepseek4", "exaone-moe", "glm5-next"),
    *("nemotron_h", "nemotron_h_moe", "qwen35moe", "qwen3next"),
}
_BUFFER = re.compile(r"(?:KV|RS|state) buffer size = +([0-9.]+) MiB")


@contextmanager
def llama_model(path: Path) -> Iterator[int]:
    llama = ggml.llama()
    params = llama.llama_model_default_params()
    params.n_gpu_layers, params.use_extra_bufts = 0, False
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    assert model, f"llama.cpp does not load {path}"
    yield model
    llama.llama_model_free(model)


def allocated(model: int, options: CacheOptions, caplog: pytest.LogCaptureFixture):
    """(llama.cpp's own count or None, MiB by its log, lines of its log) of a context's KV."""
    llama = ggml.llama()
    context_params = llama.llama_context_default_params()
    context_params.n_ctx = options.n_ctx
    context_params.n_batch = context_params.n_ubatch = options.n_ubatch
    context_params.swa_full = options.swa_full
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "labkit.llama"):
        context = llama.llama_init_from_model(model, context_params)
    assert context
    counts = memory_breakdown(llama._lib, context)
    llama.llama_free(context)
    sizes = [float(m[1]) for r in caplog.records if (m := _BUFFER.search(r.getMessage()))]
    return None if counts is None else counts["kv"], sum(sizes), len(sizes)


@pytest.mark.parametrize("arch", synth.architectures())
def test_every_architecture(
    arch: str, synth_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = synth_model(arch)
    found = sheet(path)
    llama = ggml.llama()
    with llama_model(path) as model:
        assert found.total_bytes == llama.llama_model_size(model)
        assert found.total_params == llama.llama_model_n_params(model)
        for options in OPTIONS:
            expected, logged_mib, n_lines = allocated(model, options, caplog)
            kv = found.kv_bytes(**asdict(options))
            if expected is not None:
                assert kv == expected, options
            assert kv / 2**20 == pytest.approx(logged_mib, abs=0.005 * n_lines + 1e-9), options


@pytest.mark.parametrize("arch", synth.architectures())
def test_more_layers_and_wider_heads(
    arch: str,
    tmp_path: Path,
    synth_worker: synth.LlamaWorker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = synth.make(arch, tmp_path / "m.gguf", layers=9, d_model=128, worker=synth_worker)
    made = sheet(path)
    with llama_model(path) as model:
        expected, logged_mib, n_lines = allocated(model, CacheOptions(2048, 100), caplog)
    kv = sum(rows.nbytes(CacheOptions(2048, 100)) for rows in made.known_cache())
    assert expected is None or kv == expected
    assert kv / 2**20 == pytest.approx(logged_mib, abs=0.005 * n_lines + 1e-9)


@pytest.mark.parametrize("arch", ["qwen3moe", "gemma4", "deepseek2", "qwen35moe", "deepseek4"])
def test_llama_cpp_answers_without_allocating(
    arch: str, synth_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = synth_model(arch)
    options = CacheOptions(512, 64)
    answer = ask(path, options)
    with llama_model(path) as model:
        expected, _, _ = allocated(model, options, caplog)
    assert answer.kv_bytes == expected == sheet(path).kv_bytes(512, n_ubatch=64)
    assert answer.weights_bytes == sheet(path).total_bytes
    assert answer.compute_bytes >= sheet(path).compute_floor_bytes(64)


@pytest.mark.parametrize(("type_k", "type_v"), [("Q8_0", "Q8_0"), ("Q4_0", "F16"), ("F32", "F32")])
def test_other_types_of_cache(type_k: str, type_v: str, synth_model: Callable[..., Path]) -> None:
    path = synth_model("qwen3moe", d_model=256)
    options = CacheOptions(512, 64, type_k, type_v)
    assert ask(path, options).kv_bytes == sheet(path).kv_bytes(**asdict(options))


def test_rows_that_a_type_cannot_hold(synth_model: Callable[..., Path]) -> None:
    model = sheet(synth_model("deepseek4"))  # 64 wide keys
    with pytest.raises(OptionError, match="packs 256 at a time"):
        model.kv_bytes(512, type_k="Q4_K")


WITH_HEADS = {
    *("bailingmoe3", "deepseek32", "dflash", "dots3note", "gemma4", "glm4moe", "gpt-oss"),
    *("hy_v4", "jamba", "kimi-k3", "lfm2moe", "minimax-01", "minimax-m3", "qwen4exp"),
}
if os.environ.get("LABKIT_FULL"):
    WITH_HEADS = CHECKED - NEEDS_HEADS_OF_THEIR_OWN


@pytest.mark.parametrize("arch", sorted(WITH_HEADS))
def test_multi_token_heads(arch: str, synth_model: Callable[..., Path]) -> None:
    shape = with_a_head(synth_model(arch))
    options = CacheOptions(512, 64)
    assert ask(shape, options).kv_bytes == sheet(shape).kv_bytes(512, n_ubatch=64)


def with_a_head(path: Path) -> ModelShape:
    """The model with one more layer in its metadata, a multi-token head without tensors."""
    gguf = open_gguf(path)
    prefix = f"{gguf.architecture}."
    metadata = {
        key: [*value, value[-1]]
        if isinstance(value, list) and len(value) == gguf.n_layers
        else value
        for key, value in gguf.metadata.items()
        if key.startswith(prefix)
    }
    metadata[prefix + "block_count"] = gguf.n_layers + 1
    metadata[prefix + "nextn_predict_layers"] = 1
    tensors = tuple((t.name, t.shape) for t in gguf.tensors)
    return ModelShape("head", gguf.architecture, gguf.architecture, metadata, tensors, str(path))


def test_all_architectures_are_said_to_be_checked() -> None:
    assert set(synth.architectures()) <= CHECKED


def test_an_unknown_cache_is_said_to_be_unknown(synth_model: Callable[..., Path]) -> None:
    shape = with_a_head(synth_model("qwen3moe"))
    metadata = {k.replace("qwen3moe.", "notyet."): v for k, v in shape.metadata.items()}
    unknown = sheet(ModelShape("x", "notyet", "notyet", metadata, shape.tensors, "a test"))
    assert unknown.total_params == sheet(shape).total_params
    with pytest.raises(SheetError, match="'notyet' is not known"):
        unknown.kv_bytes(512)


def test_llama_cpp_fills_in_what_labkit_does_not_know(
    synth_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = synth_model("qwen3moe")
    known = sheet(path)
    monkeypatch.setattr("labkit.sheet.known_caches.CHECKED", frozenset())
    unknown = sheet(path)
    assert unknown.cache is None
    assert memory_ledger(unknown, 512).kv_bytes is None
    ledger = memory_ledger(unknown, 512, asked=ask(path, CacheOptions(512)))
    assert ledger.kv_bytes == known.kv_bytes(512)
    assert ledger.kv_counted_by == "llama.cpp"
    with pytest.raises(OptionError, match="longer than"):
        memory_ledger(unknown, 10**6)


def ask(model: Path | ModelShape, options: CacheOptions):
    try:
        return ask_llama(model, options)
    except SheetError as error:
        if "cannot be read here" in str(error):
            pytest.skip(str(error))
        raise


def test_ledger_of_a_hybrid_by_kind(synth_model: Callable[..., Path]) -> None:
    model: ModelSheet = sheet(synth_model("qwen35moe"))
    kinds = model.kv_kind_bytes(CacheOptions(512))
    assert set(kinds) == {"attention", "recurrent state"}
    assert sum(kinds.values()) == model.kv_bytes(512)
    # A state does not grow with the context.
    assert kinds["recurrent state"] == model.kv_kind_bytes(CacheOptions(256))["recurrent state"]
