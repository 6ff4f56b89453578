"""How near the reads of a session come to the disk, and what keeping pages saves.

    python tests/bench/read_rate.py MODEL --rounds 5 --reads 300

The same slices of the same file, drawn anew each round, over the same number of lanes, in turns: a
plain O_DIRECT reader into one buffer per lane ("raw"), slices through labkit's expert memory with
pages kept ("moved"), and with pages freed and cleared again ("freed"). Prints JSON: MiB a second,
processor milliseconds a slice, and each way's rate over the raw one, medians of rounds.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import threading
import time
from statistics import median

import numpy as np

from labkit.gguf_map import GGUFMap, open_gguf
from labkit.policy.base import Entry
from labkit.runtime.expert_memory import ExpertMemory
from labkit.runtime.reader import FileReader


def raw(gguf: GGUFMap, entries: list[Entry], lanes: int) -> int:
    """Read the slices, widened to blocks, each lane into a buffer of its own; bytes read."""
    spans = [
        (s.offset - s.offset % 4096, -(-(s.offset + s.nbytes) // 4096) * 4096)
        for layer, expert in entries
        for s in gguf.expert(layer, expert)
    ]
    size = max(high - low for low, high in spans)
    file = os.open(gguf.paths[0], os.O_RDONLY | os.O_DIRECT)

    def lane(number: int) -> None:
        with mmap.mmap(-1, size) as buffer, memoryview(buffer) as view:
            buffer.write(bytes(size))
            ready.wait()
            for low, high in spans[number::lanes]:
                with view[: high - low] as part:
                    os.preadv(file, [part], low)

    ready = threading.Barrier(lanes)
    threads = [threading.Thread(target=lane, args=(number,)) for number in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(file)
    return sum(high - low for low, high in spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reads", type=int, default=150, help="entries a round")
    parser.add_argument("--lanes", type=int, default=4)
    arguments = parser.parse_args()
    gguf = open_gguf(arguments.model)
    rng = np.random.default_rng()
    memory = ExpertMemory(gguf)
    reader = FileReader(gguf.paths, lanes=arguments.lanes, direct_io=True)
    every = [(layer, expert) for layer in gguf.moe_layers for expert in range(gguf.n_expert)]
    held: list[Entry] = []

    def draw() -> list[Entry]:
        free = sorted(set(every) - set(held))
        return [free[i] for i in rng.choice(len(free), arguments.reads, replace=False)]

    def stream(keep: bool) -> int:
        wanted = draw()
        memory.evict(held, wanted if keep else ())
        memory.resident.update(wanted)
        held[:] = wanted
        return reader.read(memory.requests(wanted))

    stream(keep=True)
    ways = {
        "raw": lambda: raw(gguf, draw(), arguments.lanes),
        "moved": lambda: stream(keep=True),
        "freed": lambda: stream(keep=False),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    cpu_ms: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, run in ways.items():
            begin, cpu = time.perf_counter(), time.process_time()
            n_bytes = run()
            rates[name].append(n_bytes / 2**20 / (time.perf_counter() - begin))
            cpu_ms[name].append(1e3 * (time.process_time() - cpu) / (3 * arguments.reads))
    figures = {
        name: {
            "mib_s": round(median(rates[name])),
            "cpu_ms_a_slice": round(median(cpu_ms[name]), 3),
            "over_raw": round(
                median(a / b for a, b in zip(rates[name], rates["raw"], strict=True)), 3
            ),
        }
        for name in ways
    }
    reader.close()
    memory.close()
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
