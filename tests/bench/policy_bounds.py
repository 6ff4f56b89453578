"""How much of LRU's gap to the optimum a policy can win back that knows a given kind of thing.

Each bound is a cache that keeps entries by a score for every (layer, expert), under the rules of
the replay. What it knows is told by its name, and no live cache can know it:

- true frequency: how often each entry is used in the whole trace, known from the start;
- fitted estimator: for every entry a logistic regression of "used by its layer's next token" on how
  long ago and how often it was used, fitted on the very trace it is then judged on;
- next token: the entries of each layer's next token, and beyond that what echo expects.

    python tests/bench/policy_bounds.py TRACE --budgets 1000,2000,4000

Prints, as CSV, percent of the gap won back: 100 x (hits - LRU's) / (Belady's - LRU's).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Generator
from pathlib import Path

import numpy as np
import pandas as pd

from labkit.demand import Demand, demand
from labkit.policy import Cache, Entry, Forecast
from labkit.replay import replay
from labkit.trace import RouteTrace

MIB = 2**20
Score = Callable[[int], np.ndarray]
"""(L, E) scores of all entries after so many batches."""


class ByScore(Cache):
    """The entry with the lowest score goes first."""

    def __init__(self, budget_bytes: int, shape: tuple[int, int]) -> None:
        super().__init__(budget_bytes)
        self.scores = np.zeros(shape)
        self._absent = np.full(shape, np.inf)

    def _use(self, entries: list[Entry]) -> None:
        pass

    def _add(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._absent[entry] = 0

    def _victims(self, kept: Collection[Entry]) -> Generator[Entry]:
        rank = self.scores + self._absent
        for entry in kept:
            rank[entry] = np.inf
        while True:
            row, expert = np.unravel_index(int(rank.argmin()), rank.shape)
            entry = (int(row), int(expert))
            rank[entry] = self._absent[entry] = np.inf
            yield entry

    def _forget(self, entry: Entry) -> None:
        self._absent[entry] = np.inf


def true_frequency(asked: Demand, shape: tuple[int, int]) -> Score:
    """Uses of each entry in the whole trace."""
    uses = np.zeros(shape)
    for batch in asked.batches:
        for entry in batch:
            uses[entry] += 1
    return lambda _number: uses


def next_token(asked: Demand, shape: tuple[int, int]) -> Score:
    """What the next batch of each layer asks for is worth most; beyond it, echo's scores."""
    batches, forecast = asked.batches, Forecast(shape[0])
    scores, known = np.zeros(shape), np.zeros(shape)
    coming: dict[int, list[Entry]] = {}
    following: list[list[Entry]] = [[]] * len(batches)
    for number in range(len(batches) - 1, -1, -1):
        layer = batches[number][0][0]
        following[number] = coming.get(layer, [])
        coming[layer] = batches[number]

    def score(number: int) -> np.ndarray:
        batch, layer = batches[number], batches[number][0][0]
        choices = asked.choices.get(number, np.array([expert for _, expert in batch]))
        forecast.learn(batch, choices.tolist())
        table = forecast.table[forecast.layers.index(layer)]
        known[layer] = 0
        for entry in following[number]:
            known[entry] = 10
        scores[layer, : len(table)] = table[: shape[1]]
        scores[layer] += known[layer]
        return scores

    return score


def fitted_estimator(asked: Demand, shape: tuple[int, int]) -> Score:
    """Odds that the layer's next token uses an entry, by a regression fitted on this trace."""
    rows = [_features(state) for state in _states(asked, shape)]
    layers = [batch[0][0] for batch in asked.batches]
    used = np.zeros((len(layers), shape[1]))
    for number, batch in enumerate(asked.batches):
        used[number, [expert for _, expert in batch]] = 1
    later = {}
    target = np.full(len(layers), -1)
    for number in range(len(layers) - 1, -1, -1):
        target[number] = later.get(layers[number], -1)
        later[layers[number]] = number
    has = np.flatnonzero(target >= 0)
    x = np.concatenate([rows[number] for number in has])
    y = used[target[has]].ravel()
    weights = _logistic(x, y)
    scores = np.zeros(shape)

    def score(number: int) -> np.ndarray:
        scores[layers[number]] = rows[number] @ weights
        return scores

    return score


def _states(asked: Demand, shape: tuple[int, int]):
    """After each batch: of its layer, tokens so far, age of the last use, uses that fade."""
    lives = (2.0, 8.0, 32.0, 128.0)
    turn = np.zeros(shape[0])
    last = np.full(shape, -np.inf)
    fading = np.zeros((len(lives), *shape))
    for batch in asked.batches:
        layer, experts = batch[0][0], [expert for _, expert in batch]
        turn[layer] += 1
        last[layer, experts] = turn[layer]
        fading[:, layer] *= np.exp2(-1 / np.array(lives))[:, None]
        fading[:, layer, experts] += 1
        yield turn[layer] - last[layer], fading[:, layer].copy()


def _features(state: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    age, fading = state
    return np.column_stack(
        [np.ones(len(age)), 1 / (1 + age), np.log1p(fading).T, np.sqrt(fading).T]
    )


def _logistic(x: np.ndarray, y: np.ndarray, steps: int = 12) -> np.ndarray:
    """Weights of a logistic regression, by Newton's method."""
    weights = np.zeros(x.shape[1])
    for _ in range(steps):
        odds = 1 / (1 + np.exp(-x @ weights))
        slope = x.T @ (y - odds) - 1e-3 * weights
        curve = (x * (odds * (1 - odds))[:, None]).T @ x + 1e-3 * np.eye(len(weights))
        weights += np.linalg.solve(curve, slope)
    return weights


def hits(asked: Demand, score: Score, budgets: list[int], shape: tuple[int, int]) -> list[float]:
    """Hit rate in percent at each budget."""
    caches = [ByScore(budget, shape) for budget in budgets]
    found = np.zeros(len(budgets))
    for number, (batch, size) in enumerate(zip(asked.batches, asked.sizes.tolist(), strict=True)):
        scores = score(number)
        for place, cache in enumerate(caches):
            cache.scores = scores
            found[place] += len(cache.lookup(batch, size).hits)
    return (100 * found / asked.counts.sum()).tolist()


def won_back(asked: Demand, budgets_mib: list[float]) -> pd.DataFrame:
    """Percent of LRU's gap to Belady that each bound, and each real policy, wins back."""
    shape = (max(asked.entry_bytes) + 1, int(asked.experts.max()) + 1)
    budgets = [int(budget * MIB) for budget in budgets_mib]
    table = replay(asked, budgets_mib).pivot(index="budget_mib", columns="policy", values="hit_pct")
    for make in (true_frequency, fitted_estimator, next_token):
        rates = hits(asked, make(asked, shape), budgets, shape)
        table[make.__name__] = pd.Series(rates, index=[float(budget) for budget in budgets_mib])
    gap = table["belady"] - table["lru"]
    won = table.drop(columns=["lru", "belady"]).sub(table["lru"], axis=0).div(gap, axis=0)
    return (100 * won).assign(gap_points=gap)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--budgets", default="1000,1500,2000,2500,3000,4000")
    parser.add_argument("--entry-bytes", type=int)
    options = parser.parse_args()
    asked = demand(RouteTrace.open(options.trace), entry_bytes=options.entry_bytes)
    table = won_back(asked, [float(part) for part in options.budgets.split(",")])
    sys.stdout.write(table.to_csv(float_format="%.1f"))


if __name__ == "__main__":
    main()
