"""Prefill of a model larger than memory: stock mmap, expert by expert, whole layers through slots.

    python tests/bench/prefill_limit.py MODEL --limit-mib 1600 --cache-mib 1150 --lengths 64,128

For each prompt length these take turns, each in a process of its own whose cgroup has the limit,
the file dropped from the page cache before:

- mmap, mmap-random: stock llama.cpp, with and without reading ahead
- experts: a session that brings experts one by one through its cache
- layers: a session that streams whole layers through two slots

and, without a limit, the two things that no way can be faster than: `compute`, stock llama.cpp with
the model in memory, and `read`, the experts' bytes in file order past the page cache, 4 MiB a read
over the same number of lanes. "cold" is the first prompt after opening, "warm" another one of the
same length after it, which finds part of its experts in the cache ("mmap": in the page cache).
Before each, the process rests for a while: a virtual disk may lend what it saved up meanwhile, and
a session that just read its dense weights would have less of that than a reader that did nothing.

Prints a line a run, then JSON: medians of seconds over rounds, each way over max(compute, read) of
the same round, and whether all logits were the same. "others" is the share of the cores that other
processes took meanwhile, worst run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

from labkit.bench import file_cache
from labkit.bench.cgroup import memory_cgroup
from labkit.bench.conditions import Share
from labkit.gguf_map import open_gguf

LIMITED = ("mmap", "mmap-random", "experts", "layers")
WAYS = (*LIMITED, "compute", "read")
PIECE = 4 << 20
BLOCK = 4096


def prompts(n: int) -> tuple[list[int], list[int]]:
    """Two prompts of n token ids that differ, the same for every way."""
    rng = random.Random(n)
    return [rng.randrange(100, 2000) for _ in range(n)], [
        rng.randrange(100, 2000) for _ in range(n)
    ]


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run one way in this process: seconds of the cold and of the warm prompt, and what it read."""
    if job["way"] == "read":
        seconds = []
        for _ in range(2):
            time.sleep(job["rest"])
            seconds.append(read_layers(Path(job["model"]), job["lanes"]))
        return {"s": seconds}
    run = measure_session if job["way"] in ("experts", "layers") else measure_stock
    return run(job)


def measure_session(job: dict[str, Any]) -> dict[str, Any]:
    """A streamed session; the prompts' logits go into a hash."""
    from labkit.runtime import Session

    warnings.simplefilter("ignore")
    with Session(
        job["model"], cache_mib=job["cache_mib"], prefill=job["way"], lanes=job["lanes"],
        n_ctx=1024, trial=False,
    ) as session:  # fmt: skip
        seconds, read, wait, hashes = [], [], [], []
        for prompt in prompts(job["n"]):
            session.reset()
            time.sleep(job["rest"])
            result = session.generate(prompt, 0, hash_logits=True)
            seconds.append(result.prefill_s)
            read.append(round(result.prefill_read_bytes / 2**20))
            wait.append(round(session.prefill_steps[0].wait_s, 3))
            hashes.append(result.logits_sha256)
    return {"s": seconds, "read_mib": read, "wait_s": wait, "hash": hashes}


def measure_stock(job: dict[str, Any]) -> dict[str, Any]:
    """Stock llama.cpp, mapped or (for `compute`) read into memory and run in once."""
    from labkit.runtime.stock import StockModel

    load = "resident" if job["way"] == "compute" else job["way"]
    with StockModel(job["model"], load, n_ctx=1024) as model:
        if job["way"] == "compute":
            model.prefill(prompts(job["n"])[1])
        seconds, hashes = [], []
        for prompt in prompts(job["n"]):
            model.reset()
            time.sleep(job["rest"])
            seconds.append(model.prefill(prompt))
            hashes.append(hashlib.sha256(model.logits().tobytes()).hexdigest())
    return {"s": seconds, "hash": hashes}


