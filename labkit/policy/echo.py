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
        self._rows: dict[int, int] = {}
        self._layers: list[int] = []
        self._scores = np.zeros((max(n_layers, 1), 1), np.float32)
        self._absent = np.full(self._scores.shape, np.inf, np.float32)  # 0 where resident
        self._rank = self._scores + self._absent

    def request(self, layer: int, experts: Iterable[int], entry_bytes: int) -> Lookup:
        """See `CachePolicy.request`; `experts` token by token tell more than distinct ones."""
        self._choices = list(experts)
        return super().request(layer, self._choices, entry_bytes)

    def _begin(self, wanted: Sequence[Entry]) -> None:
        if not wanted:
            return
        layer = wanted[0][0]
        choices = self._choices or [expert for _, expert in wanted]
        self._choices = ()
        self._number += 1
        scores = self._forecast.scores(self._number, layer, choices)
        row = self._row(layer, len(scores))
        self._scores[row, : len(scores)] = scores
        np.add(self._scores[row], self._absent[row], out=self._rank[row])

    def _use(self, entries: list[Entry]) -> None:
        pass

    def _add(self, entries: list[Entry]) -> None:
        for layer, expert in entries:
            row = self._row(layer, expert + 1)
            self._absent[row, expert] = 0
            self._rank[row, expert] = self._scores[row, expert]

    def _victim(self, kept: Collection[Entry]) -> Entry:
        rank = self._rank.reshape(-1)
        aside = []
        while True:
            place = int(rank.argmin())
            row, expert = divmod(place, self._rank.shape[1])
            entry = (self._layers[row], expert)
            if entry not in kept:
                break
            aside.append((place, rank[place]))
            rank[place] = np.inf
        for other, value in aside:
            rank[other] = value
        self._forget(entry)
        return entry

    def _forget(self, entry: Entry) -> None:
        layer, expert = entry
        row = self._rows[layer]
        self._absent[row, expert] = self._rank[row, expert] = np.inf

    def _row(self, layer: int, experts: int) -> int:
        """The place of a layer, made if there was none, with space for its experts."""
        row = self._rows.get(layer)
        if row is None:
            row = self._rows[layer] = len(self._layers)
            self._layers.append(layer)
        layers, known = self._rank.shape
        if row >= layers or experts > known:
            more = ((0, max(row + 1 - layers, 0)), (0, max(experts - known, 0)))
            self._scores = np.pad(self._scores, more)
            self._absent = np.pad(self._absent, more, constant_values=np.inf)
            self._rank = np.pad(self._rank, more, constant_values=np.inf)
        return row
