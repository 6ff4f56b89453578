"""Short measurements of this machine: memory rate, flash rate, and the rates of llama.cpp.

Each returns numbers; none of them knows of profiles.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

MIB = 2**20
BATCH = 12
"""Reads of one wait, about what a layer asks for."""


class FlashRate(NamedTuple):
    """MiB a second of reads of `read_kib` with `lanes` of them under way."""

    read_kib: int
    lanes: int
    mib_s: float


class ModelRate(NamedTuple):
    """Median seconds of a generated token, and operations a second in a prompt."""

    token_s: float
    prefill_gflop_s: float


def dram_gb_s(threads: int, *, mib: int = 256, repeats: int = 5) -> tuple[float, float]:
    """(read, copied) 1e9 bytes a second with `threads` threads over `mib` in all.

    The best of `repeats`: what disturbs a measurement only makes it slower.
    """
    share = max(1, mib * MIB // threads // 8)
    sources = [np.ones(share, np.uint64) for _ in range(threads)]
    targets = [np.zeros(share, np.uint64) for _ in range(threads)]
    nbytes = share * 8 * threads
    with ThreadPoolExecutor(threads) as pool:

        def seconds(work, *arrays) -> float:
            begin = time.perf_counter()
            list(pool.map(work, *arrays))
            return time.perf_counter() - begin

        # numpy lets other threads run while it works on an array.
        read = min(seconds(np.bitwise_or.reduce, sources) for _ in range(repeats))
        copy = min(seconds(np.copyto, targets, sources) for _ in range(repeats))
    return nbytes / read / 1e9, nbytes / copy / 1e9


def flash_rates(
    path: Path,
    *,
    sizes_kib: Sequence[int] = (128, 512, 1024, 4096),
    lanes: Sequence[int] = (1, 2, 4, 8),
    seconds: float = 0.6,
) -> list[FlashRate] | str:
    """The rate of direct reads at random places of a file, by size and by lanes.

    Sizes are measured with 4 lanes, lanes with 1024 KiB. Reads land in fresh memory, as in a cache
    that gives pages back, and a dozen are waited for together, as a layer does.

    Returns the reason as a text where direct reads cannot be had: through the page cache, a file
    that was just written would be measured from memory.
    """
    from labkit.runtime.direct_io import direct_io_problem

    if problem := direct_io_problem(path):
        return problem
    wanted = dict.fromkeys([(size, 4) for size in sizes_kib] + [(1024, n) for n in lanes])
    room_kib = path.stat().st_size // 1024 // BATCH
    return [
        FlashRate(size, n, _flash_mib_s(path, size, n, seconds))
        for size, n in wanted
        if size <= room_kib
    ]


def _flash_mib_s(path: Path, read_kib: int, lanes: int, seconds: float) -> float:
    from labkit.runtime.memory import PAGE, FileWindow
    from labkit.runtime.reader import FileReader, ReadRequest

    size = read_kib * 1024
    places = list(range(0, path.stat().st_size - size + 1, size))
    order = random.Random(read_kib * lanes)
    window = FileWindow(0, path.stat().st_size)
    reader = FileReader([path], lanes=lanes, direct_io=True)
    done, spent = 0, 0.0
    try:
        while spent < seconds:
            batch = [
                ReadRequest(0, at, at + size, window, "a probe")
                for at in order.sample(places, min(BATCH, len(places)))
            ]
            begin = time.perf_counter()
            done += reader.read(batch)
            spent += time.perf_counter() - begin
            for request in batch:
                stop = min(-(-request.stop // PAGE) * PAGE, window.pages.length)
                window.release(request.start, stop)
    finally:
        reader.close()
        window.close()
    return done / MIB / spent


def model_rate(
    path: Path,
    flop_per_token: float,
    *,
    threads: int | None = None,
    prompt: int = 128,
    seconds: float = 3.0,
) -> ModelRate:
    """How fast stock llama.cpp runs a model that is in memory.

    Args:
        flop_per_token: operations of one token, for the rate of the prompt.
        seconds: for decode; at least 8 tokens, at most what a context of 512 holds.
    """
    from labkit.runtime.stock import StockModel

    with StockModel(path, "resident", threads=threads, n_ctx=512) as model:
        vocabulary = len(model.logits()) if model.n_past else 0
        prompts = []
        for repeat in range(2):
            model.reset()
            ids = _token_ids(prompt, vocabulary or 100, repeat)
            prompts.append(model.prefill(ids))
            vocabulary = len(model.logits())
        spent: list[float] = []
        while model.n_past < model.n_ctx and (len(spent) < 8 or sum(spent) < seconds):
            spent.append(model.decode(int(model.logits().argmax())))
    # The first tokens and the first prompt fill caches.
    return ModelRate(statistics.median(spent[2:]), prompt * flop_per_token / min(prompts) / 1e9)


def _token_ids(n: int, vocabulary: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(vocabulary), k=n)
