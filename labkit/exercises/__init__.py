"""Exercises that check themselves: a notebook's last cells, for the reader to fill in.

A cell holds `answer = None` and, as its last line, a call of this package's module for that
notebook: `exercises.churn_of_chance(answer, gguf)`. What is expected is computed there, from the
run, so that an exercise fits whatever model the notebook was given and its cell does not tell the
answer. Each call returns a `Verdict`. For exercises of your own, `check` takes what you expect.
"""

from labkit.exercises.check import Verdict, check

__all__ = ["Verdict", "check"]
