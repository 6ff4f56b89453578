"""The two-slot model against labkit's own two-slot prefill, at chunk lengths from read-bound up.

    python tests/bench/pipeline_model.py [MODEL] [--tokens 192] [--chunks 16,32,64,96,192]
        [--unseen 32,96] [--repeats 2] [--cache-mib 200]

Without a MODEL it makes one of 1.3 GiB with random weights (24 layers of 64 experts, top-8, Q4_0)
in a temporary directory. `replayed` gives the model each layer's own times and compares wall time
and exposed wait; `unseen` predicts the chunk lengths of --unseen from the runs with the others. All
chunk lengths take turns in one process. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

from labkit.gguf_map import open_gguf
from labkit.prefill_lab.check import layer_model, prediction_table, replay_table, run_own
from labkit.synth import make_large


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--chunks", default="16,32,64,96,192")
    parser.add_argument("--unseen", default="32,96")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cache-mib", type=float, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = args.model or make_large(
            "qwen3moe",
            Path(directory) / "model.gguf",
            size_gib=1.3,
            layers=24,
            experts=64,
            top_k=8,
            d_model=1024,
            d_ff=512,
            quant="Q4_0",
        )
        answer = compare(model, args)
    json.dump(answer, sys.stdout, indent=2)
    sys.stdout.write("\n")


def compare(model: Path, args: argparse.Namespace) -> dict[str, object]:
    """The tables, and the largest and median error of each."""
    vocabulary = open_gguf(model).tensor("token_embd.weight").shape[1]
    draw = random.Random(0)
    prompt = [draw.randrange(vocabulary) for _ in range(args.tokens)]
    chunks = [int(n) for n in args.chunks.split(",")]
    unseen = {int(n) for n in args.unseen.split(",") if n}
    runs = run_own(
        model,
        prompt,
        chunks=chunks,
        repeats=args.repeats,
        cache_mib=args.cache_mib,
        n_ctx=-(-(args.tokens + 8) // 256) * 256,
    )
    replayed = replay_table(runs)
    seen = [run for run in runs if run.chunk not in unseen]
    answer: dict[str, object] = {"replayed": _summary(replayed)}
    if unseen and seen:
        others = [run for run in runs if run.chunk in unseen]
        answer["unseen"] = _summary(prediction_table(others, layer_model(seen)))
    return answer


def _summary(table):
    error = table["error_pct"].abs()
    return {
        "largest_error_pct": round(float(error.max()), 2),
        "median_error_pct": round(float(error.median()), 2),
        "runs": table.round(4).to_dict("records"),
    }


if __name__ == "__main__":
    main()
