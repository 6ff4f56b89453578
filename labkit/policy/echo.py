"""Echo: what followed moments like this one stays."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable

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
        self._own_ranking = None if forecast else self._forecast
        # Where the forecast's table has the scores of what is resident, in no order.
        self._places = np.zeros(256, np.int64)
        self._width = 1  # experts of a layer in that table

    def request(self, layer: int, experts: Iterable[int], entry_bytes: int) -> Lookup:
        """See `CachePolicy.request`; `experts` token by token tell more than distinct ones."""
        self._choices = list(experts)
        found = super().request(layer, self._choices, entry_bytes)
        self._choices = ()
        return found

    def _use(self, entries: list[Entry]) -> None:
        pass  # the forecast knows

    def _add(self, entries: list[Entry]) -> None:
        layer, highest = max(entries)
        first = self._forecast.row(layer, highest) * self._fit()
        n = len(self._sizes)
        if n > len(self._places):
            self._places = np.resize(self._places, 2 * n)
        self._places[n - len(entries) : n] = [first + expert for _, expert in entries]

    def _victims(self, kept: Collection[Entry]) -> Generator[Entry]:
        width, layers, left = self._fit(), self._forecast.layers, len(self._sizes)
        places = self._places[:left]
        scores = self._forecast.table.reshape(-1).take(places)
        gone: list[int] = []
        try:
            while True:
                lowest = int(scores.argmin())
                scores[lowest] = np.inf
                row, expert = divmod(int(places[lowest]), width)
                entry = (layers[row], expert)
                if entry not in kept:
                    gone.append(lowest)
                    yield entry
        finally:
            for index in sorted(gone, reverse=True):  # the last one takes its place
                left -= 1
                places[index] = places[left]

    def _forget(self, entry: Entry) -> None:
        places = self._places[: len(self._sizes)]
        place = self._forecast.row(*entry) * self._fit() + entry[1]
        places[places == place] = places[-1]

    def _fit(self) -> int:
        """Follow the forecast's table when it has grown; returns its experts per layer."""
        width = self._forecast.table.shape[1]
        if width != self._width:
            rows, experts = np.divmod(self._places, self._width)
            self._places, self._width = rows * width + experts, width
        return width
