"""What a streamed session may use, and what the kernel says that it used: a child in a cgroup.

    python tests/memory_bound.py MODEL --cache-mib 1150 --prefill layers --overlap pipeline

The bound is the sum that a person would budget for: dense weights, the expert budget, KV cache and
compute buffers as llama.cpp itself counts them, and 64 MiB for all else. A budget below one whole
layer counts as that layer: a wide batch of a prompt needs all its experts at once. The child's
cgroup gets exactly that as its limit, once Python and llama.cpp are loaded, so anonymous memory
above it ends the child: that is the kernel's word. Page cache counts in a cgroup as well but gives
way first, so the peak that is compared is the growth of VmHWM, which is anonymous memory plus
mapped pages, from just before the session opens; clear_refs resets it there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.bench.cgroup import memory_cgroup
from labkit.gguf_map import open_gguf
from labkit.runtime import Session, ggml
from labkit.runtime.memory import process_memory
from labkit.sheet.ask import ask_llama
from labkit.sheet.cache_rows import CacheOptions

MIB = 2**20
REST = 64 * MIB
N_CTX, N_UBATCH = 512, 128
PROMPT = [(37 * i + 11) % 200 for i in range(N_UBATCH + N_UBATCH // 2)]  # two graphs


@dataclass(frozen=True)
class Bound:
    """Bytes by what they are for."""

    dense: int
    experts: int
    kv: int
    compute: int
    rest: int = REST

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts + self.kv + self.compute + self.rest


@dataclass(frozen=True)
class Measured:
    """How a child fared.

    Attributes:
        peak: growth of VmHWM in bytes, None if the child did not live to tell.
        charged: the most that its cgroup was charged, page cache included.
        oom_kills: how often the kernel ended it.
        hash: of its logits.
        paths: which its last prompt took.
        words: the end of its stderr, if it failed.
    """

    peak: int | None
    charged: int | None
    oom_kills: int
    hash: str | None = None
    paths: tuple[str, ...] = ()
    words: str = ""


def bound(model: Path, cache_bytes: int) -> Bound:
    """What a session with this budget may use."""
    gguf = open_gguf(model)
    said = ask_llama(gguf, CacheOptions(n_ctx=N_CTX, n_ubatch=N_UBATCH, swa_full=True))
    layer = max(gguf.n_expert * gguf.entry_bytes(layer) for layer in gguf.moe_layers)
    return Bound(gguf.dense_bytes, max(cache_bytes, layer), said.kv_bytes, said.compute_bytes)


def run(model: Path, limit: int, **options: Any) -> Measured:
    """Two prompts and some tokens in a child whose memory is limited; options are a session's."""
    job = json.dumps({"model": str(model), "options": options})
    with (
        memory_cgroup(limit) as group,
        subprocess.Popen(
            [sys.executable, __file__, "--child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as child,
    ):  # fmt: skip
        assert child.stdin
        assert child.stdout
        child.stdout.readline()  # everything is imported
        group.add(child.pid)
        said, words = child.communicate(job + "\n", timeout=300)
        peak, kills = group.peak_bytes(), group.oom_kills()
    if child.returncode:
        return Measured(None, peak, kills, words=words[-2000:])
    answer = json.loads(said)
    return Measured(answer["peak"], peak, kills, answer["hash"], tuple(answer["paths"]))


def two_prompts(session: Session) -> str:
    """Prefill and decode twice; a hash of all logits."""
    found = [session.generate(prompt, 8, hash_logits=True) for prompt in (PROMPT, PROMPT[:70])]
    return "".join(str(one.logits_sha256) for one in found)


def _child() -> None:
    warnings.simplefilter("ignore")
    ggml.llama()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    job = json.loads(sys.stdin.readline())
    Path("/proc/self/clear_refs").write_text("5")
    before = process_memory()["rss"] or 0
    options = {"trial": False, "n_ctx": N_CTX, "n_ubatch": N_UBATCH, **job["options"]}
    with Session(job["model"], **options) as session:
        digest = two_prompts(session)
        paths = sorted({step.path for step in session.prefill_steps})
    peak = (process_memory()["peak_rss"] or 0) - before
    answer = {"peak": peak, "hash": digest, "paths": paths}
    sys.stdout.write(json.dumps(answer) + "\n")


def main() -> None:
    """Measure one way of running a model, and print it beside its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache-mib", type=float, default=100)
    parser.add_argument("--prefill", default="auto")
    parser.add_argument("--overlap", default="serial")
    parser.add_argument("--dense", default="anonymous")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--prefetch", default=None)
    parser.add_argument("--limit-mib", type=float, help="another limit than the bound")
    arguments = parser.parse_args()
    if arguments.child:
        _child()
        return
    if arguments.model is None:
        parser.error("name a model")
    allowed = bound(arguments.model, int(arguments.cache_mib * MIB))
    limit = int(arguments.limit_mib * MIB) if arguments.limit_mib else allowed.total
    names = ("cache_mib", "prefill", "overlap", "dense", "lanes", "prefetch")
    found = run(arguments.model, limit, **{name: getattr(arguments, name) for name in names})
    parts = {f"{name}_mib": round(value / MIB, 1) for name, value in asdict(allowed).items()}
    figures = {**parts, "bound_mib": round(allowed.total / MIB, 1), **asdict(found)}
    for name in ("peak", "charged"):
        if (value := figures.pop(name)) is not None:
            figures[f"{name}_mib"] = round(value / MIB, 1)
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
