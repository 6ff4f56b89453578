"""Measuring one path in this process: a cold start, then prompts of several lengths, an answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from labkit.prefill_lab.device_model import DeviceModel
from labkit.prefill_lab.paths import DEVICE, PATHS, streams
from labkit.runtime import Session, ggml
from labkit.runtime.metrics_csv import step_table
from labkit.runtime.stock import StockModel
from labkit.runtime.usage import device_read_bytes, peak_resident_bytes, usage

_REPEAT_S = 0.25  # a prompt that takes less is run again: one of a few milliseconds is luck
_MOST_REPEATS = 5


def _nothing() -> None:
    """What happens at a first token, unless somebody wants to look."""


class Runner(Protocol):
    """An open model."""

    def request(
        self, prompt: list[int], outputs: int, at_first_token: Callable[[], None] = ...
    ) -> list[float]:
        """Seconds from the prompt to each token of the answer, the first being the TTFT.

        `at_first_token` is called when it is there; what it takes does not count.
        """
        ...

    def extra(self) -> dict[str, Any]:
        """What only this path can tell about the prompt that it ran last."""
        ...


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Open the model on the job's path and run its prompts, each in a context of its own.

    The job's keys: model, path, prompt (ids of the longest), lengths, outputs (answer tokens after
    the longest), threads, n_ctx, chunk, cache_mib, lanes. The answer's: open_s, first_token_s (from
    before opening to the first token after the longest prompt), `prefills` (a row a length),
    `times` (see `Runner.request`), memory.
    """
    ggml.llama()  # loading the library is nobody's cold start
    small = peak_resident_bytes()
    read, begin = device_read_bytes(), time.perf_counter()
    with _open(job) as runner:
        open_s = time.perf_counter() - begin
        prompt: list[int] = job["prompt"]
        runner.request(prompt, 1)
        first_token_s = time.perf_counter() - begin
        cold_read = _since(read, device_read_bytes())
        rows = []
        for length in job["lengths"]:
            outputs = job["outputs"] if length == max(job["lengths"]) else 1
            rows.append({"tokens": length, **_measured(runner, prompt[:length], outputs)})
        times = rows[-1]["times_s"]
        return {
            "open_s": open_s,
            "first_token_s": first_token_s,
            "cold_storage_bytes": cold_read,
            "prefills": rows,
            "times": times,
            "peak_resident_bytes": (peak := peak_resident_bytes()),
            "grown_bytes": _since(small, peak),
        }


def _measured(runner: Runner, prompt: list[int], outputs: int) -> dict[str, Any]:
    """Figures of a prompt and its answer: of the middle run of up to five, if they are short."""
    found: list[dict[str, Any]] = []
    until = time.perf_counter() + _REPEAT_S
    while not found or (len(found) < _MOST_REPEATS and time.perf_counter() < until):
        found.append(_one(runner, prompt, outputs))
    return sorted(found, key=lambda row: row["ttft_s"])[len(found) // 2]


def _one(runner: Runner, prompt: list[int], outputs: int) -> dict[str, Any]:
    """A request: times of all its tokens, and what was used until the first of them."""
    before, read = usage(), device_read_bytes()
    figures: dict[str, Any] = {}

    def at_first_token() -> None:
        after = usage()
        figures["cpu_s"] = after.cpu_s - before.cpu_s
        figures["major_faults"] = _since(before.major_faults, after.major_faults)
        figures["storage_bytes"] = _since(read, device_read_bytes())

    times = runner.request(prompt, outputs, at_first_token)
    return {"ttft_s": times[0], "times_s": times, **figures, **runner.extra()}


@contextlib.contextmanager
def _open(job: dict[str, Any]) -> Iterator[Runner]:
    path = job["path"]
    common = {"threads": job["threads"], "n_ctx": job["n_ctx"], "n_ubatch": job["chunk"]}
    if streams(path):
        options = {**common, **PATHS[path].options, "cache_mib": job["cache_mib"]}
        # The parent has tried the file; a trial here would be in the figures of sessions alone.
        with Session(job["model"], trial=False, lanes=job["lanes"], **options) as session:
            yield _SessionRunner(session)
        return
    model = (
        DeviceModel(job["model"], path.removeprefix(DEVICE), **common)
        if path.startswith(DEVICE)
        else StockModel(job["model"], PATHS[path].load, **common)  # type: ignore[arg-type]
    )
    with model:
        yield _StockRunner(model)


class _Clock:
    """Times of tokens since it was made, without what `at_first_token` takes."""

    def __init__(self, at_first_token: Callable[[], None]) -> None:
        self.times: list[float] = []
        self._at_first_token = at_first_token
        self._begin = time.perf_counter()

    def token(self) -> None:
        """A token has been chosen."""
        now = time.perf_counter()
        self.times.append(now - self._begin)
        if len(self.times) == 1:
            self._at_first_token()
            self._begin += time.perf_counter() - now


class _StockRunner:
    def __init__(self, model: StockModel) -> None:
        self._model = model

    def request(
        self, prompt: list[int], outputs: int, at_first_token: Callable[[], None] = _nothing
    ) -> list[float]:
        self._model.reset()
        clock = _Clock(at_first_token)
        self._model.prefill(prompt)
        times = clock.times
        while True:
            token = int(self._model.logits().argmax())
            clock.token()
            if len(times) >= outputs:
                return times
            self._model.decode(token)

    def extra(self) -> dict[str, Any]:
        return {}


class _SessionRunner:
    def __init__(self, session: Session) -> None:
        self._session = session
        session.on_logits = self._on_logits
        self._clock = _Clock(_nothing)

    def request(
        self, prompt: list[int], outputs: int, at_first_token: Callable[[], None] = _nothing
    ) -> list[float]:
        self._session.reset()
        self._clock = _Clock(at_first_token)
        for _ in self._session.stream(prompt, outputs - 1):
            pass
        return self._clock.times

    def _on_logits(self, row: np.ndarray) -> None:
        row.argmax()  # what choosing greedily costs the other paths
        self._clock.token()

    def extra(self) -> dict[str, Any]:
        # The tokens of one graph share its figures.
        graphs = step_table(self._session.prefill_steps).groupby("batch").first()
        found: dict[str, Any] = {
            "read_mib": float(graphs["read_mib"].sum()),
            "wait_s": float(graphs["wait_ms"].sum() / 1e3),
            "read_s": float(graphs["read_ms"].sum() / 1e3),
        }
        if set(graphs["path"]) == {"layers"}:
            found["layers"] = self._session.prefill_layers.to_dict("records")
        return found


def _since(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
