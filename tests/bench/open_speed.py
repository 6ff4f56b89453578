"""Opening a big model: `open_gguf` against `gguf.GGUFReader` on the same five sparse files, 60 GB.

    python tests/bench/open_speed.py [--rounds 5] [--directory DIR]

The files hold a real header (150,000 tokens with scores, types and 150,000 merges; 48 layers of 128
experts) and holes in place of weights, so they take some 6 MB of disk. The two readers take turns
in one process, warm; peak memory is that of a fresh process that only opens the model. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gguf import GGUFReader

sys.path.insert(0, str(Path(__file__).parent.parent))

from gguf_bytes import (
    ARRAY,
    BLOCKS,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    GGUFDoc,
    Key,
    Tensor,
    padded,
    split,
)

from labkit.gguf_map import open_gguf

N_VOCAB, N_LAYERS, N_EXPERT, D_MODEL, D_FF, SHARDS = 150_000, 48, 128, 4096, 1440, 5
Q4_0, F32 = 2, 0
_PEAK = """
import sys
from labkit.gguf_map import open_gguf
gguf = open_gguf(sys.argv[1])
assert len(gguf.expert(47, 127)) == 3
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
sys.stdout.write(status["VmHWM"].split()[0])
"""


def document() -> GGUFDoc:
    """The model's metadata and tensors, without data."""
    arch = "qwen3moe"
    keys = [
        Key("general.architecture", STRING, arch),
        Key(f"{arch}.block_count", UINT32, N_LAYERS),
        Key(f"{arch}.expert_count", UINT32, N_EXPERT),
        Key(f"{arch}.expert_used_count", UINT32, 8),
        Key("tokenizer.ggml.model", STRING, "gpt2"),
        Key("tokenizer.ggml.tokens", ARRAY, [f"token{i:x}" for i in range(N_VOCAB)], STRING),
        Key("tokenizer.ggml.scores", ARRAY, [0.0] * N_VOCAB, FLOAT32),
        Key("tokenizer.ggml.token_type", ARRAY, [1] * N_VOCAB, INT32),
        Key("tokenizer.ggml.merges", ARRAY, [f"a{i:x} b" for i in range(N_VOCAB)], STRING),
    ]
    tensors: list[tuple[str, tuple[int, ...], int]] = [
        ("token_embd.weight", (D_MODEL, N_VOCAB), Q4_0)
    ]
    for il in range(N_LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors.append((f"blk.{il}.{name}.weight", (D_MODEL, D_MODEL), Q4_0))
        for name in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            tensors.append((f"blk.{il}.{name}.weight", (D_MODEL,), F32))
        tensors.append((f"blk.{il}.ffn_gate_inp.weight", (D_MODEL, N_EXPERT), F32))
        for name, shape in (
            ("ffn_gate_exps", (D_MODEL, D_FF, N_EXPERT)),
            ("ffn_up_exps", (D_MODEL, D_FF, N_EXPERT)),
            ("ffn_down_exps", (D_FF, D_MODEL, N_EXPERT)),
        ):
            tensors.append((f"blk.{il}.{name}.weight", shape, Q4_0))
    return GGUFDoc(keys, [Tensor(*t) for t in tensors])


def write_sparse(doc: GGUFDoc, path: Path) -> int:
    """Write the header and a hole for the data; return the file's length in bytes."""
    header = doc.header()
    path.write_bytes(header)
    size = padded(len(header), 32) + sum(padded(t.nbytes, 32) for t in doc.tensors)
    os.truncate(path, size)
    return size


def read_with_gguf(paths: list[Path]) -> int:
    """Open all files with the gguf package's reader and count the tensors."""
    return sum(len(GGUFReader(path).tensors) for path in paths)


def timed(work: Callable[[], int], expected: int) -> tuple[float, float]:
    """Wall and CPU seconds of one call, whose result must be what is expected."""
    wall, cpu = time.perf_counter(), time.process_time()
    assert work() == expected
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Make the files, let the readers take turns, print the figures."""
    parser = argparse.ArgumentParser(description="open_gguf against gguf.GGUFReader")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    assert BLOCKS[Q4_0] == (32, 18)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        doc = document()
        whole = len(doc.tensors)
        counts = [whole // SHARDS] * (SHARDS - 1) + [whole - whole // SHARDS * (SHARDS - 1)]
        paths = [Path(folder) / f"big-{i:05d}-of-{SHARDS:05d}.gguf" for i in range(1, SHARDS + 1)]
        sizes = [
            write_sparse(replace(d), p) for d, p in zip(split(doc, counts), paths, strict=True)
        ]
        ours: list[tuple[float, float]] = []
        theirs: list[tuple[float, float]] = []
        for _ in range(options.rounds):
            ours.append(timed(lambda: len(open_gguf(folder).tensors), whole))
            theirs.append(timed(lambda: read_with_gguf(paths), whole))
        peak = subprocess.run(
            [sys.executable, "-c", _PEAK, folder], capture_output=True, text=True, check=True
        )
        disk = sum(p.stat().st_blocks * 512 for p in paths)
    wall = [t[0] / o[0] for t, o in zip(theirs, ours, strict=True)]
    result = {
        "model_gb": round(sum(sizes) / 1e9, 1),
        "on_disk_mb": round(disk / 1e6, 1),
        "tensors": whole,
        "rounds": options.rounds,
        "open_gguf_s": round(statistics.median(o[0] for o in ours), 3),
        "open_gguf_cpu_s": round(statistics.median(o[1] for o in ours), 3),
        "gguf_reader_s": round(statistics.median(t[0] for t in theirs), 3),
        "gguf_reader_cpu_s": round(statistics.median(t[1] for t in theirs), 3),
        "ratio_median": round(statistics.median(wall), 1),
        "ratio_worst": round(min(wall), 1),
        "open_gguf_peak_mib": round(int(peak.stdout) / 1024, 1),
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
