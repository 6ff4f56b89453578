"""What the next layer may choose: predictors of its experts, and how often they were right.

A prediction only decides what is read early, so a wrong one costs time and never a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import pandas as pd


class Predictor(Protocol):
    """Foretells a layer's choice for the token that is being computed."""

    def predict(self, layer: int, chosen: list[int]) -> Sequence[int]:
        """Experts that the MoE layer after `layer`, which chose `chosen`, may choose.

        The likeliest come first; nothing where it cannot tell.
        """
        ...


class PreviousToken:
    """A layer chooses what it chose for the token before.

    Args:
        layers: the MoE layers, in order.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._next = dict(pairwise(layers))
        self._last: dict[int, list[int]] = {}

    def predict(self, layer: int, chosen: list[int]) -> Sequence[int]:
        """See `Predictor`."""
        self._last[layer] = chosen
        return self._last.get(self._next.get(layer, -1), ())


class Lookahead:
    """A predictor, and how often it was right.

    Args:
        layers: the MoE layers, in order.
        predictor: foretells the layer after the one that has chosen.

    Attributes:
        predictor, accuracy: what foretells, and how often it was right.
    """

    def __init__(self, layers: Sequence[int], predictor: Predictor) -> None:
        self.accuracy = Accuracy()
        self.predictor = predictor
        self._next = dict(pairwise(layers))

    def after(self, layer: int, chosen: list[int]) -> tuple[int, Sequence[int]]:
        """`layer` has chosen; the layer that comes next, and what it may choose."""
        self.accuracy.note(layer, chosen)
        coming = self._next.get(layer, -1)
        predicted = self.predictor.predict(layer, chosen)
        self.accuracy.expect(coming, predicted)
        return coming, predicted

    def table(self) -> pd.DataFrame:
        """`Accuracy.table`, with the columns of the predictor's `Control` where it has one."""
        table = self.accuracy.table()
        control = getattr(self.predictor, "control", None)
        return table.merge(control.table(), on="layer", how="outer") if control else table


class Accuracy:
    """Counts, by layer, what was foretold and what of it was chosen."""

    def __init__(self) -> None:
        self._expected: dict[int, Sequence[int]] = {}
        self._counts: dict[int, list[int]] = {}

    def expect(self, layer: int, predicted: Sequence[int]) -> None:
        """`layer` is foretold to choose `predicted`."""
        self._expected[layer] = predicted

    def note(self, layer: int, chosen: list[int]) -> None:
        """`layer` has chosen; what was expected of it is judged once."""
        predicted = self._expected.pop(layer, ())
        if predicted:
            counts = self._counts.setdefault(layer, [0, 0, 0])
            counts[0] += len(chosen)
            counts[1] += len(predicted)
            counts[2] += len(set(predicted).intersection(chosen))

    def table(self) -> pd.DataFrame:
        """A row for each layer that was foretold: layer, chosen, predicted, right, recall."""
        rows = [(layer, *self._counts[layer]) for layer in sorted(self._counts)]
        table = pd.DataFrame(rows, columns=["layer", "chosen", "predicted", "right"], dtype="Int64")
        return table.assign(recall=table["right"] / table["chosen"])
