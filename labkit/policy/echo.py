"""Echo: what followed moments like this one stays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from labkit.policy.base import Cache, Entry, Lookup
from labkit.policy.forecast import Forecast


class Echo(Cache):
    """The entry with the least to be expected at its layer's next turn goes first.

    What to expect is the `Forecast`'s opinion: entries used lately, and those that past tokens used
    after a moment like the present. An entry is judged anew whenever its layer has been asked, so
    one that was only just read may be the first to go.

    Args:
        n_layers: MoE layers of the model.
        forecast: to share with other caches that see the same batches in step.
    """

    def __init__(self, budget_bytes: int, n_layers: int, forecast: Forecast | None = None) -> None:
        super().__init__(budget_bytes)
        self._forecast = forecast or Forecast(n_layers)
        self._number = -1
        self._choices: Sequence[int] = ()
        # By layer and expert, as in the forecast: the score of what is resident, infinity for what
        # is not; and 0 and infinity.
        self._rank = self._absent = np.zeros((0, 0), np.float32)
        self._flat_rank = self._rank.ravel()

    def request(self, layer: int, experts: Iterable[int], entry_bytes: int) -> Lookup:
        """See `CachePolicy.request`; `experts` token by token tell more than distinct ones."""
        self._choices = list(experts)
        return super().request(layer, self._choices, entry_bytes)

    def _begin(self, wanted: Sequence[Entry]) -> None:
        if not wanted:
            return
        self._number += 1
        row = self._forecast.learn(self._number, wanted, self._choices)
        self._choices = ()
        table = self._table()
        np.add(table[row], self._absent[row], out=self._rank[row])

    def _use(self, entries: list[Entry]) -> None:
        pass

    def _add(self, entries: list[Entry]) -> None:
        row = self._forecast.row(entries[0][0], max(entries)[1])
        scores, rank, absent = self._table()[row], self._rank[row], self._absent[row]
        for _, expert in entries:
            rank[expert] = scores[expert]
            absent[expert] = 0

    def _victim(self, kept: Collection[Entry]) -> Entry:
        rank, layers, width = self._flat_rank, self._forecast.layers, self._rank.shape[1]
        aside = []
        while True:
            place = int(rank.argmin())
            entry = (layers[place // width], place % width)
            if entry not in kept:
                break
            aside.append((place, rank[place]))
            rank[place] = np.inf
        for other, score in aside:
            rank[other] = score
        self._absent[place // width, place % width] = rank[place] = np.inf
        return entry

    def _forget(self, entry: Entry) -> None:
        place = (self._forecast.row(*entry), entry[1])
        self._rank[place] = self._absent[place] = np.inf

    def _table(self) -> np.ndarray:
        """The forecast's scores, with space for the like of them here."""
        table = self._forecast.table
        if table.shape != self._rank.shape:
            layers, experts = self._rank.shape
            absent, rank = np.full((2, *table.shape), np.inf, np.float32)
            absent[:layers, :experts], rank[:layers, :experts] = self._absent, self._rank
            self._absent, self._rank, self._flat_rank = absent, rank, rank.reshape(-1)
        return table
