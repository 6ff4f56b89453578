"""`run_bench`: rounds of cases that take turns, each in a process and a cgroup of its own."""

from __future__ import annotations

import contextlib
import json
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from labkit.bench import cgroup, file_cache
from labkit.bench.cases import Case, default_cases, parse_cases
from labkit.bench.conditions import Share, Watch
from labkit.bench.result import BenchResult
from labkit.errors import BenchError, OptionError
from labkit.gguf_map import GGUFMap, open_gguf
from labkit.host import usable_memory_bytes
from labkit.runtime import ggml
from labkit.runtime.trial import trial_load

MIB = 2**20
_DEFAULT_TEXT = "And it came to pass, when he had made an end of speaking"


@dataclass(frozen=True)
class Plan:
    """What a benchmark runs.

    Attributes:
        model: a GGUF file, any shard, or a directory with one model.
        cases: what takes turns.
        rounds: how often each case runs, in a new process each time.
        n: tokens measured in a run, after `warmup` tokens that fill the cache.
        seconds: time for the tokens of one run; what is over by then is what is measured.
        prompt: a text or token ids; None is a sentence, or random ids without a tokenizer.
        memory_limit_mib: of a cgroup for each run that need not hold the whole model; None: none.
        threads, n_ubatch: as for `Session`.
        temperature, seed: of the sampling, and of the order of cases. A model with random
            weights soon repeats itself at temperature 0, and a cache of experts then looks good.
        baseline: name of the case that the others are compared with; None is the first of mmap,
            resident, and whatever comes first.
    """

    model: Path
    cases: tuple[Case, ...]
    rounds: int = 5
    n: int = 32
    warmup: int = 8
    seconds: float = 60.0
    prompt: str | Sequence[int] | None = None
    memory_limit_mib: float | None = None
    threads: int | None = None
    n_ubatch: int = 512
    temperature: float = 0.8
    seed: int = 0
    baseline: str | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("rounds", self.rounds, 1), ("n", self.n, 1),
                                   ("warmup", self.warmup, 0)):  # fmt: skip
            if value < least:
                raise OptionError(f"{name} is {value}; it must be {least} or more")
        if not self.seconds > 0:
            raise OptionError(f"seconds is {self.seconds}; a run needs some time")
        names = [case.name for case in self.cases]
        if not names:
            raise OptionError("a benchmark needs at least one case")
        if self.baseline is not None and self.baseline not in names:
            raise OptionError(f"the baseline {self.baseline!r} is none of {', '.join(names)}")

    @property
    def base(self) -> str:
        """The name of the case that others are compared with."""
        names = [case.name for case in self.cases]
        return self.baseline or next((n for n in ("mmap", "resident") if n in names), names[0])


@dataclass(frozen=True)
class Event:
    """A run that just ended, for whoever shows progress."""

    round: int
    rounds: int
    case: str
    run: dict[str, Any]


@dataclass
class _State:
    """What the runs so far have settled for those after them."""

    prompt: list[int]
    n_ctx: int
    turns: list[list[int]] | None = None
    greedy: bool = False  # the tokens are the most likely ones, for a stock case chose them
    runs: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)


def run_bench(
    plan: Plan,
    on_run: Callable[[Event], None] | None = None,
    on_round: Callable[[BenchResult], None] | None = None,
    *,
    earlier: BenchResult | None = None,
) -> BenchResult:
    """Measure every case of `plan` in turns.

    Args:
        plan: what to run.
        on_run: called after each run.
        on_round: called with all there is after each round, to save it against a later stop.
        earlier: a result of the same plan; the new rounds come after its own.

    Returns:
        the runs and their tokens. A case that fails, for example because the limit is too small
        for it, has rows that say so; the others go on.

    Raises:
        BenchError: a cgroup cannot be made, the worker cannot be started, or `earlier` is of
            another plan or model.
        ModelFileError: the model cannot be opened.
        KeyboardInterrupt: stopped; the process that was running is ended, its cgroup removed.
    """
    gguf = open_gguf(plan.model)
    trial_load(gguf)
    cgroup.remove_stale()
    watch = Watch(gguf, limited=plan.memory_limit_mib is not None)
    facts = _facts(plan, gguf)
    state = _begin(plan, gguf, earlier, facts)
    notes = list(earlier.facts["notes"]) if earlier else []
    first = 1 + max((run["round"] for run in state.runs), default=0)
    last = first + plan.rounds - 1
    result = BenchResult.of(facts, state.runs, state.tokens)
    for number in range(first, last + 1):
        for place, case in enumerate(_order(plan, number, state)):
            share = Share()
            run, tokens = _run_case(plan, case, gguf, state)
            others, _ = share.taken_pct() or (None, 0.0)
            run = {"round": number, "place": place, "others_pct": others, **run}
            state.runs.append(run)
            state.tokens += [{"round": number, "case": case.name, **row} for row in tokens]
            watch.add(run)
            if on_run:
                on_run(Event(number, last, case.name, run))
        facts |= {"notes": list(dict.fromkeys(notes + watch.notes())), "turns": state.turns}
        facts["greedy"] = state.greedy
        result = BenchResult.of(facts, state.runs, state.tokens)
        if on_round:
            on_round(result)
    return result


