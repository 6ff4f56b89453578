"""Sheets of damaged and strange files: a labkit error or a ledger, never a traceback."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_bytes import STRING, GGUFDoc, Key

from labkit.errors import LabkitError, ModelFileError, TruncatedFileError
from labkit.gguf_map import GGUFMap
from labkit.sheet import CacheOptions, ModelSheet, memory_ledger, sheet
from labkit.sheet.header import open_header
from labkit.sheet.report import sheet_json

STRANGE: tuple[object, ...] = (
    0, 1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**63, -1, True, 1.5, math.nan, "8", "", [], [1],
    [0] * 600, ["a"], [-1, 2, 3],
)  # fmt: skip


def use(model: ModelSheet) -> None:
    """Everything that the command shows."""
    ledger = memory_ledger(model, 256)
    sheet_json(model, ledger, 256, 64)
    model.roles_table()
    if model.cache is not None:
        model.kv_kind_bytes(CacheOptions(256))


@pytest.mark.parametrize(
    "arch", ["qwen3moe", "gpt-oss", "gemma4", "deepseek2", "deepseek4", "qwen35moe", "lfm2moe"]
)
def test_strange_metadata(arch: str, synth_model: Callable[..., Path]) -> None:
    gguf = open_header(synth_model(arch))
    keys = [k for k in gguf.metadata if k.startswith(f"{arch}.")]
    keys += [f"{arch}.{k}" for k in ("nextn_predict_layers", "attention.sliding_window_pattern")]
    rng = random.Random(7)
    outcomes = {"ledger": 0, "error": 0}
    for _ in range(100):
        changed = rng.sample(keys, rng.choice([1, 1, 2]))
        metadata = {**gguf.metadata, **{key: rng.choice(STRANGE) for key in changed}}
        outcomes[outcome(gguf, metadata)] += 1
    assert min(outcomes.values()) > 4, outcomes


def outcome(gguf: GGUFMap, metadata: dict[str, object]) -> str:
    """Take the map's constructor over changed metadata, as a damaged file would give it."""
    strange = open_header(gguf.paths[0])
    try:
        strange.metadata = metadata
        strange.n_layers = strange.count("block_count")
        strange.n_expert_used = strange.count("expert_used_count")
        use(sheet(strange))
    except LabkitError:
        return "error"
    return "ledger"


def test_a_header_cut_short(tmp_path: Path, synth_model: Callable[..., Path]) -> None:
    whole = synth_model("qwen3moe").read_bytes()
    length = open_header(synth_model("qwen3moe")).data_offsets[0]
    path = tmp_path / "cut.gguf"
    for end in (0, 3, 24, length // 2, length - 200):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelFileError):
            sheet(path)
    with pytest.raises(TruncatedFileError):
        sheet(path)
    path.write_bytes(whole[:length])
    assert sheet(path).header_only
    path.write_bytes(whole[:-1])
    assert sheet(path).header_only
    path.write_bytes(whole)
    assert not sheet(path).header_only


def test_a_file_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(GGUFDoc([Key("general.architecture", STRING, "llama")]).to_bytes())
    with pytest.raises(ModelFileError, match="no tensors"):
        sheet(path)


def test_a_type_that_labkit_does_not_know(synth_model: Callable[..., Path]) -> None:
    gguf = open_header(synth_model("qwen3moe"))
    gguf.tensors[3] = replace(gguf.tensors[3], type_id=199)
    model = sheet(gguf)
    assert "does not know" in model.notes[0]
    assert model.total_bytes == gguf.nbytes
