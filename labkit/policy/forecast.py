"""What comes next, by what came after moments like this one: a score for each expert of a layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.policy.base import Entry

_LASTS = 64.0  # tokens after which what a text was about begins to be forgotten
_SHARPNESS = 20.0  # how much more a token counts whose routing is more like the present
_LATER = np.float32(
    0.3
)  # worth of what was used two tokens after such a moment, beside one token after
_TIE = 1e-9  # so that of experts without a vote the one used last is expected first


class Forecast:
    """Scores experts by which past tokens used them, how long ago, and in what company.

    Each of the last `window` tokens has a vote for the experts that it used. The vote is the sum of
    two, of which each is one for all tokens together:

    - by recency: in proportion to exp(-age / 64) / age, in tokens;
    - by likeness: in proportion to exp(20 x similarity) of the token *before* it to the present
      one (and three tenths of that for the token before that). The similarity of two tokens is the
      share of experts that they have in common, averaged over layers, the last ones counting most
      and fading over about one token. So what followed a similar moment is expected now, as in
      attention over the past, but with nothing to train.

    A layer is scored when it has just been asked, for its next turn: then it is decided what of it
    may stay. A token costs about fifteen small numpy operations per layer, however long the text.
    The constants were chosen on traces of the bundled model and on generated ones.

    Args:
        n_layers: MoE layers of the model.
        window: tokens remembered, at least 3. Memory is 16 bytes x window x layers x experts used.

    Attributes:
        table: (layers, experts) float32, the latest scores, in the order in which layers came up.
        layers: their numbers, row by row.
    """

    def __init__(self, n_layers: int, window: int = 256) -> None:
        n_layers = max(n_layers, 1)
        self.table = np.zeros((n_layers, 1), np.float32)
        self.layers: list[int] = []
        self._rows: dict[int, int] = {}
        # What each token used, as expert + 1; 0 is nothing. The newest token is at `_newest`, the
        # one before it at the next place: a view from there on goes by age, and room for newer ones
        # is before it.
        self._used = np.zeros((n_layers, 2 * window, 1), np.int64)
        self._newest = window
        self._last_use = np.zeros((n_layers, 1), np.float32)  # token x _TIE
        self._now = np.zeros(2, np.float32)  # weight of what the present token uses, by expert + 1
        self._alike = np.zeros(window, np.float32)  # by age: similarity x sharpness
        self._followed = np.zeros(window + 2, np.float32)  # exp of that, then 0
        self._fade = np.float32(1 - 1 / n_layers)
        self._weight = _SHARPNESS / n_layers
        self._window = window
        self._seen = 0  # tokens so far
        self._last_layer = -1
        self._k = 0  # experts of one token
        self._ones = np.ones(1, np.float32)
        ages = np.arange(1, window + 1)
        self._recency = (np.exp(-ages / _LASTS) / ages).astype(np.float32)
        self._recent = self._recency  # of which the tokens so far have votes that sum to 1

    def learn(self, wanted: Sequence[Entry], choices: Sequence[int] = ()) -> None:
        """Learn what a batch asked for, and score its layer's experts for their next turn.

        Args:
            wanted: its distinct entries; at least one.
            choices: experts of every token of the batch, token by token, if there are several.
        """
        choices = choices or [expert for _, expert in wanted]
        row = self.row(wanted[0][0], max(choices))
        self.table[row] = self._learn(row, choices)

    def row(self, layer: int, expert: int) -> int:
        """The row of `layer` in `table`, which is made to hold it and `expert`."""
        row = self._rows.get(layer)
        if row is None:
            row = self._rows[layer] = len(self.layers)
            self.layers.append(layer)
        layers, experts = self.table.shape
        if row >= layers or expert >= experts:
            more = max(row + 1 - layers, 0), max((1 << expert.bit_length()) - experts, 0)
            add = ((0, more[0]), (0, more[1]))
            self.table = np.pad(self.table, add)
            self._last_use = np.pad(self._last_use, add)
            self._now = np.zeros(self.table.shape[1] + 1, np.float32)
            self._used = np.pad(self._used, (add[0], (0, 0), (0, 0)))
        return row

    def _learn(self, row: int, choices: Sequence[int]) -> np.ndarray:
        n = self._tokens(choices)
        layer = self.layers[row]
        if layer <= self._last_layer or not self._seen:
            self._step(n)
        self._last_layer = layer
        by_age = self._used[row, self._newest : self._newest + self._window]
        tokens = np.array(choices).reshape(n, -1) + 1
        if n > 1:  # the last of them is the present one
            by_age[1:n, : self._k] = tokens[-2 : -len(by_age) - 1 : -1]
        last, now, alike = tokens[-1], self._now, self._alike
        now[last] = self._weight / self._k
        np.multiply(alike, self._fade, out=alike)
        np.add(alike, now.take(by_age) @ self._ones, out=alike)
        now[last] = 0
        by_age[0, : self._k] = last
        self._last_use[row, last - 1] = self._seen * _TIE

        # What follows the present token is not known, so its likeness to itself is left out.
        followed, known = self._followed, min(self._seen, self._window)
        np.exp(alike[:known], out=followed[:known])
        votes = followed[1:-1] + followed[2:] * _LATER
        votes *= 1 / ((1 + _LATER) * max(float(followed[1:].sum()), _TIE))
        votes += self._recent
        scores = np.bincount(by_age.reshape(-1), votes.repeat(by_age.shape[1]), len(now))
        return scores[1:] + self._last_use[row]

    def _step(self, n: int) -> None:
        """`n` tokens more: a past token is now compared with the present one at the same age."""
        if self._seen < self._window:
            self._recent = self._recency / self._recency[: self._seen + n].sum()
        self._seen += n
        n = min(n, self._window)
        if self._newest < n:
            window = slice(self._newest, self._newest + self._window)
            self._used[:, self._window :] = self._used[:, window].copy()
            self._newest = self._window
        self._newest -= n
        self._used[:, self._newest : self._newest + n] = 0
        if n > 1:
            self._alike[:] = 0

    def _tokens(self, choices: Sequence[int]) -> int:
        """How many tokens these choices are, when a token chooses no expert twice.

        A batch does not say how many experts a token has. It is the most that divide it into tokens
        without a repetition, and never more than in the last batch that this was worked out for.
        """
        n = len(choices)
        if not self._k or n % self._k:
            most = range(len(set(choices)), 0, -1)
            self._k = next(k for k in most if n % k == 0 and _distinct(choices, k))
            if (more := self._k - self._used.shape[2]) > 0:
                self._used = np.pad(self._used, ((0, 0), (0, 0), (0, more)))
                self._ones = np.ones(self._k, np.float32)
        return n // self._k


def _distinct(choices: Sequence[int], k: int) -> bool:
    """Whether no `k` choices, in their order, repeat one."""
    rows = np.sort(np.reshape(choices, (-1, k)), axis=1)
    return not (rows[:, 1:] == rows[:, :-1]).any()
