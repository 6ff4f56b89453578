"""From opening a model to its first token: stock mmap beside streaming, the page cache cold.

    python tests/bench/cold_start.py MODEL --prompts 1,4,24 --rounds 3

Each run is a process of its own, in turns and each round in another order. Before it the file is
dropped from the page cache, and `--touch-gib` of memory are taken and given back: on a virtual
machine memory that was free for a while is the host's, and getting it back takes longer than
reading a fast disk. Without that, whoever runs after the larger one is the faster.

Prints JSON: for each prompt length the medians of seconds for opening and for the prompt, mmap's
time over streaming's (median of the rounds, and each), what streaming read, and whether the logits
were the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import random
import subprocess
import sys
import time
import warnings
from statistics import median
from typing import Any

from labkit.bench import file_cache
from labkit.gguf_map import open_gguf


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Open the model and run the prompt, in this process."""
    from labkit.runtime import Session
    from labkit.runtime.stock import StockModel

    warnings.simplefilter("ignore")
    prompt = [random.Random(1).randrange(100, 2000) for _ in range(job["n"])]
    digests, read_mib = [], None
    begin = time.perf_counter()
    if job["way"] == "mmap":
        with StockModel(job["model"], n_ctx=512) as model:
            opened = time.perf_counter()
            model.prefill(prompt)
            done = time.perf_counter()
            digests.append(model.logits().tobytes())
    else:
        with Session(
            job["model"], cache_mib=job["cache_mib"], n_ctx=512, trial=False,
            on_logits=lambda row: digests.append(row.tobytes()),
        ) as session:  # fmt: skip
            opened = time.perf_counter()
            result = session.generate(prompt, 0)
            done = time.perf_counter()
            read_mib = round(result.prefill_read_bytes / 2**20)
    return {
        "open_s": opened - begin,
        "prompt_s": done - opened,
        "read_mib": read_mib,
        "logits": hashlib.sha256(digests[-1]).hexdigest(),
    }


def touch(gib: float) -> None:
    """Have the machine hold so much free memory."""
    code = f"import mmap; m = mmap.mmap(-1, {int(gib * 2**30)}, flags=34); m.madvise(14)\n"
    code += f"for at in range(0, len(m), {mmap.PAGESIZE}): m[at] = 1"
    subprocess.run([sys.executable, "-c", code], check=True)


def run(way: str, n: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One process."""
    touch(arguments.touch_gib)
    file_cache.drop(open_gguf(arguments.model).paths)
    job = {"way": way, "n": n, "model": arguments.model, "cache_mib": arguments.cache_mib}
    child = subprocess.run(
        [sys.executable, __file__, "--child", arguments.model],
        input=json.dumps(job), capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    found = json.loads(child.stdout)
    sys.stderr.write(f"{way} {n} {found['open_s']:.2f} + {found['prompt_s']:.2f} s\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompts", default="1,4,24")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-mib", type=float, default=1150)
    parser.add_argument("--touch-gib", type=float, default=6)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        sys.stdout.write(json.dumps(measure(json.loads(sys.stdin.readline()))))
        return
    figures = {}
    for n in map(int, arguments.prompts.split(",")):
        rows: dict[str, list[dict]] = {"mmap": [], "stream": []}
        for number in range(arguments.rounds):
            for way in random.Random(number * 1000 + n).sample(list(rows), 2):
                rows[way].append(run(way, n, arguments))
        figures[n] = summary(rows["mmap"], rows["stream"])
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")


def summary(stock: list[dict], streamed: list[dict]) -> dict[str, Any]:
    """Figures of one prompt length."""
    whole = [[row["open_s"] + row["prompt_s"] for row in rows] for rows in (stock, streamed)]
    ratios = [mapped / ours for mapped, ours in zip(*whole, strict=True)]
    return {
        "mmap_s": [round(median(row[part] for row in stock), 2) for part in ("open_s", "prompt_s")],
        "stream_s": [
            round(median(row[part] for row in streamed), 2) for part in ("open_s", "prompt_s")
        ],
        "times": round(median(ratios), 1),
        "rounds": [round(ratio, 1) for ratio in ratios],
        "read_mib": streamed[0]["read_mib"],
        "same_logits": len({row["logits"] for row in stock + streamed}) == 1,
    }


if __name__ == "__main__":
    main()
