"""Exercises: an answer is open, right or wrong, and never an exception."""

from __future__ import annotations

import pytest

from labkit.exercises import check


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
    ],
)
def test_answers(answer: object, expected: object, tolerance: float, state: str) -> None:
    verdict = check(answer, expected, tolerance=tolerance, hint="a hint", because="a reason")
    assert verdict.state == state
    assert bool(verdict) == (state == "right")
    assert ("a reason" if state == "right" else "a hint") in verdict._repr_html_()


def test_comments_cannot_break_the_page() -> None:
    assert "<b>" not in check(1, 2, hint="<b>bold")._repr_html_()
