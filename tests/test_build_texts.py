"""The texts of the bundled model: what is held out must not be learned from."""

from __future__ import annotations

import random
import sys

import pytest

from labkit.bundled import DATA_DIR

sys.path.insert(0, str(DATA_DIR / "build"))
from tinymoe import arithmetic, split  # pyright: ignore[reportMissingImports]


def terms(line: str) -> frozenset[str] | str:
    """A problem without the order of a sum's terms."""
    question = line.split(":")[0].split("=")[0]
    return frozenset(question.split("+")) if "+" in question else question


def test_held_out_problems_stay_out_even_with_terms_swapped() -> None:
    train, held, products = arithmetic.problems()
    assert len(train) + len(held) == 100 * 100 + 100 * 101 // 2
    assert 0.08 < len(held) / (len(train) + len(held)) < 0.12
    assert not {terms(line) for line in train} & {terms(line) for line in held}
    pages = arithmetic.sheet(train, products, 2000, random.Random(1)).splitlines()
    assert not {terms(line) for line in pages} & {terms(line) for line in held}


@pytest.mark.parametrize(
    ("plain", "worked"),
    [
        ("27+15=42", "27+15:7+5=12,2+1+1=4=42"),
        ("42-15=27", "42-15:12-5=7,4-1-1=2=27"),
        ("84+29=113", "84+29:4+9=13,8+2+1=11=113"),
        ("7-7=0", "7-7:7-7=0,0-0-0=0=0"),
    ],
)
def test_working(plain: str, worked: str) -> None:
    assert arithmetic.worked(plain) == worked


def test_every_step_of_every_working_is_right() -> None:
    train, held, _ = arithmetic.problems()
    for line in train + held:
        question, working = arithmetic.worked(line).split(":")
        first, second = working.split(",")
        tens_question, tens, result = second.split("=")
        ones_question, ones = first.split("=")
        for step, value in ((ones_question, ones), (tens_question, tens), (question, result)):
            assert calculated(step) == int(value), line
        assert int(tens) * 10 + int(ones[-1]) == int(result)


def calculated(question: str) -> int:
    """The value of a chain of sums or of differences."""
    if "+" in question:
        return sum(map(int, question.split("+")))
    first, *others = map(int, question.split("-"))
    return first - sum(others)


def test_a_near_duplicate_is_not_held_out() -> None:
    rng = random.Random(3)
    words = ["alpha", "beta", "gamma", "delta", "omega", "sigma", "theta", "kappa"]
    works = {f"work{i}": " ".join(rng.choices(words, k=300)) for i in range(200)}
    train, held, rejected = split.split("english", works)
    assert len(held) > 3
    assert not rejected
    victim = next(iter(held))
    source = next(iter(train))
    works[victim] = works[source][:1200] + works[victim][1200:]
    _, held, rejected = split.split("english", works)
    assert victim not in held
    assert rejected == [victim]


def test_a_work_that_stands_twice_is_kept_once() -> None:
    works = {"a": "the same text " * 20, "b": "the same text " * 20, "c": "another text " * 20}
    train, held, _ = split.split("english", works)
    assert len(train) + len(held) == 2
