"""Measuring one path in this process: a cold start, then prompts of several lengths, an answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
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


class Runner(Protocol):
    """An open model."""

    def request(self, prompt: list[int], outputs: int) -> list[float]:
        """Seconds from the prompt to each token of the answer, the first being the TTFT."""
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
        times: list[float] = []
        for length in job["lengths"]:
            rows.append({"tokens": length, **_prefill(runner, prompt[:length])})
            if length == max(job["lengths"]):
                times = runner.request(prompt[:length], job["outputs"])
        return {
            "open_s": open_s,
            "first_token_s": first_token_s,
            "cold_storage_bytes": cold_read,
            "prefills": rows,
            "times": times,
            "peak_resident_bytes": (peak := peak_resident_bytes()),
            "grown_bytes": _since(small, peak),
        }


def _prefill(runner: Runner, prompt: list[int]) -> dict[str, Any]:
    """Figures of a prompt: of the middle run of up to five, if they are short."""
    found: list[dict[str, Any]] = []
    until = time.perf_counter() + _REPEAT_S
    while not found or (len(found) < _MOST_REPEATS and time.perf_counter() < until):
        before, read = usage(), device_read_bytes()
        ttft_s = runner.request(prompt, 1)[0]
        after = usage()
        found.append(
            {
                "ttft_s": ttft_s,
                "cpu_s": after.cpu_s - before.cpu_s,
                "major_faults": _since(before.major_faults, after.major_faults),
                "storage_bytes": _since(read, device_read_bytes()),
                **runner.extra(),
            }
        )
    return sorted(found, key=lambda row: row["ttft_s"])[len(found) // 2]


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


class _StockRunner:
    def __init__(self, model: StockModel) -> None:
        self._model = model

    def request(self, prompt: list[int], outputs: int) -> list[float]:
        self._model.reset()
        begin = time.perf_counter()
        self._model.prefill(prompt)
        times = []
        while True:
            token = int(self._model.logits().argmax())
            times.append(time.perf_counter() - begin)
            if len(times) >= outputs:
                return times
            self._model.decode(token)

    def extra(self) -> dict[str, Any]:
        return {}


class _SessionRunner:
    def __init__(self, session: Session) -> None:
        self._session = session
        session.on_logits = self._on_logits
        self._begin = 0.0
        self._times: list[float] = []

    def request(self, prompt: list[int], outputs: int) -> list[float]:
        self._session.reset()
        self._times = []
        self._begin = time.perf_counter()
        for _ in self._session.stream(prompt, outputs - 1):
            pass
        return self._times

    def _on_logits(self, row: np.ndarray) -> None:
        row.argmax()  # what choosing greedily costs the other paths
        self._times.append(time.perf_counter() - self._begin)

    def extra(self) -> dict[str, Any]:
        # The tokens of one graph share its figures.
        graphs = step_table(self._session.prefill_steps).groupby("batch").first()
        found: dict[str, Any] = {
            "read_mib": float(graphs["read_mib"].sum()),
            "wait_s": float(graphs["wait_ms"].sum() / 1e3),
            "read_s": float(graphs["read_ms"].sum() / 1e3),
            "graph_s": float(graphs["wall_ms"].sum() / 1e3),
        }
        if set(graphs["path"]) == {"layers"}:
            found["layers"] = self._session.prefill_layers.to_dict("records")
        return found


def _since(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
