"""What a trace asks of a cache: its routing in the order in which the engine asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from labkit.errors import TraceError
from labkit.policy import Entry
from labkit.trace import RouteTrace

_CHUNK = 4096  # batches


@dataclass(frozen=True, eq=False)
class Demand:
    """What a trace asks of a cache: one batch after another, each of one layer.

    Attributes:
        keys: (B,) rows: turn, phase (0 prefill, 1 decode), step (the batch's first), layer.
        counts: (B,) entries in each batch.
        experts: (n,) those entries' experts, distinct within a batch, in the order asked.
        sizes: (B,) bytes of an entry of the batch's layer.
        entry_bytes: the same by layer.
        choices: for each batch of several tokens, by number: (tokens x k,) experts that they chose,
            token by token.
    """

    keys: pd.DataFrame
    counts: np.ndarray
    experts: np.ndarray
    sizes: np.ndarray
    entry_bytes: dict[int, int]
    choices: dict[int, np.ndarray]

    @property
    def batches(self) -> list[list[Entry]]:
        """(layer, expert) entries of each batch; every entry is one tuple, however often named."""
        return [batch for chunk in self.chunks() for batch in chunk]

    def chunks(self) -> Iterator[list[list[Entry]]]:
        """`batches`, some thousand at a time, so that a long trace needs little memory for them."""
        layers, ids = self.keys["layer"].to_numpy(), self.ids
        width = int(self.experts.max(initial=-1)) + 1
        names = np.empty((int(layers.max(initial=-1)) + 1) * width, object)
        for place in np.unique(ids).tolist():
            names[place] = divmod(place, width)
        stops = self.counts.cumsum()
        for bounds in _chunks(np.r_[0, stops]):
            entries = names[ids[bounds[0] : bounds[-1]]].tolist()
            at = (bounds - bounds[0]).tolist()
            yield [entries[low:high] for low, high in pairwise(at)]

    def next_uses(self) -> Iterator[list[int]]:
        """For each batch, the next batch that wants each of its entries; see `Future`."""
        ids = self.ids
        batch = np.repeat(np.arange(len(self.counts)), self.counts)
        order = np.argsort(ids, kind="stable")
        again = np.flatnonzero(ids[order][1:] == ids[order][:-1])
        coming = np.full(len(ids), len(self.counts))
        coming[order[again]] = batch[order[again + 1]]
        for bounds in _chunks(np.r_[0, self.counts.cumsum()]):
            numbers = coming[bounds[0] : bounds[-1]].tolist()
            for low, high in pairwise((bounds - bounds[0]).tolist()):
                yield numbers[low:high]

    @property
    def ids(self) -> np.ndarray:
        """(n,) a number for each entry asked for, in the order asked."""
        width = int(self.experts.max(initial=-1)) + 1
        return np.repeat(self.keys["layer"].to_numpy(), self.counts) * width + self.experts

    @property
    def floor_bytes(self) -> int:
        """Bytes of the largest batch, which no budget can go below."""
        return int((self.counts * self.sizes).max(initial=0))

    @property
    def cycle_bytes(self) -> int:
        """The token cycle: bytes that a generated token asks for in all layers, on average.

        Sum over generated tokens and layers of (different experts chosen x bytes of an entry) /
        generated tokens. Below it an LRU cache over all layers finds next to nothing. 0 if nothing
        was generated.
        """
        decode = self.keys["phase"].to_numpy() == 1
        tokens = len(self.keys.loc[decode, ["turn", "step"]].drop_duplicates())
        return int((self.counts * self.sizes)[decode].sum() / max(tokens, 1))

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries that are asked for: with that budget nothing is read twice."""
        _, first = np.unique(self.ids, return_index=True)
        return int(np.repeat(self.sizes, self.counts)[first].sum())


def demand(
    trace: RouteTrace,
    *,
    entry_bytes: Mapping[int, int] | int | None = None,
    ubatch: int | None = None,
) -> Demand:
    """Put a trace in the order in which its engine asked.

    Args:
        entry_bytes: bytes of an expert entry, by layer or for all; None takes the trace's own.
        ubatch: tokens of one prefill batch; None puts the whole prompt in one.

    Raises:
        TraceError: the trace does not know the size of its entries, and none was given.
    """
    table = trace.table
    step = table["step"].to_numpy().astype(np.int64)
    columns = {
        "turn": table["turn"].to_numpy().astype(np.int64),
        "phase": table["phase"].cat.codes.to_numpy().astype(np.int64),
        "step": _first_of_batch(table, step, ubatch),
        "layer": table["layer"].to_numpy().astype(np.int64),
    }
    expert = table["expert"].to_numpy().astype(np.int64)
    # Rows come by token; a prompt's batch goes by layer, its tokens and slots in order.
    keys = list(columns.values())
    if not _in_order(keys):
        order = np.lexsort(keys[::-1])
        columns = {name: values[order] for name, values in columns.items()}
        step, expert = step[order], expert[order]
    changed = np.ones(len(step), bool)
    changed[1:] = np.any([values[1:] != values[:-1] for values in columns.values()], axis=0)
    starts = np.flatnonzero(changed)
    batch = np.cumsum(changed) - 1
    new = _first_named(batch, expert)
    by_layer = _sizes(trace, entry_bytes, np.unique(columns["layer"]).tolist())
    return Demand(
        pd.DataFrame({name: values[starts] for name, values in columns.items()}),
        np.bincount(batch[new], minlength=len(starts)),
        expert[new],
        np.array([by_layer[layer] for layer in columns["layer"][starts].tolist()], np.int64),
        by_layer,
        _choices(starts, step, expert),
    )


def _chunks(bounds: np.ndarray) -> Iterator[np.ndarray]:
    """Where the batches of a chunk begin, and where its last one ends, chunk by chunk."""
    for start in range(0, len(bounds) - 1, _CHUNK):
        yield bounds[start : start + _CHUNK + 1]


def _first_of_batch(table: pd.DataFrame, step: np.ndarray, ubatch: int | None) -> np.ndarray:
    """The first step of each row's batch: of its prompt, or its own."""
    prompt = (table["phase"].cat.codes == 0).to_numpy()
    result = step.copy()
    own = pd.Series(step[prompt])
    first = own.groupby(table["turn"].to_numpy()[prompt]).transform("min").to_numpy()
    result[prompt] = first if ubatch is None else own - (own - first) % ubatch
    return result


def _in_order(keys: Sequence[np.ndarray]) -> bool:
    """Whether rows are sorted by `keys`, the first counting most."""
    tie = np.ones(max(len(keys[0]) - 1, 0), bool)
    for key in keys:
        if (tie & (key[1:] < key[:-1])).any():
            return False
        tie &= key[1:] == key[:-1]
    return True


def _first_named(batch: np.ndarray, expert: np.ndarray) -> np.ndarray:
    """(n,) whether an expert is named for the first time in its batch."""
    code = batch * (int(expert.max(initial=0)) + 1) + expert
    order = np.argsort(code, kind="stable")
    again = code[order][1:] == code[order][:-1]
    new = np.ones(len(code), bool)
    new[order[1:][again]] = False
    return new


def _choices(starts: np.ndarray, step: np.ndarray, expert: np.ndarray) -> dict[int, np.ndarray]:
    """The rows of each batch that is of more than one step."""
    stops = np.r_[starts, len(step)][1:]
    several = np.flatnonzero(step[starts] != step[stops - 1])
    return {int(b): expert[starts[b] : stops[b]] for b in several}


def _sizes(
    trace: RouteTrace, entry_bytes: Mapping[int, int] | int | None, layers: list[int]
) -> dict[int, int]:
    if isinstance(entry_bytes, int):
        entry_bytes = dict.fromkeys(layers, entry_bytes)
    known = trace.entry_bytes if entry_bytes is None else entry_bytes
    for layer in layers:
        if known.get(layer, 0) <= 0:
            raise TraceError(
                f"The trace does not say how many bytes an expert of layer {layer} has, so a "
                "budget in MiB means nothing. Give entry_bytes (the option --entry-bytes): bytes "
                "of one expert's weights, all its projections, by layer or one number for all. "
                "`labkit inspect` shows it for a model file."
            )
    return {layer: known[layer] for layer in layers}
