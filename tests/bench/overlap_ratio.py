"""How well a decoded token's reads hide behind its compute, or the other way round.

    python tests/bench/overlap_ratio.py MODEL --cache-mib 1150 --rounds 16

The same tokens, in turns and each round in another order:

- a session for each way of overlapping, with a cache that holds a part of the experts;
- compute alone: a session that holds every expert;
- read alone: what the first session read for this token, layer by layer through a reader and a
  memory of its own, with nothing computed in between.

Prints JSON: median milliseconds of each, each way's wall time over the longer of the two alone and
over their sum (median of rounds), and the hit rate.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterable
from statistics import median

import numpy as np
import psutil

from labkit import host
from labkit.gguf_map import GGUFMap, open_gguf
from labkit.policy.base import Entry
from labkit.runtime import Session
from labkit.runtime.expert_memory import ExpertMemory
from labkit.runtime.overlap import OverlapChoice
from labkit.runtime.reader import FileReader

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


class Processors:
    """Who takes the processors from now on."""

    def __init__(self) -> None:
        self._times, self._own_s = psutil.cpu_times(), time.process_time()

    def taken_pct(self) -> dict[str, float]:
        """Percent of their time that went to others, and that the host kept for itself."""
        now, was = psutil.cpu_times(), self._times
        total = sum(now[:8]) - sum(was[:8])
        idle = now.idle + now.iowait - was.idle - was.iowait
        stolen = now.steal - was.steal
        others = total - idle - stolen - (time.process_time() - self._own_s)
        return {
            name: round(100 * max(0.0, spent) / total, 1)
            for name, spent in (("others", others), ("host", stolen))
        }


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
    parser.add_argument("--ways", default="serial,pipeline,userfaultfd")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    ways = [
        w for w in arguments.ways.split(",") if w != "userfaultfd" or not host.userfaultfd_problem()
    ]
    rng = np.random.default_rng(0)
    vocabulary = rng.integers(10, 400, arguments.distinct)
    tokens = rng.choice(vocabulary, arguments.warmup + arguments.rounds).tolist()

    def session(cache_mib: float, overlap: OverlapChoice) -> Session:
        return Session(
            arguments.model, cache_mib=cache_mib, overlap=overlap, lanes=arguments.lanes,
            prefill="experts", n_ctx=512, trial=False,
        )  # fmt: skip

    every_mib = sum(t.tensor.nbytes for t in open_gguf(arguments.model).expert_tensors) / 2**20 + 1
    sessions = {way: session(arguments.cache_mib, way) for way in ways}
    sessions["compute alone"] = session(every_mib, ways[0])
    demand = note_demand(sessions[ways[0]])
    alone = ReadAlone(sessions[ways[0]].map, arguments.lanes)
    totals = sessions[ways[0]]._recorder.totals

    def take_turns(tokens: list[int]) -> dict[str, list[float]]:
        walls: dict[str, list[float]] = {name: [] for name in [*sessions, "read alone"]}
        for token in tokens:
            demand.clear()
            for name in [ways[0], *rng.permutation(list(walls)[1:]).tolist()]:
                is_read = name == "read alone"
                wall_s = alone.repeat(demand) if is_read else decode(sessions[name], token)
                walls[name].append(wall_s)
        return walls

    take_turns(tokens[: arguments.warmup])
    before, processors = totals.copy(), Processors()
    walls = take_turns(tokens[arguments.warmup :])
    spent = totals - before
    longest = [max(pair) for pair in zip(walls["compute alone"], walls["read alone"], strict=True)]
    both = [sum(pair) for pair in zip(walls["compute alone"], walls["read alone"], strict=True)]
    figures = {
        "ms": {name: round(1e3 * median(found), 1) for name, found in walls.items()},
        "over_longer": {way: ratio(walls[way], longest) for way in ways},
        "over_sum": {way: ratio(walls[way], both) for way in ways},
        "hits_pct": round(100 * spent.hits / (spent.hits + spent.misses), 1),
        "processors_pct": processors.taken_pct(),
        "mib_a_token": round(spent.bytes_read / 2**20 / arguments.rounds, 1),
    }
    alone.close()
    for each in sessions.values():
        each.close()
    sys.stdout.write(json.dumps(figures) + "\n")


def ratio(walls: list[float], others: list[float]) -> float:
    """Median over the rounds."""
    return round(median(a / b for a, b in zip(walls, others, strict=True)), 3)


if __name__ == "__main__":
    main()
