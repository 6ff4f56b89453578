"""Prefetch: it changes no bit, its predictions are counted, and the control is always right."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from gguf import GGMLQuantizationType

from labkit import bundled, synth
from labkit.cli import app
from labkit.errors import OptionError, ReadError
from labkit.gguf_map import open_gguf
from labkit.runtime import Session
from labkit.runtime.lookahead import Accuracy, Lookahead, PreviousToken
from labkit.runtime.next_router import FORESEEN, NextRouter
from labkit.runtime.overlap import OverlapChoice
from labkit.runtime.router_formula import RouterFormula
from labkit.runtime.streaming import Prefetch
from labkit.synth import architectures, models

TEXT = "In the beginning God created the heaven and the earth."
TOKENS = np.random.default_rng(3).integers(1, 60, 12).tolist()

pytestmark = pytest.mark.filterwarnings("ignore::labkit.runtime.BudgetWarning")


@pytest.fixture(scope="module")
def model() -> Path:
    return bundled.model_path()


@pytest.fixture(scope="module")
def expected(model: Path) -> str | None:
    with Session(model, resident=True) as session:
        return session.generate(TEXT, 24, hash_logits=True).logits_sha256


def feed(session: Session, tokens: list[int]) -> list[float]:
    """The tokens one by one; prefetch acts on graphs of one token alone."""
    logits: list[float] = []
    session.on_logits = lambda row: logits.extend(row.tolist())
    for token in tokens:
        session.generate([token], 0)
    return logits


# Lossless, and counted


@pytest.mark.parametrize("overlap", ["serial", "pipeline", "auto"])
@pytest.mark.parametrize("kind", ["previous", "router"])
def test_no_bit_changes_whatever_is_read_ahead(
    model: Path, kind: Prefetch, overlap: OverlapChoice, expected: str
) -> None:
    for cache_mib in (0, 0.3, 1, 3):
        with Session(model, cache_mib=cache_mib, prefetch=kind, overlap=overlap) as session:
            result = session.generate(TEXT, 24, hash_logits=True)
        assert result.logits_sha256 == expected
        read_ahead = sum(step.prefetch_bytes for step in result.steps)
        assert (read_ahead > 0) == (cache_mib in ((0.3,) if kind == "previous" else (0.3, 1, 3)))


@pytest.mark.parametrize("policy", ["lfu", "slru", "s3-fifo", "layer-lru", "random"])
def test_no_bit_changes_under_any_policy(model: Path, policy: str, expected: str) -> None:
    for cache_mib in (0.3, 1):
        with Session(model, cache_mib=cache_mib, prefetch="router", policy=policy) as session:
            assert session.generate(TEXT, 24, hash_logits=True).logits_sha256 == expected


@pytest.mark.parametrize("overlap", ["serial", "auto"])
def test_the_budget_holds(model: Path, overlap: OverlapChoice) -> None:
    page_ends = 2 * 4096 * 3  # pages that an entry's slices share with their neighbours
    for cache_mib in (0.3, 1):
        with Session(model, cache_mib=cache_mib, prefetch="router", overlap=overlap) as session:
            entry = max(session.map.entry_bytes(layer) for layer in session.map.moe_layers)
            n_entries = int(cache_mib * 2**20) // entry + session.map.n_expert_used
            for step in session.stream(TEXT, 24):
                assert step.resident_bytes is not None
                assert step.resident_bytes <= cache_mib * 2**20
                kernel = session.resident_expert_bytes
                assert kernel is not None
                assert kernel <= n_entries * (entry + page_ends)


def test_below_the_token_cycle_hits_come_from_prefetch_alone(model: Path) -> None:
    hits: dict[Prefetch, int] = {}
    for kind in (None, "previous", "router"):
        with Session(model, cache_mib=0.3, prefetch=kind) as session:
            steps = session.generate(TEXT, 24).steps
        assert sum(step.hits for step in steps) == sum(step.prefetch_hits for step in steps)
        hits[kind] = sum(step.hits for step in steps)
    assert hits[None] == 0
    assert hits["router"] > hits["previous"] > 0


def test_prompts_of_many_tokens_are_not_foretold(model: Path) -> None:
    with Session(model, cache_mib=1, prefetch="router", prefill="experts") as session:
        session.generate(TEXT, 0)
        assert all(step.prefetch_bytes == 0 for step in session.prefill_steps)
        assert session.prefetch_accuracy["predicted"].sum() == 0


# Accuracy, and the control


def test_accuracy_by_layer(model: Path) -> None:
    with Session(model, cache_mib=1, prefetch="router") as session:
        session.generate(TEXT, 24)
        table, gguf = session.prefetch_accuracy, session.map
    assert table["layer"].tolist() == gguf.moe_layers
    first, others = table.iloc[0], table.iloc[1:]
    assert pd.isna(first["recall"])  # no layer before it could foretell it
    assert (others["predicted"] == 24 * gguf.n_expert_used).all()
    assert (others["predicted"] == others["chosen"]).all()
    assert others["recall"].between(0, 1).all()
    assert (others["recall"] == others["right"] / others["chosen"]).all()
    # Real routing follows the residual stream: chance would be k of n, an eighth.
    assert others["right"].sum() / others["chosen"].sum() > 0.5


def test_without_prefetch_there_is_no_accuracy(model: Path) -> None:
    with Session(model) as session:
        session.generate(TEXT, 2)
        assert session.prefetch_accuracy.empty
    with Session(model, resident=True) as session:
        assert session.prefetch_accuracy.empty


def test_the_control_is_right_on_real_routing(model: Path) -> None:
    with Session(model, cache_mib=1, prefetch="router") as session:
        session.generate(TEXT, 200)
        table = session.prefetch_accuracy
    assert table["control_wrong"].sum() == 0
    assert table["control_ties"].sum() <= 4
    assert (table["control_right"] >= 20).all()  # each layer's turn comes


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_the_control_is_right_for_routers_of_other_types(
    kind: str, tmp_path: Path, synth_worker: synth.LlamaWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = models.tensor_type

    def with_router(name: str, expert: GGMLQuantizationType) -> GGMLQuantizationType:
        return GGMLQuantizationType[kind] if "ffn_gate_inp" in name else usual(name, expert)

    monkeypatch.setattr(models, "tensor_type", with_router)
    path = synth.make("qwen3moe", tmp_path / "model.gguf", worker=synth_worker)
    router = open_gguf(path).tensor("blk.1.ffn_gate_inp.weight")
    assert router.type_id == GGMLQuantizationType[kind]
    with Session(path, cache_mib=64, prefetch="router", overlap="serial") as session:
        feed(session, TOKENS * 4)
        table = session.prefetch_accuracy
    assert table["control_wrong"].sum() == 0
    assert table["control_right"].sum() >= (2 if kind == "Q8_0" else 3.5) * len(TOKENS)


@pytest.mark.parametrize("arch", architectures())
def test_every_architecture_is_foretold_or_refused(arch: str, synth_model: Callable) -> None:
    path = synth_model(arch)
    if arch not in FORESEEN:
        with pytest.raises(OptionError, match=r"cannot be used with .*It can with .*qwen3moe"):
            Session(path, cache_mib=64, prefetch="router")
        return
    with Session(path, cache_mib=64, prefetch="router", overlap="serial") as session:
        logits = feed(session, TOKENS)
        table = session.prefetch_accuracy
    assert table["control_wrong"].sum() == 0
    assert table["control_right"].sum() >= len(TOKENS) - 2
    assert table["predicted"].sum() > 0
    with Session(path, resident=True) as session:
        assert feed(session, TOKENS) == logits


def test_the_control_notices_a_router_that_is_read_wrong(model: Path) -> None:
    with Session(model, cache_mib=1, prefetch="router") as session:
        predictor = session._streaming.lookahead.predictor  # pyright: ignore
        assert isinstance(predictor, NextRouter)
        for layer, router in predictor._routers.items():
            swapped = np.ascontiguousarray(router.matrix[::-1])
            predictor._routers[layer] = dataclasses.replace(router, matrix=swapped)
        session.generate(TEXT, 24)
        assert session.prefetch_accuracy["control_wrong"].sum() > 12


# What decides


def formula(matrix: np.ndarray, k: int) -> RouterFormula:
    return RouterFormula(matrix.astype(np.float32), (), k, 0, None, 1e-5, lambda x: x)


def test_a_near_tie_is_no_verdict() -> None:
    one = np.ones(1, np.float32)
    router = formula(np.array([[3.0], [2.0], [1.0], [0.0]]), 2)
    assert router.choose(one) == [0, 1]
    assert router.explains(one, [1, 0]) is True
    assert router.explains(one, [0, 2]) is False
    router = formula(np.array([[3.0], [2.0], [2.0 + 1e-6], [0.0]]), 2)
    assert router.explains(one, [0, 1]) is None
    assert router.explains(one, [0, 2]) is None
    assert router.explains(one, [0, 3]) is False


def test_the_previous_token_foretells() -> None:
    lookahead = Lookahead([2, 3, 5], PreviousToken([2, 3, 5]))
    for chosen in ([1, 2], [2, 4]):
        assert lookahead.after(2, chosen)[0] == 3
        assert lookahead.after(3, chosen)[0] == 5
        assert lookahead.after(5, chosen)[1] == ()
    assert lookahead.after(2, [9, 8]) == (3, [2, 4])
    table = lookahead.table()
    assert table["layer"].tolist() == [3, 5]
    assert table["right"].tolist() == [1, 1]
    assert table["recall"].tolist() == [0.5, 0.5]


def test_a_prediction_is_judged_once() -> None:
    accuracy = Accuracy()
    accuracy.expect(1, [3, 4, 5])
    accuracy.note(1, [4, 6])
    accuracy.note(1, [3, 4])
    assert accuracy.table().iloc[0].tolist() == [1, 2, 3, 1, 0.5]


# Interrupts and failed reads


@pytest.mark.parametrize("overlap", ["serial", "auto"])
def test_interrupts_leave_no_trace(model: Path, overlap: OverlapChoice, expected: str) -> None:
    rng = random.Random(4)
    with Session(model, cache_mib=0.6, prefetch="router", overlap=overlap) as session:
        fetch = session._streaming.fetch  # pyright: ignore[reportOptionalMemberAccess]
        left = 0

        def count_down(layer: int, experts: np.ndarray):
            nonlocal left
            left -= 1
            if left == 0:
                session.interrupt()
            return fetch(layer, experts)

        session._streaming.fetch = count_down  # pyright: ignore[reportOptionalMemberAccess]
        for _ in range(20):
            left = rng.randint(1, 60)
            with pytest.raises(KeyboardInterrupt):
                session.generate(TEXT, 24)
            session.reset()
        left = 0
        assert session.generate(TEXT, 24, hash_logits=True).logits_sha256 == expected


@pytest.mark.parametrize("overlap", ["serial", "pipeline", "auto"])
def test_a_failed_read_ahead_fails_the_step_and_a_retry_is_identical(
    model: Path, overlap: OverlapChoice, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(model, cache_mib=0.6, prefetch="router", overlap=overlap) as session:
        reader = session._streaming.reader  # pyright: ignore[reportOptionalMemberAccess]
        submit, read_one = reader.submit, reader._read_one
        doomed: set[int] = set()

        def mark(requests, *, urgent: bool = True):
            if not urgent:
                doomed.update(id(request.target) for request in requests)
            return submit(requests, urgent=urgent)

        def fail(request):
            if id(request.target) in doomed:
                raise reader._error(request, "a test says so")
            return read_one(request)

        with monkeypatch.context() as patch:
            patch.setattr(reader, "submit", mark)
            patch.setattr(reader, "_read_one", fail)
            with pytest.raises(ReadError, match="a test says so"):
                session.generate(TEXT, 24)
        session.reset()
        assert session.generate(TEXT, 24, hash_logits=True).logits_sha256 == expected


def test_an_unknown_kind_is_refused(model: Path) -> None:
    with pytest.raises(OptionError, match="None, 'previous' or 'router'"):
        Session(model, prefetch="tomorrow")  # pyright: ignore[reportArgumentType]


def test_all_foreseen_architectures_exist() -> None:
    assert set(FORESEEN) <= set(architectures())
    assert open_gguf(bundled.model_path()).architecture in FORESEEN


# On the command line


def test_generate_says_how_often_it_was_right(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(model), "-p", TEXT, "-n", "12", "--cache-mib", "1", "--json"]
    app(
        [*words, "--prefetch", "router", "--hot-list", str(tmp_path / "hot")],
        standalone_mode=False,
    )
    found = json.loads(capsys.readouterr().out)["prefetch"]
    assert 0.3 < found["recall"] <= 1
    assert found["control_right"] + found["control_ties"] >= 11
    assert found["control_wrong"] == 0
    assert found["hits"] > 0
    assert found["bytes_read"] > 0
    assert len(list((tmp_path / "hot").iterdir())) == 1
    app(words, standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["prefetch"] is None
