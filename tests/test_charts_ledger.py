"""Charts of the memory ledger: their titles say what the tables hold, and they are drawn."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from labkit import charts
from labkit.charts import ledger as draw
from labkit.device import load_profile
from labkit.sheet import MemoryLedger, fit_table, memory_ledger, sheet, sparsity_table
from labkit.sheet.report import contexts, intensity_table, kv_kinds_table

GIB = 2**30


def words(chart) -> str:
    assert charts.png(chart.to_dict())[:4] == b"\x89PNG"
    return charts.finding(chart).replace("\u00a0", " ")


@pytest.fixture
def ledger() -> MemoryLedger:
    parts = {"routed experts": 8 * GIB, "shared experts": 0, "dense": GIB, "embeddings": GIB // 2}
    return MemoryLedger(parts, GIB, GIB // 4, True, GIB // 16, GIB // 2, 2 * GIB)


def test_what_must_fit(ledger: MemoryLedger) -> None:
    assert words(draw.must_fit("Model", ledger, usable_mib=6000, device="phone")) == (
        "Model needs 10.8 GiB in memory; its active parameters are 2 GiB, a figure of work and not"
        " of memory. Streaming its experts takes 3.25 GiB"
    )
    bars = draw.ledger_bars(ledger).groupby("run")["size_gib"].sum()
    assert bars["all resident"] * GIB == ledger.resident_bytes
    assert bars["experts streamed"] * GIB == ledger.streamed_cycle_bytes
    assert bars["active parameters alone"] * GIB == ledger.token_bytes


def test_a_dense_model_has_no_streamed_bar() -> None:
    parts = {"routed experts": 0, "shared experts": 0, "dense": GIB // 64, "embeddings": 0}
    dense = MemoryLedger(parts, None, 0, False, 0, 0, GIB // 64)
    assert "Streaming" not in words(draw.must_fit("Dense", dense))
    assert "experts streamed" not in set(draw.ledger_bars(dense)["run"])


def test_how_a_context_grows() -> None:
    model = sheet("gpt-oss-20b")
    chart = draw.kv_growth(model.name, kv_kinds_table(model, contexts(model)), model.total_bytes)
    assert words(chart) == (
        "At 131,072 tokens gpt-oss-20b keeps 3.02 GiB of cache, 31 % of its weights; 512 x the"
        " context costs 258 x the memory"
    )


def test_one_context_is_a_chart_too() -> None:
    model = sheet("olmoe-1b-7b")
    chart = draw.kv_growth(model.name, kv_kinds_table(model, [4096]), model.total_bytes)
    assert words(chart).endswith("% of its weights")


def test_which_fits() -> None:
    models = [sheet("mobilemoe-s"), sheet("qwen3-30b-a3b")]
    devices = [load_profile("snapdragon-8-gen-3"), load_profile("apple-m2-pro")]
    chart = draw.which_fits(fit_table(models, devices, bits=(4, 8)))
    assert words(chart) == (
        "At 4 bits 3 of 4 pairs fit whole; in 1 more the active weights would fit and the model"
        " does not"
    )
    (select,) = chart.to_dict()["params"]
    assert select["bind"]["options"] == [4, 8]


def test_what_sparsity_saves() -> None:
    table = sparsity_table([sheet("qwen3-30b-a3b")], n_tokens=32)
    assert words(draw.what_sparsity_saves(table, 32)) == (
        "Routing saves work, not room: a token computes with 10 % of the weights, yet 32 tokens"
        " read 87 % of them, and all must be stored"
    )


def test_operations_per_byte() -> None:
    model, phone = sheet("qwen3-30b-a3b"), load_profile("snapdragon-8-gen-3")
    text = words(draw.intensity(model.name, intensity_table(model, phone), phone.name))
    assert text == (
        "One token of Qwen3-30B-A3B makes 4 operations of each byte, snapdragon-8-gen-3 could make"
        " 586: it waits for memory, and so does a batch of 512 tokens"
    )
    unknown = pd.DataFrame(intensity_table(model)).assign(ridge_flop_per_byte=math.nan)
    assert words(draw.intensity(model.name, unknown, "x")).endswith("of each byte that it reads")


def test_the_ledger_says_who_counted() -> None:
    table = memory_ledger(sheet("olmoe-1b-7b"), 4096).table().set_index("item")
    assert table.loc["KV cache", "counted_by"] == "labkit"
    assert str(table.loc["compute buffers", "counted_by"]).startswith("at least")
