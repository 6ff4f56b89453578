"""Graphs that run again are counted, not asked about: same logits, and never from a wrong place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import stock

from labkit import bundled, host
from labkit.errors import LlamaError
from labkit.runtime import Session, node_counter
from labkit.runtime.graph_plan import LayerNodes, plan_graph
from labkit.runtime.overlap import OverlapChoice
from labkit.runtime.steps import TokenStep

PROMPT = [5, 9, 31, 7, 12, 40]
N_CTX = 512

counts = pytest.mark.skipif(not node_counter.is_available(), reason="this libc cannot count nodes")


@pytest.fixture(scope="module")
def model() -> Path:
    return bundled.model_path()


def logits_of(session: Session, n: int) -> np.ndarray:
    """Logits (n + 1, n_vocab) after the prompt and each of n tokens."""
    rows: list[np.ndarray] = []
    session.on_logits = rows.append
    session.generate(PROMPT, n)
    return np.stack(rows)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and bool((one.view(np.uint32) == other.view(np.uint32)).all())


@counts
def test_decoding_is_counted_from_the_second_token_on(model: Path) -> None:
    with Session(model, n_ctx=N_CTX, overlap="serial") as session:
        hook = session._engine.hook
        seen = [hook._plan is not None for _ in session.stream(PROMPT, 6)]
    assert seen == [False, True, True, True, True, True]


@counts
def test_a_context_that_grows_makes_llama_build_anew_and_the_graph_is_learned_again(
    model: Path,
) -> None:
    n = 300  # past 256 cells of the KV cache
    rows: list[np.ndarray] = []
    with Session(model, n_ctx=N_CTX, cache_mib=1, overlap="serial", threads=2) as session:
        session.on_logits = rows.append
        seen = [session._engine.hook._plan is not None for _ in session.stream(PROMPT, n)]
    assert seen.count(False) == 2
    reference = stock.logits(model, PROMPT, n, n_ctx=N_CTX)
    assert same_bits(np.stack(rows), reference[len(PROMPT) - 1 :])


@pytest.mark.parametrize("overlap", ["serial", "pipeline", "userfaultfd"])
def test_counted_and_asked_sessions_record_the_same(model: Path, overlap: OverlapChoice) -> None:
    if overlap == "userfaultfd" and (problem := host.userfaultfd_problem()):
        pytest.skip(problem)
    steps: list[list[TokenStep]] = []
    tables, logits = [], []
    for asked in (False, True):
        with Session(model, n_ctx=N_CTX, cache_mib=1, overlap=overlap) as session:
            if asked:
                session._engine.hook.attach(None)
            logits.append(logits_of(session, 40))
            steps.append(list(session.stream([3], 5)))
            tables.append(session.trace.table)
    assert same_bits(*logits)
    assert tables[0].equals(tables[1])
    for one, other in zip(*steps, strict=True):
        for name in ("layers", "experts", "weights", "hit"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_without_counting_everything_works(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(model, n_ctx=N_CTX) as session:
        expected = logits_of(session, 20)
    monkeypatch.setattr(node_counter, "is_available", lambda: False)
    with Session(model, n_ctx=N_CTX, cache_mib=1) as session:
        assert same_bits(logits_of(session, 20), expected)
        session.interrupt()
        assert len(session.generate(PROMPT, 3).tokens) == 3


@counts
def test_the_overlap_may_change_from_token_to_token(model: Path) -> None:
    with Session(model, n_ctx=N_CTX) as session:
        expected = logits_of(session, 30)
    with Session(model, n_ctx=N_CTX, cache_mib=1, overlap="serial") as session:
        assert session._streaming
        rows: list[np.ndarray] = []
        session.on_logits = rows.append
        counted = []
        for index, _ in enumerate(session.stream(PROMPT, 30)):
            counted.append(session._engine.hook._plan is not None)
            session._streaming.overlap.current = ("serial", "pipeline")[index // 3 % 2]
        assert same_bits(np.stack(rows), expected)
        assert counted == [False] + [True] * 29, "one run tells all ways where to stop"


@counts
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_graph_of_another_length_is_an_error_and_then_read_by_name(
    model: Path, shift: int
) -> None:
    with Session(model, n_ctx=N_CTX) as session:
        expected = logits_of(session, 12)
    with Session(model, n_ctx=N_CTX, cache_mib=1, overlap="serial") as session:
        rows: list[np.ndarray] = []
        session.on_logits = rows.append
        stream: Iterator[TokenStep] = session.stream(PROMPT, 12)
        first = [next(stream) for _ in range(4)]
        hook = session._engine.hook
        assert hook._plan
        hook._plan.counts[-1] += shift
        with pytest.raises(LlamaError, match="did not reach"):
            next(stream)
        last = session.stream([first[-1].token], 0)
        assert list(last) == []
        assert hook._plan is None
        session.reset()
        rows.clear()
        session.generate(PROMPT, 12)
        assert hook._plan is None
        assert same_bits(np.stack(rows), expected)


def nodes(layer: int, chosen: int, routed: int, used: int, down: int = 0) -> LayerNodes:
    return LayerNodes(layer, chosen=chosen, routed=routed, used=used, down=down)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nodes(0, 5, 7, 9), [(8, True, True)]),
        (nodes(0, 5, 7, 8), [(7, True, False), (8, False, True)]),
        (nodes(0, 7, 7, 9), [(8, True, True)]),
        (nodes(0, 7, 7, 8), None),
        (nodes(0, 5, 7, 0), None),
    ],
)
def test_a_choice_is_read_where_it_is_whole_and_not_in_use(
    layer: LayerNodes, expected: list[tuple[int, bool, bool]] | None, monkeypatch
) -> None:
    from labkit.runtime import graph_plan

    monkeypatch.setattr(graph_plan, "choice_view", lambda _: np.zeros((1, 2), np.int32))
    monkeypatch.setattr(graph_plan, "weights_view", lambda *_: np.zeros((1, 2), np.float32))
    plan = plan_graph([layer], 20, with_down=False)
    found = plan and [(s.count, s.choice is not None, s.weights is not None) for s in plan.stops]
    assert found == expected
    if plan:
        assert plan.counts == [*(count for count, *_ in expected or ()), 21]


@pytest.mark.parametrize("n_prompt", [16, 17, 18])
def test_a_last_chunk_of_one_token_and_chunks_without_logits(model: Path, n_prompt: int) -> None:
    prompt = [(7 * i + 3) % 60 for i in range(n_prompt)]
    results = []
    for resident in (True, False):
        with Session(
            model, resident=resident, cache_mib=None if resident else 1, n_ctx=N_CTX, n_ubatch=1
        ) as session:
            results.append(session.generate(prompt, 5, hash_logits=True))
            steps = session.prefill_steps
            assert [len(step.layers) for step in steps[:-1]] == [
                len(session.map.moe_layers) - 1
            ] * (n_prompt - 1)
            assert len(steps[-1].layers) == len(session.map.moe_layers)
    assert results[0].logits_sha256 == results[1].logits_sha256
