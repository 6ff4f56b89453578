"""Measuring one case in this process: cold start, then tokens, their time and their logits."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol, cast

import numpy as np

from labkit.bench.cases import KINDS, Case
from labkit.errors import BenchError, LlamaError
from labkit.gguf_map import open_gguf
from labkit.runtime import Session, TokenStep, ggml, llama_log
from labkit.runtime.metrics_csv import step_table
from labkit.runtime.native import NativeModel
from labkit.runtime.stock import StockModel
from labkit.runtime.text import Tokenizer
from labkit.runtime.usage import device_read_bytes, peak_resident_bytes, usage

_MOST_TURNS = 4
_RANDOM_PROMPT = 24


class Runner(Protocol):
    """A model that is open and can be fed."""

    def prefill(self, prompt: list[int]) -> None:
        """Run a prompt, so that the first token can be chosen."""
        ...

    def decode(self, n: int, forced: list[int] | None) -> Iterator[dict[str, Any]]:
        """Yield the row of each of at most n tokens, chosen by the model or those of `forced`."""
        ...

    def notes(self) -> dict[str, Any]:
        """What only the open model knows: resolved budget, overlap, how it reads."""
        ...


@dataclass
class Digests:
    """A running sha256 over every logits row: where two runs part shows in the first that differs.

    Attributes:
        values: a hex digest for each row so far, over that row and all before it.
    """

    values: list[str] = field(default_factory=list)
    _sum: Any = field(default_factory=hashlib.sha256)

    def add(self, row: np.ndarray) -> None:
        """Take the next (n_vocab,) row."""
        self._sum.update(row.tobytes())
        self.values.append(self._sum.hexdigest())


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Open the model as the job's case says, run it, and return every figure.

    The job's keys: model, case, prompt, n, warmup, seconds, turns (None, or the tokens to feed),
    threads, n_ctx, n_ubatch, temperature, seed. The answer's: open_s, prefill_s, first_token_s
    (open to the first token chosen), what loading read and faulted, `tokens` (a row each),
    `turns`, `digests`, memory.
    """
    ggml.llama()  # loading the library is nobody's cold start
    case = Case(**job["case"])
    digests = Digests()
    before, read_before, begin = usage(), device_read_bytes(), time.perf_counter()
    with _open(case, job, digests) as runner:
        open_s = time.perf_counter() - begin
        open_read = _since(read_before, device_read_bytes())
        runner.prefill(job["prompt"])
        first_token_s = time.perf_counter() - begin
        loaded = usage()
        figures: dict[str, Any] = {
            "open_s": open_s,
            "prefill_s": first_token_s - open_s,
            "first_token_s": first_token_s,
            "open_read_bytes": open_read,
            "load_read_bytes": _since(read_before, device_read_bytes()),
            "load_major_faults": _since(before.major_faults, loaded.major_faults),
        }
        read_before = device_read_bytes()
        rows, turns = _decode(runner, job)
        figures |= {
            "decode_device_read_bytes": _since(read_before, device_read_bytes()),
            "peak_resident_bytes": peak_resident_bytes(),
            **runner.notes(),
        }
    return {**figures, "tokens": rows, "turns": turns, "digests": digests.values}


def prompt_tokens(model: str, text: str | None, seed: int) -> list[int]:
    """Token ids of a text by the model's vocabulary, which is loaded without its weights.

    Without a text, a prompt of random ids.
    """
    gguf, llama = open_gguf(model), ggml.llama()
    params = llama.llama_model_default_params()
    params.vocab_only, params.n_gpu_layers = True, 0
    llama_log.forget()
    loaded = llama.llama_model_load_from_file(os.fsencode(gguf.paths[0]), params)
    if not loaded:
        raise LlamaError(f"{model}: llama.cpp cannot read its vocabulary: {llama_log.reason()}")
    vocab = llama.llama_model_get_vocab(loaded)
    n_vocab = llama.llama_vocab_n_tokens(vocab)
    try:
        if text is None:
            return np.random.default_rng(seed).integers(n_vocab, size=_RANDOM_PROMPT).tolist()
        known = SimpleNamespace(vocab=vocab, n_vocab=n_vocab, n_ctx=4096)
        return Tokenizer(cast(NativeModel, known), gguf.has_tokenizer).encode(text, start=True)
    finally:
        llama.llama_model_free(loaded)


