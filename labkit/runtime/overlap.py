"""Which way of overlapping reads with compute is the fastest here: tried out, a token a way."""

from __future__ import annotations

from statistics import median
from typing import Literal, cast, get_args

from labkit import host
from labkit.errors import OptionError
from labkit.runtime.source import Overlap

OverlapChoice = Literal["auto", "serial", "pipeline", "userfaultfd"]

_ROUNDS = 5
_WORTH = 0.97  # a way that needs more of the system must be this much faster


class OverlapTrial:
    """Takes the possible ways in turns over the first tokens that read, then keeps the fastest.

    Every way gives the same logits, so trying costs nothing but a slower token here and there.

    Args:
        choice: a way, or "auto".
        may_watch: whether "auto" tries "userfaultfd" too.

    Attributes:
        current: the way of the next graph.
        note: what was chosen and why, in words.

    Raises:
        OptionError: an unknown way, or one that this system cannot do.
    """

    def __init__(self, choice: str, *, may_watch: bool = True) -> None:
        ways = get_args(Overlap)
        if choice not in ("auto", *ways):
            raise OptionError(f"overlap is {choice!r}; it must be auto, {', '.join(ways)}")
        problem = host.userfaultfd_problem() if choice in ("auto", "userfaultfd") else None
        if choice == "userfaultfd" and problem:
            raise OptionError(f"overlap cannot be 'userfaultfd' here: {problem}. Use 'auto'.")
        self._walls_s: dict[Overlap, list[float]] = {}
        if choice == "auto":
            can_watch = may_watch and not problem
            self._walls_s = {way: [] for way in ways if way != "userfaultfd" or can_watch}
            self.current: Overlap = next(iter(self._walls_s))
            self.note = "not yet measured: " + " and ".join(self._walls_s) + " take turns"
        else:
            self.current = cast(Overlap, choice)
            self.note = "as asked for"

    @property
    def uses_userfault(self) -> bool:
        """Whether compute may ever sleep on memory."""
        return self.current == "userfaultfd" or "userfaultfd" in self._walls_s

    def note_token(self, wall_s: float, bytes_read: int) -> None:
        """A decoded token took so long the current way; it tells nothing unless it read."""
        if not self._walls_s or not bytes_read:
            return
        self._walls_s[self.current].append(wall_s)
        ways = list(self._walls_s)
        if all(len(walls) >= _ROUNDS for walls in self._walls_s.values()):
            self._choose()
        else:
            self.current = ways[(ways.index(self.current) + 1) % len(ways)]

    def _choose(self) -> None:
        medians: dict[Overlap, float] = {way: median(walls) for way, walls in self._walls_s.items()}
        best: Overlap = "serial"
        for way, wall_s in medians.items():
            if wall_s < medians[best] * _WORTH:
                best = way
        self.current = best
        figures = ", ".join(f"{way} {wall_s * 1e3:.1f}" for way, wall_s in medians.items())
        self.note = f"{best} was the fastest of {_ROUNDS} tokens each (median ms: {figures})"
        self._walls_s = {}