def read_layers(model: Path, lanes: int) -> float:
    """Seconds to read all expert tensors in file order, each lane into a buffer of its own."""
    gguf = open_gguf(model)
    pieces: list[tuple[int, int, int]] = []
    for part in gguf.expert_tensors:
        low = part.tensor.offset - part.tensor.offset % BLOCK
        high = -(-(part.tensor.offset + part.tensor.nbytes) // BLOCK) * BLOCK
        starts = range(low, high, PIECE)
        pieces += [(part.tensor.shard, at, min(PIECE, high - at)) for at in starts]
    pieces.sort()
    files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in gguf.paths]
    queue = iter(pieces)
    lock = threading.Lock()

    def lane() -> None:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        with mmap.mmap(-1, 2 * PIECE, flags=private) as buffer, memoryview(buffer) as view:
            buffer.madvise(mmap.MADV_HUGEPAGE)  # else the disk is told every page, and slower
            while True:
                with lock:
                    piece = next(queue, None)
                if piece is None:
                    return
                shard, at, size = piece
                with view[:size] as part:
                    os.preadv(files[shard], [part], at)

    begin = time.perf_counter()
    threads = [threading.Thread(target=lane) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for file in files:
        os.close(file)
    return time.perf_counter() - begin


def run(way: str, n: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One way in a process of its own, under the limit if it is to feel one."""
    job = {"way": way, "n": n, "model": str(arguments.model)}
    job |= {name: getattr(arguments, name) for name in ("cache_mib", "lanes", "rest")}
    file_cache.drop(open_gguf(arguments.model).paths)
    share = Share()
    with contextlib.ExitStack() as stack:
        group = None
        if way in LIMITED:
            group = stack.enter_context(memory_cgroup(int(arguments.limit_mib * 2**20)))
        child = stack.enter_context(
            subprocess.Popen(
                [sys.executable, __file__, "--child", str(arguments.model)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        if group:
            group.add(child.pid)
        said, _ = child.communicate(json.dumps(job) + "\n", timeout=600)
    if child.returncode:
        sys.exit(f"{way} at {n} tokens ended with code {child.returncode}")
    others, _ = share.taken_pct() or (None, 0.0)
    found = {"way": way, "n": n, "others_pct": round(others or 0), **json.loads(said)}
    shown = {key: value for key, value in found.items() if key != "hash"}
    sys.stderr.write(json.dumps(shown) + "\n")
    return found


def table(rows: list[dict[str, Any]], n: int, place: int) -> dict[str, Any]:
    """Medians of one length; place 0 is the cold prompt, 1 the warm one."""
    seconds = {way: [row["s"][place] for row in rows if (row["way"], row["n"]) == (way, n)]
               for way in dict.fromkeys(row["way"] for row in rows)}  # fmt: skip
    result: dict[str, Any] = {f"{way}_s": round(median(of), 2) for way, of in seconds.items()}
    if {"compute", "read"} <= seconds.keys():
        limits = [max(pair) for pair in zip(seconds["compute"], seconds["read"], strict=True)]
        for way in LIMITED:
            if way in seconds:
                ratios = [a / b for a, b in zip(seconds[way], limits, strict=True)]
                result[f"{way}_over_limit"] = round(median(ratios), 2)
    return result


def main() -> None:
    """Measure, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit-mib", type=float, default=1600)
    parser.add_argument("--cache-mib", type=float, default=1150)
    parser.add_argument("--lengths", default="16,32,64,128,256,512")
    parser.add_argument("--ways", default=",".join(way for way in WAYS if way != "mmap-random"))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--rest", type=float, default=3, help="seconds before a prompt")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        sys.stdout.write(json.dumps(measure(json.loads(sys.stdin.readline()))) + "\n")
        return
    lengths = [int(n) for n in arguments.lengths.split(",")]
    ways = arguments.ways.split(",")
    rows = []
    for number in range(arguments.rounds):
        for n in lengths:
            turns = random.Random(number * 1000 + n).sample(ways, len(ways))
            rows += [run(way, n, arguments) for way in turns]
    figures = {
        n: {
            "cold": table(rows, n, 0),
            "warm": table(rows, n, 1),
            "same_logits": len({str(r["hash"]) for r in rows if r["n"] == n and "hash" in r}) == 1,
            "others_pct": max(row["others_pct"] for row in rows if row["n"] == n),
        }
        for n in lengths
    }
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