def _begin(plan: Plan, gguf: GGUFMap, earlier: BenchResult | None, facts: dict[str, Any]) -> _State:
    if earlier is not None:
        for key, value in facts.items():
            if json.loads(json.dumps(value)) != earlier.facts.get(key):
                raise BenchError(
                    f"The earlier benchmark differs: its {key} is {earlier.facts.get(key)!r}, "
                    f"now it is {value!r}. Give the same options, or another directory."
                )
        prompt = earlier.facts["prompt_tokens"]
        state = _State(prompt, _context(plan, prompt), earlier.facts["turns"])
        state.greedy = bool(earlier.facts.get("greedy"))
        state.runs, state.tokens = earlier.records()
    else:
        prompt = _prompt_tokens(plan, gguf)
        state = _State(prompt, _context(plan, prompt))
    facts["prompt_tokens"] = state.prompt
    return state


def _run_case(
    plan: Plan, case: Case, gguf: GGUFMap, state: _State
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One process: its row for the table of runs, and the rows of its tokens."""
    limited = plan.memory_limit_mib is not None and not case.about.whole
    run: dict[str, Any] = {
        "case": case.name,
        "kind": case.kind,
        "limit_mib": plan.memory_limit_mib if limited else None,
        "cache_mib": None,
        "status": "ok",
        "reason": None,
    }
    need = gguf.nbytes + 256 * MIB
    if case.about.whole and need > usable_memory_bytes():
        reason = f"the model needs {need / MIB:.0f} MiB of memory, which is not free here"
        return {**run, "status": "left out", "reason": reason}, []
    file_cache.drop(gguf.paths)
    run["cached_pct"] = file_cache.cached_pct(gguf.paths)
    job = {
        "case": case.to_json(), "model": str(gguf.paths[0]), "prompt": state.prompt,
        "n": plan.n, "warmup": plan.warmup, "seconds": plan.seconds, "turns": state.turns,
        "threads": plan.threads, "n_ctx": state.n_ctx, "n_ubatch": plan.n_ubatch,
        "temperature": 0.0 if state.greedy else plan.temperature, "seed": plan.seed,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        group = None
        if limited and plan.memory_limit_mib is not None:
            limit = int(plan.memory_limit_mib * MIB)
            group = stack.enter_context(cgroup.memory_cgroup(limit))
        answer = _ask_worker(job, group)
        if group:
            run["cgroup_peak_mib"] = _mib(group.peak_bytes())
            run["swap_note"] = group.swap_note or None
            if not answer["ok"] and group.oom_kills():
                answer = {"ok": False, "kind": "out of memory", "reason":
                          f"the limit of {plan.memory_limit_mib:,.0f} MiB is too small for it: "
                          "the system ended the process"}  # fmt: skip
    if not answer["ok"]:
        status = "out of memory" if answer["kind"] == "out of memory" else "failed"
        return {**run, "status": status, "reason": answer["reason"]}, []
    if state.turns is None and case.about.exact:
        state.turns, state.greedy = answer["turns"], case.about.stock
    return {**run, **_figures(answer)}, answer["tokens"]


def _figures(answer: dict[str, Any]) -> dict[str, Any]:
    """A worker's answer in the table's units."""
    measured = [row for row in answer["tokens"] if not row["warmup"]]
    seconds = sum(row["wall_ms"] for row in measured) / 1e3
    return {
        "cache_mib": answer.get("cache_mib"),
        "open_s": answer["open_s"],
        "prefill_s": answer["prefill_s"],
        "first_token_s": answer["first_token_s"],
        "open_read_mib": _mib(answer["open_read_bytes"]),
        "load_read_mib": _mib(answer["load_read_bytes"]),
        "load_major_faults": answer["load_major_faults"],
        "n_tokens": len(measured),
        "decode_tok_s": len(measured) / seconds,
        "decode_device_read_mib": _mib(answer["decode_device_read_bytes"]),
        "peak_rss_mib": _mib(answer["peak_resident_bytes"]),
        "expert_resident_mib": _mib(answer.get("expert_resident_bytes")),
        "overlap": answer.get("overlap"),
        "overlap_note": answer.get("overlap_note"),
        "reads": answer.get("reads"),
        "digests": answer["digests"],
    }


def _ask_worker(job: dict[str, Any], group: cgroup.MemoryCgroup | None) -> dict[str, Any]:
    """Start a worker, move it into the cgroup, give it the job, and wait for its answer."""
    with _worker() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if group:
            group.add(process.pid)
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        code = process.wait()
        words = process.stderr.read().strip().splitlines() if process.stderr else []
        # The last line of a traceback is the exception.
        reason = f"the process ended with code {code}" + (f": {words[-1][:300]}" if words else "")
        return {"ok": False, "kind": "ended", "reason": reason}


@contextlib.contextmanager
def _worker() -> Iterator[subprocess.Popen[str]]:
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "labkit.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        raise BenchError(f"No process can be started for a case: {error}") from error
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()


def _order(plan: Plan, number: int, state: _State) -> list[Case]:
    """The cases in an order of this round's own, so that none always comes first or last.

    While nobody knows the tokens, a session comes first: it samples them, the others follow.
    """
    cases = list(plan.cases)
    random.Random(plan.seed * 1_000_003 + number).shuffle(cases)
    if state.turns is None:
        cases.sort(key=lambda case: (not case.about.exact, case.about.stock))
    return cases


def _prompt_tokens(plan: Plan, gguf: GGUFMap) -> list[int]:
    if plan.prompt is not None and not isinstance(plan.prompt, str):
        return list(plan.prompt)
    text = plan.prompt or (_DEFAULT_TEXT if gguf.has_tokenizer else None)
    answer = _ask_worker({"text": text, "model": str(gguf.paths[0]), "seed": plan.seed}, None)
    if not answer["ok"]:
        raise BenchError(f"The prompt cannot be turned into tokens: {answer['reason']}")
    return answer["prompt"]


def _context(plan: Plan, prompt: Sequence[int]) -> int:
    """Room for the tokens, and for the prompt again should the model end its text early."""
    return -(-(plan.warmup + plan.n + 4 * len(prompt)) // 256) * 256


def _facts(plan: Plan, gguf: GGUFMap) -> dict[str, Any]:
    """What has to be the same for two benchmarks to be rounds of one."""
    return {
        "model": str(gguf.paths[0]),
        "model_mib": round(gguf.nbytes / MIB, 3),
        "expert_mib": round(gguf.expert_bytes / MIB, 3),
        "token_cycle_mib": round(gguf.token_cycle_bytes / MIB, 3),
        "architecture": gguf.architecture,
        "cases": [case.to_json() for case in plan.cases],
        "baseline": plan.base,
        "n": plan.n,
        "warmup": plan.warmup,
        "memory_limit_mib": plan.memory_limit_mib,
        "threads": plan.threads,
        "n_ubatch": plan.n_ubatch,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cores": psutil.cpu_count(),
            "memory_mib": round(psutil.virtual_memory().total / MIB),
            "llama_cpp_python": ggml.version(),
        },
    }


def quick_bench(
    model: Path,
    *,
    cache_mib: float | None = None,
    memory_limit_pct: float | None = None,
    rounds: int = 3,
    n: int = 32,
) -> BenchResult:
    """A short benchmark: stock llama.cpp both ways, and every overlap that there is here.

    Args:
        model: as for `Plan`.
        cache_mib: budget for expert weights; None is two token cycles, under which a cache finds
            something, at most half of the experts.
        memory_limit_pct: of a memory cgroup, in percent of the model's bytes; None: no limit.
        rounds, n: as for `Plan`.

    Raises:
        see `run_bench`.
    """
    gguf = open_gguf(model)
    if cache_mib is None:
        cache_mib = min(2 * gguf.token_cycle_bytes, gguf.expert_bytes // 2) / MIB
    limit = None if memory_limit_pct is None else limit_from_pct(model, memory_limit_pct)
    names = [name for name in default_cases(limited=True) if name != "mmap-random"]
    cases = tuple(parse_cases(names, [cache_mib]))
    return run_bench(Plan(model, cases, rounds=rounds, n=n, seconds=20, memory_limit_mib=limit))


def limit_from_pct(model: Path, pct: float) -> float:
    """MiB that are `pct` percent of a model's files."""
    return open_gguf(model).nbytes * pct / 100 / MIB


def _mib(nbytes: float | None) -> float | None:
    return None if nbytes is None else nbytes / MIB
