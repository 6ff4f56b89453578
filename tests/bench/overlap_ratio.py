"""How well a decoded token's reads hide behind its compute, or the other way round.

    python tests/bench/overlap_ratio.py MODEL --cache-mib 1150 --rounds 16

The same tokens, in turns and each round in another order:

- a session for each way of overlapping ("userfaultfd+router" with prefetch; "serial+known" with
  one that cannot be, which knows what the next layer is going to choose), with a cache that holds a
  part of the experts;
- compute alone: a session that holds every expert;
- read alone: what the first session read for this token, layer by layer through a reader and a
  memory of its own, with nothing computed in between.

Only rounds count in which other processes took at most `--others-pct` of the processors, unless
they are fewer than five. Prints JSON: how many counted and what others took; of those, median
milliseconds of each, each way's wall time over the longer of the two alone and over their sum
(median of rounds), the hit rate, and what was read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import cast

import numpy as np
import psutil

from labkit import host
from labkit.gguf_map import GGUFMap, open_gguf
from labkit.policy.base import Entry
from labkit.runtime import Session
from labkit.runtime.expert_memory import ExpertMemory
from labkit.runtime.overlap import OverlapChoice
from labkit.runtime.reader import FileReader
from labkit.runtime.streaming import Prefetch

Demand = list[tuple[list[Entry], list[Entry]]]
"""What leaves and what is read, by layer."""


class ReadAlone:
    """The reads of another session, without its compute."""

    def __init__(self, gguf: GGUFMap, lanes: int) -> None:
        self._memory = ExpertMemory(gguf)
        self._reader = FileReader(gguf.paths, lanes=lanes)

    def repeat(self, demand: Demand) -> float:
        """Seconds."""
        begin = time.perf_counter()
        for gone, wanted in demand:
            self._memory.evict(gone, wanted)
            self._reader.read(self._memory.requests(wanted))
        return time.perf_counter() - begin

    def close(self) -> None:
        """End the lanes, unmap."""
        self._reader.close()
        self._memory.close()


def note_demand(session: Session) -> Demand:
    """A list that fills with what the session's cache lets go and reads."""
    assert session._streaming
    memory, found = session._streaming.source.memory, []
    evict = memory.evict

    def noting(gone: Iterable[Entry], wanted: Iterable[Entry]) -> None:
        gone, wanted = list(gone), list(wanted)
        found.append((gone, wanted))
        evict(gone, wanted)

    memory.evict = noting
    return found


class Known:
    """A predictor that is right every time: another session has computed this token before."""

    def __init__(self, session: Session) -> None:
        self._next = dict(pairwise(session.map.moe_layers))
        self._chosen: dict[int, list[int]] = {}
        assert session._streaming
        fetch = session._streaming.fetch

        def noting(layer: int, experts: np.ndarray) -> Sequence[Entry]:
            self._chosen[layer] = experts.ravel().tolist()
            return fetch(layer, experts)

        session._streaming.fetch = noting

    def predict(self, layer: int, chosen: list[int]) -> Sequence[int]:
        """What the layer after `layer` chooses."""
        return self._chosen.get(self._next.get(layer, -1), ())


class Processors:
    """Who takes the processors from now on."""

    def __init__(self) -> None:
        self._times, self._own_s = psutil.cpu_times(), time.process_time()

    def taken_pct(self) -> float:
        """Percent of their time that others took, the host among them."""
        now, was = psutil.cpu_times(), self._times
        total = sum(now[:8]) - sum(was[:8])
        idle = now.idle + now.iowait - was.idle - was.iowait
        own_s = time.process_time() - self._own_s
        return 100 * max(0.0, total - idle - own_s) / total


def decode(session: Session, token: int) -> float:
    """Seconds of one decoded token."""
    begin = time.perf_counter()
    session._engine.graph([token], session.n_past, [True], turn=0, phase="decode")
    session.n_past += 1
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--cache-mib", type=float, default=1150)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=24)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--distinct", type=int, default=12, help="tokens that come again and again")
    parser.add_argument("--others-pct", type=float, default=10)
    parser.add_argument("--ways", default="serial,pipeline,userfaultfd,userfaultfd+router")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    has_userfault = not host.userfaultfd_problem()
    ways = [w for w in arguments.ways.split(",") if has_userfault or "userfaultfd" not in w]
    rng = np.random.default_rng(0)
    vocabulary = rng.integers(10, 400, arguments.distinct)
    tokens = rng.choice(vocabulary, arguments.warmup + arguments.rounds).tolist()

    def session(cache_mib: float, way: str) -> Session:
        overlap, _, prefetch = way.partition("+")
        return Session(
            arguments.model, cache_mib=cache_mib, overlap=cast(OverlapChoice, overlap),
            prefetch=cast(Prefetch, prefetch.replace("known", "router") or None),
            lanes=arguments.lanes,
            prefill="experts", n_ctx=512, trial=False,
        )  # fmt: skip

    every_mib = sum(t.tensor.nbytes for t in open_gguf(arguments.model).expert_tensors) / 2**20 + 1
    sessions = {way: session(arguments.cache_mib, way) for way in ways}
    sessions["compute alone"] = session(every_mib, ways[0])
    known = Known(sessions[ways[0]])
    for way in ways:
        if way.endswith("+known"):
            foretelling = sessions[way]._streaming
            assert foretelling
            assert foretelling.lookahead
            foretelling.lookahead.predictor = known
    demand = note_demand(sessions[ways[0]])
    alone = ReadAlone(sessions[ways[0]].map, arguments.lanes)
    totals = sessions[ways[0]]._recorder.totals

    def take_turns(token: int) -> dict[str, float]:
        """Seconds of each, and what others took of the processors meanwhile."""
        demand.clear()
        names = [n for n in [*sessions, "read alone"] if n != ways[0]]
        processors, walls = Processors(), {}
        for name in [ways[0], *rng.permutation(names).tolist()]:
            is_read = name == "read alone"
            walls[name] = alone.repeat(demand) if is_read else decode(sessions[name], token)
        return walls | {"others_pct": processors.taken_pct()}

    for token in tokens[: arguments.warmup]:
        take_turns(token)
    before = totals.copy()
    rounds = [take_turns(token) for token in tokens[arguments.warmup :]]
    spent = totals - before
    quiet = [r for r in rounds if r["others_pct"] <= arguments.others_pct]
    figures = summary(quiet if len(quiet) >= 5 else rounds, ways)
    figures["hits_pct"] = round(100 * spent.hits / (spent.hits + spent.misses), 1)
    figures["mib_a_token"] = round(spent.bytes_read / 2**20 / arguments.rounds, 1)
    alone.close()
    for each in sessions.values():
        each.close()
    sys.stdout.write(json.dumps(figures) + "\n")


def summary(rounds: list[dict[str, float]], ways: list[str]) -> dict:
    """Figures of the rounds that count."""
    alone = [(walls["compute alone"], walls["read alone"]) for walls in rounds]
    return {
        "rounds": len(rounds),
        "others_pct": round(median(walls.pop("others_pct") for walls in rounds), 1),
        "ms": {name: round(1e3 * median(w[name] for w in rounds), 1) for name in rounds[0]},
        "over_longer": {way: ratio(rounds, way, [max(pair) for pair in alone]) for way in ways},
        "over_sum": {way: ratio(rounds, way, [sum(pair) for pair in alone]) for way in ways},
    }


def ratio(rounds: list[dict[str, float]], way: str, others: list[float]) -> float:
    """Median over the rounds."""
    return round(median(walls[way] / b for walls, b in zip(rounds, others, strict=True)), 3)


if __name__ == "__main__":
    main()
