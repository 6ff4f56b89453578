"""Exercises: an answer is open, right or wrong, and never an exception."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest

from labkit.bundled import model_path
from labkit.device import load_profile
from labkit.device.pipeline_plan import plan_htp
from labkit.errors import SessionError
from labkit.exercises import (
    Verdict,
    cache_curves,
    check,
    live_routing,
    memory,
    offsets,
    prefill,
    streaming,
)
from labkit.gguf_map import open_gguf
from labkit.policy import ONLINE
from labkit.replay import demand, lru_curve
from labkit.sheet import sheet
from labkit.trace import RouteTrace

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("missing", [None, ...])
def test_no_answer_yet_is_no_error(missing: object) -> None:
    verdict = check(missing, 4, hint="count them")
    assert verdict.state == "open"
    assert "count them" not in repr(verdict)


@pytest.mark.parametrize(
    ("answer", "expected", "tolerance", "state"),
    [
        (4, 4, 0, "right"),
        (4.04, 4, 0.05, "right"),
        (4.06, 4, 0.05, "wrong"),
        (" Python ", "python", 0, "right"),
        ([3, 1], {1, 3}, 0, "right"),
        ([3, 1], [1, 3], 0, "wrong"),
        ((5, 17), (5, 17), 0, "right"),
        ("four", 4, 0, "wrong"),
        (object(), {1}, 0, "wrong"),
        (7, (5, 17), 0, "wrong"),
        (12, lambda n: n > 10, 0, "right"),
        ("x", lambda n: n > 10, 0, "wrong"),
        (pd.Series([4.0]), 4, 0, "right"),
        (np.array([4.0, 5.0]), 4, 0, "wrong"),
    ],
)
def test_answers(answer: object, expected: object, tolerance: float, state: str) -> None:
    verdict = check(answer, expected, tolerance=tolerance, hint="a hint", because="a reason")
    assert verdict.state == state
    assert bool(verdict) == (state == "right")
    assert ("a reason" if state == "right" else "a hint") in verdict._repr_html_()


def test_what_labkit_says_about_an_answer_stands_in_place_of_the_hint() -> None:
    def judge(_: object) -> bool:
        raise SessionError("The prompt is empty.")

    assert check("", judge, hint="a hint") == Verdict("wrong", "The prompt is empty.")


def test_comments_cannot_break_the_page() -> None:
    assert "<b>" not in check(1, 2, hint="<b>bold")._repr_html_()


# --- the exercises of the notebooks --------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cell_that_checks_an_answer_does_not_tell_it(path: Path) -> None:
    """It assigns None and asks labkit: no figure, no formula, no function stands in it."""
    cells = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    asked = [source for source in cells if source.startswith("answer = None")]
    assert asked
    for source in asked:
        blank, ask = ast.parse(source).body
        assert ast.unparse(blank) == "answer = None"
        assert ast.unparse(ask).startswith("exercise.")
        told = (ast.BinOp, ast.Lambda, ast.Compare, ast.Dict, ast.Set)
        assert not any(isinstance(node, told) for node in ast.walk(ask))
    assert not any("check(" in source for source in cells)


def test_exercises_on_the_model_accept_what_its_map_says() -> None:
    gguf = open_gguf(model_path())
    down = gguf.expert(gguf.moe_layers[-1], 2)[-1]
    blocks = -(-(down.offset + down.nbytes) // 4096) - down.offset // 4096
    cycle = gguf.n_expert_used * sum(gguf.entry_bytes(layer) for layer in gguf.moe_layers)
    churn = 100 - 100 * gguf.n_expert_used / gguf.n_expert
    for ask, right in [
        (lambda a: offsets.where_it_begins(a, gguf), down.offset),
        (lambda a: offsets.direct_read(a, gguf, 4096), 4096 * blocks),
        (lambda a: offsets.cycle_of_twice_as_many(a, gguf), 2 * cycle),
        (lambda a: offsets.entries_for_each_used(a, gguf), gguf.n_expert / gguf.n_expert_used),
        (lambda a: live_routing.cold_token(a, gguf, 0.1), cycle / 2**20),
        (lambda a: live_routing.churn_of_chance(a, gguf), churn),
    ]:
        assert [ask(a).state for a in (None, right, right * 1.5)] == ["open", "right", "wrong"]


def test_exercises_on_routing_and_caches(tmp_path: Path) -> None:
    load = pd.DataFrame({"layer": [1, 1, 2], "expert": [0, 1, 0], "tokens": [3, 5, 9]})
    assert [live_routing.busiest_expert(e, load).state for e in (1, 0)] == ["right", "wrong"]

    (tmp_path / "t.csv").write_text(
        "layer,expert\n" + "".join(f"{i % 4},{i // 4 * 3 % 7}\n" for i in range(160))
    )
    asked = demand(RouteTrace.open(tmp_path / "t.csv"), entry_bytes=2**20)
    assert [cache_curves.asked_per_token(a, asked).state for a in (4, 3)] == ["right", "wrong"]
    curve = lru_curve(asked)
    half = curve["hit_pct"].iloc[-1] / 2
    close = curve.loc[(curve["hit_pct"] - half).abs() < 3, "budget_mib"]
    whole = curve["budget_mib"].iloc[-1]
    answers = [*close, whole]
    states = [cache_curves.half_of_the_hits(a, asked).state for a in answers]
    assert states == ["right"] * len(close) + ["wrong"]

    names = [*ONLINE, "belady"]
    cliff = pd.DataFrame({"budget_mib": 1.0, "policy": names, "hit_pct": range(len(names))})
    best = [cache_curves.best_below_the_cliff(name, cliff).state for name in (names[-2:])]
    assert best == ["right", "wrong"]
    assert cache_curves.best_below_the_cliff(f" {names[-2].upper()}", cliff)


def test_exercises_on_times() -> None:
    table = pd.DataFrame(
        {
            "kind": ["mmap", "stream-serial"], "status": "ok", "wall_ms": [4.0, 10.0],
            "compute_ms": [None, 4.0], "manage_ms": [None, 1.0], "wait_ms": [None, 5.0],
            "read_mib": [None, 3.0], "read_ms": [None, 6.0],
        }
    )  # fmt: skip
    assert [streaming.all_hidden(a, table).state for a in (200, 100)] == ["right", "wrong"]
    assert [streaming.rate_of_reads(a, table).state for a in (500, 0.5)] == ["right", "wrong"]
    assert not streaming.all_hidden(200, table.iloc[:1])  # no streamed case: no answer is right
    assert [streaming.tokens_beyond_p99(a).state for a in (100, 99)] == ["right", "wrong"]
    assert [prefill.half_of_the_request(a, 1.0, 0.1).state for a in (11, 20)] == ["right", "wrong"]
    made = plan_htp("qwen3.6-35b-a3b", load_profile("oneplus-15r"), tokens=1418)
    assert prefill.hiding_chunk(made.hiding, made)
    faster = plan_htp(
        "qwen3.6-35b-a3b",
        load_profile("oneplus-15r"),
        tokens=1418,
        changes={"read_gb_s": 2 * made.rates.read_gb_s},
    )
    gain = made.prefill.prefill_s / faster.prefill.prefill_s
    ask = [prefill.twice_the_flash(a, made, tokens=1418, chunk=512) for a in (gain, gain + 0.5)]
    assert [verdict.state for verdict in ask] == ["right", "wrong"]


def test_exercises_on_memory() -> None:
    assert memory.stored_and_read((650, 150))
    assert not memory.stored_and_read((1300, 300))
    assert [memory.time_of_a_token(a).state for a in (2.5, 11)] == ["right", "wrong"]
    qwen, small = sheet("qwen3-30b-a3b"), sheet("olmoe-1b-7b")
    phone = load_profile("snapdragon-8-gen-3")
    assert memory.models_that_fit({small.name}, [qwen, small], phone)
    assert not memory.models_that_fit({qwen.name}, [qwen, small], phone)
    longest = int(2**30 / (qwen.kv_bytes(512) / 512)) // 256 * 256
    assert memory.longest_context(longest, qwen)
    assert not memory.longest_context(longest + 1, qwen)
    assert not memory.longest_context(4096, qwen)
