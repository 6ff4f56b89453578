"""`run_prefill`: every path in turns, each in a process of its own, over several rounds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from labkit.bench import cgroup, file_cache
from labkit.bundled import BundledDataError, prompts
from labkit.errors import BenchError, OptionError
from labkit.gguf_map import GGUFMap, open_gguf
from labkit.host import usable_memory_bytes
from labkit.prefill_lab.devices import GgmlDevice, ggml_devices
from labkit.prefill_lab.paths import (
    DEFAULT_PATHS,
    DEVICES,
    describe,
    holds_whole_model,
    parse_paths,
    streams,
)
from labkit.prefill_lab.process import ask
from labkit.prefill_lab.result import PrefillResult
from labkit.runtime.arena import N_SLOTS, slot_bytes
from labkit.runtime.budget import default_cache_bytes
from labkit.runtime.trial import trial_load

_MIB = 2**20
_ROOM_MIB = 256
SHORTEST = 8
LONGEST = 2048


@dataclass(frozen=True)
class PrefillPlan:
    """What is measured.

    Attributes:
        model: a GGUF file, any shard, or a directory with one model.
        paths: names of `labkit.prefill_lab.paths`; `devices` stands for all beside the CPU.
        lengths: prompt lengths in tokens.
        outputs: answer lengths after the longest prompt, for the whole request.
        rounds: how often each path runs, in a new process and a cold file each time.
        chunk: prompt tokens of one graph (llama.cpp's ubatch).
        cache_mib: memory for experts of the streamed paths; None is labkit's choice, and at least
            the two layers that the slots take.
        lanes, threads: as for `Session`.
        memory_limit_mib: of a cgroup for each path that need not hold the whole model.
        prompt: a text; None is the bundled prompts, repeated until they are long enough, or
            random ids for a model without a tokenizer.
        seed: of the order of paths, and of random ids.
    """

    model: Path
    paths: Sequence[str] = DEFAULT_PATHS
    lengths: Sequence[int] = (8, 32, 128, 512)
    outputs: Sequence[int] = (1, 16, 64)
    rounds: int = 3
    chunk: int = 512
    cache_mib: float | None = None
    lanes: int = 4
    threads: int | None = None
    memory_limit_mib: float | None = None
    prompt: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values in (("a prompt length", self.lengths), ("an answer", self.outputs)):
            if not values or min(values) < 1:
                raise OptionError(f"{name} is missing or below 1: {list(values)}")
        for name in ("rounds", "chunk", "lanes"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}; it must be 1 or more")

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.lengths)


def ladder(longest: int, shortest: int = SHORTEST) -> list[int]:
    """Prompt lengths from `shortest` up to exactly `longest`, each four times the one before."""
    steps = itertools.takewhile(lambda n: n < longest, (shortest * 4**i for i in itertools.count()))
    return [*steps, longest]


def default_lengths(model: Path, answer: int) -> list[int]:
    """Prompt lengths from 8 to 2048, or as far as the model's context holds them and an answer."""
    most = open_gguf(model).count("context_length") or LONGEST
    longest = max(SHORTEST, min(LONGEST, most - answer))
    return [n for n in (8, 32, 128, 512, 1024) if n < longest] + [longest]


def run_prefill(
    plan: PrefillPlan, on_run: Callable[[dict[str, Any]], None] | None = None
) -> PrefillResult:
    """Measure every path of `plan` in turns; a path that fails has rows that say why.

    `on_run` is called before each process with its round, path and the status "running", and after
    it with its row of `PrefillResult.runs`.

    Raises:
        OptionError: a prompt and answer longer than the model's context, an unknown path.
        ModelFileError, LlamaError: the model cannot be opened.
        BenchError: no cgroup or process can be made.
    """
    gguf = open_gguf(plan.model)
    trial_load(gguf)
    devices = ggml_devices()
    plan = replace(plan, paths=fitting_paths(plan.paths, gguf))
    paths = parse_paths(plan.paths, devices)
    n_ctx = _context(plan, gguf)
    plan = replace(plan, cache_mib=_cache_mib(plan, gguf, paths))
    prompt = prompt_ids(plan, gguf)
    cgroup.remove_stale()
    runs, prefills, requests, layers = [], [], [], []
    for number in range(1, plan.rounds + 1):
        order = list(paths)
        random.Random(plan.seed * 1_000_003 + number).shuffle(order)
        for path in order:
            key = {"round": number, "path": path}
            if on_run:
                on_run({**key, "status": "running"})
            run, answer = _run(plan, path, gguf, prompt, n_ctx)
            runs.append({**key, **run})
            for row in answer.get("prefills", []):
                row.pop("times_s")
                for layer in row.pop("layers", []):
                    layers.append({**key, "tokens": row["tokens"], **layer})
                prefills.append({**key, **row})
            times = answer.get("times", [])
            requests += [
                {**key, "tokens": plan.longest, "outputs": n, "request_s": times[n - 1]}
                for n in sorted(set(plan.outputs))
                if n <= len(times)
            ]
            if on_run:
                on_run(runs[-1])
    facts = {
        "model": str(gguf.paths[0]),
        "architecture": gguf.architecture,
        "model_mib": gguf.nbytes / _MIB,
        "expert_mib": gguf.expert_bytes / _MIB,
        "paths": {path: describe(path) for path in paths},
        "devices": [{"name": d.name, "backend": d.backend, "kind": d.kind} for d in devices],
        "chunk": plan.chunk,
        "cache_mib": plan.cache_mib,
        "rounds": plan.rounds,
        "memory_limit_mib": plan.memory_limit_mib,
        "notes": _notes(plan, gguf, paths, devices),
    }
    return PrefillResult.of(facts, runs, prefills, requests, layers)


def _run(
    plan: PrefillPlan, path: str, gguf: GGUFMap, prompt: list[int], n_ctx: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One process: its row for the table of runs, and its answer."""
    whole = holds_whole_model(path)
    need = gguf.nbytes + _ROOM_MIB * _MIB
    if whole and need > usable_memory_bytes():
        reason = f"the model needs {need / _MIB:,.0f} MiB of memory, which is not free here"
        return {"status": "left out", "reason": reason}, {}
    limit = None if whole else plan.memory_limit_mib
    file_cache.drop(gguf.paths)
    cached = file_cache.cached_pct(gguf.paths)
    job = {
        "model": str(gguf.paths[0]),
        "path": path,
        "prompt": prompt,
        "lengths": sorted(set(plan.lengths)),
        "outputs": max(plan.outputs),
        "threads": plan.threads,
        "n_ctx": n_ctx,
        "chunk": plan.chunk,
        "cache_mib": plan.cache_mib,
        "lanes": plan.lanes,
    }
    answer = ask(job, limit_mib=limit)
    if not answer["ok"]:
        return {"status": "failed", "reason": answer["reason"], "limit_mib": limit}, {}
    return {
        "status": "ok",
        "reason": None,
        "limit_mib": limit,
        "cached_pct": cached,
        "open_s": answer["open_s"],
        "first_token_s": answer["first_token_s"],
        "cold_storage_mib": _mib(answer["cold_storage_bytes"]),
        "peak_rss_mib": _mib(answer["peak_resident_bytes"]),
        "grown_mib": _mib(answer["grown_bytes"]),
        "cgroup_peak_mib": _mib(answer.get("cgroup_peak_bytes")),
    }, answer


def _cache_mib(plan: PrefillPlan, gguf: GGUFMap, paths: list[str]) -> float | None:
    """The same for all streamed paths, so that they are compared at equal memory."""
    if not any(map(streams, paths)):
        return plan.cache_mib
    gguf.require_streamable()
    if plan.cache_mib is not None:
        return plan.cache_mib
    slots = N_SLOTS * slot_bytes([gguf.layer_tensors(layer) for layer in gguf.moe_layers])
    return max(default_cache_bytes(gguf), slots) / _MIB


def _context(plan: PrefillPlan, gguf: GGUFMap) -> int:
    need = plan.longest + max(plan.outputs)
    most = gguf.count("context_length")
    if most and need > most:
        raise OptionError(
            f"{gguf.paths[0]}: a prompt of {plan.longest} tokens and an answer of "
            f"{max(plan.outputs)} are longer than the model's context of {most}. Give fewer tokens."
        )
    rounded = -(-need // 256) * 256
    return min(rounded, most) if most else rounded


def prompt_ids(plan: PrefillPlan, gguf: GGUFMap) -> list[int]:
    """Token ids of the longest prompt; shorter ones are its beginnings.

    Raises:
        OptionError: a text for a model without a tokenizer.
        BenchError: the text cannot be turned into tokens.
    """
    if not gguf.has_tokenizer:
        if plan.prompt is not None:
            raise OptionError(f"{gguf.paths[0]} has no tokenizer, so it cannot read a text")
        vocabulary = gguf.tensor("token_embd.weight").shape[1]
        picker = random.Random(plan.seed)
        return [picker.randrange(vocabulary) for _ in range(plan.longest)]
    answer = ask({"model": str(gguf.paths[0]), "text": plan.prompt or _bundled_text()})
    if not answer["ok"]:
        raise BenchError(f"the prompt cannot be turned into tokens: {answer['reason']}")
    found: list[int] = answer["prompt"]
    return list(itertools.islice(itertools.cycle(found), plan.longest))


def _bundled_text() -> str:
    try:
        return "\n\n".join(text for domain in prompts().values() for text in domain)
    except BundledDataError:
        return "In the beginning there was a prompt, and the prompt was long, and it was read."


def fitting_paths(paths: Sequence[str], gguf: GGUFMap) -> Sequence[str]:
    """The paths that were asked for; of the default ones those that a dense model can take."""
    if tuple(paths) != DEFAULT_PATHS or gguf.expert_tensors:
        return paths
    return [path for path in paths if path == DEVICES or not streams(path)]


def _notes(
    plan: PrefillPlan, gguf: GGUFMap, paths: list[str], devices: list[GgmlDevice]
) -> list[str]:
    notes = []
    if not gguf.expert_tensors:
        notes.append("A dense model: there are no experts to stream, so no streamed path.")
    if not [device for device in devices if not device.is_cpu]:
        notes.append(
            "llama.cpp reports no device besides the CPU here, so no accelerator was measured. "
            "Built with a backend (Hexagon, OpenCL, Vulkan, CUDA, Metal), its devices take part "
            "under their names."
        )
    if plan.memory_limit_mib and (free := [p for p in paths if holds_whole_model(p)]):
        notes.append(f"No memory limit was put on {', '.join(free)}: they hold the whole model.")
    return notes


def _mib(nbytes: float | None) -> float | None:
    return None if nbytes is None else nbytes / _MIB
