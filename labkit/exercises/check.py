"""Compare a reader's answer with what is expected, and say in a line how they agree.

An answer that is still missing is no error: a notebook runs to its end without one.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from labkit.errors import LabkitError

_WORDS = {"open": "Not answered yet.", "right": "Right.", "wrong": "Not yet."}
_MARKS = {"open": "○", "right": "✓", "wrong": "✗"}


@dataclass(frozen=True)
class Verdict:
    """What `check` says about an answer; a notebook shows it as a line.

    Attributes:
        state: "open" (no answer yet), "right" or "wrong".
        comment: a hint for a wrong answer, or what a right one shows.
    """

    state: str
    comment: str = ""

    def __bool__(self) -> bool:
        return self.state == "right"

    def __repr__(self) -> str:
        return " ".join(filter(None, (_MARKS[self.state], _WORDS[self.state], self.comment)))

    def _repr_html_(self) -> str:
        words = html.escape(f"{_MARKS[self.state]} {_WORDS[self.state]}")
        return f"<p><strong>{words}</strong> {html.escape(self.comment)}</p>"


def check(
    answer: Any,
    expected: Any | Callable[[Any], bool],
    *,
    hint: str = "",
    because: str = "",
    tolerance: float = 0.0,
) -> Verdict:
    """Compare a reader's answer with what is expected.

    `expected` is a value or a function that judges the answer. Numbers may differ by `tolerance`
    (absolute); sets, lists and tuples are compared as they are, a set with any collection of the
    same members; text without regard to case and outer spaces. A Series or an array of one element
    counts as that element. `hint` is shown with a wrong answer, `because` with a right one, and an
    error of labkit in place of the hint. None and `...` are no answer yet.
    """
    if answer is None or answer is ...:
        return Verdict("open")
    if getattr(answer, "size", 0) == 1 and hasattr(answer, "item"):
        answer = answer.item()  # what pandas gives for a single row; float() of it is deprecated
    try:
        right = bool(expected(answer)) if callable(expected) else _same(answer, expected, tolerance)
    except LabkitError as error:
        return Verdict("wrong", str(error))
    except (TypeError, ValueError, LookupError):
        right = False  # an answer of a kind that cannot be compared: wrong, not a crash
    return Verdict("right", because) if right else Verdict("wrong", hint)


def _same(answer: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, str):
        return isinstance(answer, str) and answer.strip().lower() == expected.strip().lower()
    if isinstance(expected, set | frozenset):
        return isinstance(answer, Collection) and set(answer) == set(expected)
    if isinstance(expected, list | tuple):
        return len(answer) == len(expected) and all(
            _same(one, other, tolerance) for one, other in zip(answer, expected, strict=True)
        )
    return math.isclose(float(answer), float(expected), rel_tol=1e-9, abs_tol=tolerance)
