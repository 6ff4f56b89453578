"""How near the reads of a session come to the disk, and what keeping pages saves.

    python tests/bench/read_rate.py MODEL --rounds 15 --lanes 4

Slices of one file, drawn anew each time, over the same number of lanes, in turns and each round in
another order:

- plain: a plain O_DIRECT reader, into one buffer a lane, of memory as any program gets it;
- raw: the same, into pages of labkit's cache;
- wide: the same, each slice to a place of its own, as a cache has it;
- moved: through labkit's expert memory and reader, while as many slices leave it, whose pages are
  read into;
- freed: the same, but the pages of those that leave are freed, and new ones cleared.

"straight" memory is what "serial" and "pipeline" compute from, "watched" memory is filled by way of
frames, as "userfaultfd" needs it. How fast the disk fills pages depends on how many of them
lie side by side; raw and wide read into the very pages that moved leaves behind.

Prints JSON: MiB a second from asking for the first slice to having the last, processor
milliseconds a slice, the rate over that of plain and of wide (median of rounds, lowest, highest),
and by how much the page cache grew in all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import numpy as np
import psutil

from labkit import host
from labkit.gguf_map import GGUFMap, open_gguf
from labkit.policy.base import Entry
from labkit.runtime.expert_memory import ExpertMemory
from labkit.runtime.memory import PageRange
from labkit.runtime.reader import FileReader
from labkit.runtime.userfault import UserFault

Timed = Callable[[list[Entry]], tuple[float, int]]
"""Reads entries; seconds and bytes."""

Row = tuple[float, float, float]
"""MiB a second, processor milliseconds a slice, MiB that the page cache grew by"""


class Streamed:
    """Entries in place of others, through a session's memory and reader."""

    def __init__(self, gguf: GGUFMap, lanes: int, *, watched: bool, keep: bool) -> None:
        self._gguf, self._lanes, self._keep = gguf, lanes, keep
        self._memory = ExpertMemory(gguf, UserFault() if watched else None)
        self._memory.watch(watched)
        self._reader = FileReader(gguf.paths, lanes=lanes, direct_io=True)
        self._held: list[Entry] = []
        # Many maps of a slice's size, made when memory has been in use: no huge pages.
        nbytes = max(part.window.core_bytes for part in self._memory._all_parts())
        self._buffers = [PageRange(nbytes) for _ in range(lanes)]

    def read(self, entries: list[Entry]) -> tuple[float, int]:
        """By labkit."""
        begin = time.perf_counter()
        if not self._keep:
            self._memory.evict(self._held, ())
            self._held = []
        self._memory.evict(self._held, entries)
        n_bytes = self._reader.read(self._memory.requests(entries))
        self._held = entries
        return time.perf_counter() - begin, n_bytes

    def read_raw(self, entries: list[Entry], *, wide: bool = False) -> tuple[float, int]:
        """By a plain reader, over what is held."""
        places = [
            part.window.view(*part.window.core(expert))
            for layer, expert in self._held
            for part in self._memory._parts[layer]
        ]
        starts = [s.offset // 4096 * 4096 for e in entries for s in self._gguf.expert(*e)]
        wall_s = read_raw(
            self._gguf, starts, places if wide else places[: self._lanes], self._lanes
        )
        return wall_s, len(starts) * len(places[0])

    def read_plain(self, entries: list[Entry]) -> tuple[float, int]:
        """By a plain reader, over buffers of its own."""
        places = [buffer.memory for buffer in self._buffers]
        starts = [s.offset // 4096 * 4096 for e in entries for s in self._gguf.expert(*e)]
        return read_raw(self._gguf, starts, places, self._lanes), len(starts) * len(places[0])

    def close(self) -> None:
        """End the lanes, unmap."""
        self._reader.close()
        self._memory.close()


def read_raw(gguf: GGUFMap, starts: list[int], places: Sequence[memoryview], lanes: int) -> float:
    """Read at each of the file offsets as many bytes as a place has; seconds."""
    file = os.open(gguf.paths[0], os.O_RDONLY | os.O_DIRECT)
    ready = threading.Barrier(lanes + 1)
    left: Iterator[tuple[int, int]] = iter(enumerate(starts))

    def run(lane: int) -> None:
        ready.wait()
        for number, start in left:
            os.preadv(file, [places[lane if len(places) == lanes else number]], start)

    threads = [threading.Thread(target=run, args=(lane,)) for lane in range(lanes)]
    for thread in threads:
        thread.start()
    ready.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    wall_s = time.perf_counter() - begin
    os.close(file)
    return wall_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--reads", type=int, default=60, help="entries a round")
    parser.add_argument("--lanes", type=int, default=4)
    arguments = parser.parse_args()
    gguf = open_gguf(arguments.model)
    kinds = ["straight"] if host.userfaultfd_problem() else ["straight", "watched"]
    figures = {}
    for kind in kinds:
        kept, freed = (
            Streamed(gguf, arguments.lanes, watched=kind == "watched", keep=keep)
            for keep in (True, False)
        )
        ways: dict[str, Timed] = {
            "plain": kept.read_plain,
            "raw": kept.read_raw,
            "wide": lambda entries, kept=kept: kept.read_raw(entries, wide=True),
            "moved": kept.read,
            "freed": freed.read,
        }
        figures[kind] = compare(gguf, ways, arguments.rounds, arguments.reads)
        kept.close()
        freed.close()
    sys.stdout.write(json.dumps(figures) + "\n")


def compare(gguf: GGUFMap, ways: dict[str, Timed], rounds: int, reads: int) -> dict[str, dict]:
    """Figures by way."""
    rng = np.random.default_rng()
    every = [(layer, expert) for layer in gguf.moe_layers for expert in range(gguf.n_expert)]
    # What a way still holds is of its last round; so rounds draw from two halves in turns.
    halves = np.array_split(rng.permutation(len(every)), 2)
    rows: dict[str, list[Row]] = {name: [] for name in ways}
    for name in ("moved", "freed"):
        ways[name]([every[i] for i in halves[1][:reads]])
    for number in range(rounds):
        for name in rng.permutation(list(ways)).tolist():
            entries = [every[i] for i in rng.choice(halves[number % 2], reads, replace=False)]
            cpu, cached = time.process_time(), psutil.virtual_memory().cached
            wall_s, n_bytes = ways[name](entries)
            cpu_ms = 1e3 * (time.process_time() - cpu) / (3 * reads)
            grown = psutil.virtual_memory().cached - cached
            rows[name].append((n_bytes / 2**20 / wall_s, cpu_ms, grown / 2**20))
    return {name: summary(found, rows["plain"], rows["wide"]) for name, found in rows.items()}


def summary(rows: list[Row], plain: list[Row], wide: list[Row]) -> dict:
    """Figures of one way from its (rate, cpu, growth) by round."""
    rates, cpu_ms, grown_mib = zip(*rows, strict=True)
    over_plain = sorted(mine[0] / other[0] for mine, other in zip(rows, plain, strict=True))
    over_wide = sorted(mine[0] / other[0] for mine, other in zip(rows, wide, strict=True))
    return {
        "mib_s": round(median(rates)),
        "cpu_ms_a_slice": round(median(cpu_ms), 3),
        "over_plain": [round(f(over_plain), 2) for f in (median, min, max)],
        "over_wide": [round(f(over_wide), 2) for f in (median, min, max)],
        "page_cache_mib": round(sum(grown_mib), 1),
    }


if __name__ == "__main__":
    main()