def _decode(runner: Runner, job: dict[str, Any]) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Rows of warm-up and measured tokens, and the tokens of each turn.

    A model may end its text early; the prompt is then given again. When the time is up it stops,
    but not before one measured token.
    """
    until = time.monotonic() + job["seconds"]
    script: list[list[int]] | None = job["turns"]
    rows: list[dict[str, Any]] = []
    turns: list[list[int]] = []
    total = job["warmup"] + job["n"]
    while len(rows) < total and len(turns) < (len(script) if script else _MOST_TURNS):
        if turns:
            runner.prefill(job["prompt"])
        turns.append([])
        forced = script[len(turns) - 1] if script else None
        for row in runner.decode(total - len(rows), forced):
            turns[-1].append(row["token"])
            rows.append({"index": len(rows), "warmup": len(rows) < job["warmup"], **row})
            if time.monotonic() > until and len(rows) > job["warmup"]:
                return rows, turns
    if len(rows) <= job["warmup"]:
        raise BenchError(
            f"The model ended its text after {len(rows)} tokens, before the warm-up of "
            f"{job['warmup']} was over. Give another prompt or a smaller --warmup."
        )
    return rows, turns


@contextlib.contextmanager
def _open(case: Case, job: dict[str, Any], digests: Digests) -> Iterator[Runner]:
    kind = KINDS[case.kind]
    common = {"threads": job["threads"], "n_ctx": job["n_ctx"], "n_ubatch": job["n_ubatch"]}
    if kind.stock:
        with StockModel(job["model"], **kind.fixed, **common) as model:
            yield _StockRunner(model, digests)
        return
    options = {**common, **kind.fixed, **case.options}
    if case.streams:
        options["cache_mib"] = case.cache_mib
    # The parent has tried the file; a trial here would be in the figures of sessions alone.
    options |= {"temperature": job["temperature"], "seed": job["seed"]}
    with Session(job["model"], trial=False, on_logits=digests.add, **options) as session:
        yield _SessionRunner(session)


class _StockRunner:
    def __init__(self, model: StockModel, digests: Digests) -> None:
        self._model = model
        self._digests = digests

    def prefill(self, prompt: list[int]) -> None:
        self._model.prefill(prompt)
        self._digests.add(self._model.logits())

    def decode(self, n: int, forced: list[int] | None) -> Iterator[dict[str, Any]]:
        for index in range(n if forced is None else min(n, len(forced))):
            token = int(self._model.logits().argmax()) if forced is None else forced[index]
            before = usage()
            wall_s = self._model.decode(token)
            after = usage()
            self._digests.add(self._model.logits())
            yield {
                "token": token,
                "wall_ms": 1e3 * wall_s,
                "cpu_ms": 1e3 * (after.cpu_s - before.cpu_s),
                "major_faults": _since(before.major_faults, after.major_faults),
                "energy_j": _since(before.energy_j, after.energy_j),
            }

    def notes(self) -> dict[str, Any]:
        return {}


class _SessionRunner:
    def __init__(self, session: Session) -> None:
        self._session = session

    def prefill(self, prompt: list[int]) -> None:
        for _ in self._session.stream(prompt, 0):
            pass

    def decode(self, n: int, forced: list[int] | None) -> Iterator[dict[str, Any]]:
        # Same logits and same seed give the same tokens, so `forced` needs no forcing here.
        limit = n if forced is None else min(n, len(forced))
        for step in self._session.stream([], limit):
            yield _row(step)

    def notes(self) -> dict[str, Any]:
        session = self._session
        cache = session.cache_bytes
        return {
            "cache_mib": None if cache is None else cache / 2**20,
            "expert_resident_bytes": session.resident_expert_bytes,
            "reads": session.reader_note,
            "overlap": session.overlap if cache is not None else None,
            "overlap_note": session.overlap_note if cache is not None else None,
        }


def _row(step: TokenStep) -> dict[str, Any]:
    """The step's figures as plain values; None for what was not measured."""
    table = step_table([step]).drop(columns=["position", "phase", "text", "batch", "batch_tokens"])
    row = table.astype(object).where(table.notna(), None).iloc[0]
    return {str(name): getattr(value, "item", lambda v=value: v)() for name, value in row.items()}


def _since(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
