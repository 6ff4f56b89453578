"""The two-slot model against labkit's own two-slot prefill on this machine.

`replay` takes what each layer really took to prepare and to compute, and predicts the wall time
and the exposed wait: is the schedule right? `LayerModel` goes further: from runs with some chunk
lengths it predicts prompts and chunk lengths that were not run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.device.pipeline import Job, Timeline, schedule
from labkit.errors import OptionError
from labkit.prefill_lab.result import PrefillResult
from labkit.runtime import Session
from labkit.runtime.metrics_csv import step_table

_MIB = 2**20


@dataclass(frozen=True)
class OwnPrefill:
    """One prompt through labkit's two slots, as it was measured.

    Attributes:
        tokens, chunk: the prompt, and tokens of a graph.
        wall_s: of the whole prompt, with what lies between its graphs: reads go on there.
        read_s: wall time in which at least one read was under way.
        layers: chunk, layer, prepare_s, wait_s, compute_s, read_bytes, as `Session.prefill_layers`
            has them.
    """

    tokens: int
    chunk: int
    wall_s: float
    read_s: float
    layers: pd.DataFrame

    @property
    def before_s(self) -> float:
        """Time of each graph before its first routing, and around it: what no layer accounts for.

        There llama.cpp computes embedding, first attention and leading dense layers.
        """
        spent = self.layers["wait_s"].sum() + self.layers["compute_s"].sum()
        return max(0.0, self.wall_s - float(spent)) / self.n_chunks

    @property
    def alone(self) -> float:
        """The part of the layers' preparation time that is no other layer's time as well.

        Lanes that a layer's last pieces leave free begin with the next layer, so that the times
        overlap at their ends: their sum is longer than the time in which something was read.
        """
        together = float(self.layers["prepare_s"].sum())
        return min(1.0, self.read_s / together) if together else 1.0

    @property
    def n_chunks(self) -> int:
        """Graphs of the prompt."""
        return self.layers["chunk"].nunique()

    @property
    def widths(self) -> list[int]:
        """Tokens of each graph."""
        return [min(self.chunk, self.tokens - low) for low in range(0, self.tokens, self.chunk)]


def run_own(
    model: str | Path,
    prompt: Sequence[int],
    *,
    chunks: Sequence[int],
    repeats: int = 3,
    **options: Any,
) -> list[OwnPrefill]:
    """Measure prompts through the two slots, `repeats` times for each chunk length, in turns.

    `prompt` are token ids; `options` go to `Session`, where the budget must hold two layers.

    Raises:
        BudgetError: two layers exceed the budget.
        OptionError: a chunk of one token, which does not go through the slots.
    """
    if min(chunks) < 2:
        raise OptionError("a chunk of one token takes the expert cache; give 2 or more")
    found: list[OwnPrefill] = []
    with contextlib.ExitStack() as stack:
        sessions = {
            chunk: stack.enter_context(Session(model, prefill="layers", n_ubatch=chunk, **options))
            for chunk in dict.fromkeys(chunks)
        }
        for number in range(repeats + 1):
            for chunk, session in sessions.items():
                own = _run(session, list(prompt), chunk)
                if number:  # the first run of a session also brings its memory in
                    found.append(own)
    return found


def _run(session: Session, prompt: list[int], chunk: int) -> OwnPrefill:
    session.reset()
    begin = time.perf_counter()
    for _ in session.stream(prompt, 0):
        pass
    wall_s = time.perf_counter() - begin
    graphs = step_table(session.prefill_steps).groupby("batch").first()
    read_s = float(graphs["read_ms"].sum()) / 1e3
    return OwnPrefill(len(prompt), chunk, wall_s, read_s, session.prefill_layers)


def replay(own: OwnPrefill) -> Timeline:
    """Schedule a run's own layer times in two slots."""
    jobs: list[Job] = []
    last = -1
    for row in own.layers.to_dict("records"):
        chunk = int(row["chunk"])
        if chunk != last:
            jobs.append(Job(chunk, -1, compute_s=own.before_s))
            last = chunk
        read_s = own.alone * row["prepare_s"]
        jobs.append(Job(chunk, int(row["layer"]), read_s=read_s, compute_s=row["compute_s"]))
    return schedule(jobs, slots=2)


@dataclass(frozen=True)
class LayerModel:
    """What a layer takes here, from measured runs.

    Attributes:
        read_mib_s: rate at which layers are prepared, the runs' median.
        layer_mib: bytes of each MoE layer, by layer.
        compute_s: width of a graph -> seconds of a layer; linear in between.
        before_s: width of a graph -> seconds before its first layer.
    """

    read_mib_s: float
    layer_mib: dict[int, float]
    compute_s: dict[int, float]
    before_s: dict[int, float]

    def predict(self, tokens: int, chunk: int) -> Timeline:
        """Schedule a prompt that was not run."""
        jobs: list[Job] = []
        for number, low in enumerate(range(0, tokens, chunk)):
            width = min(chunk, tokens - low)
            jobs.append(Job(number, -1, compute_s=_at(self.before_s, width)))
            compute = _at(self.compute_s, width)
            jobs += [
                Job(number, layer, read_s=mib / self.read_mib_s, compute_s=compute)
                for layer, mib in self.layer_mib.items()
            ]
        return schedule(jobs, slots=2)


def layer_model(runs: Sequence[OwnPrefill]) -> LayerModel:
    """Fit a `LayerModel`: medians of whole chunks, one width for each chunk length.

    Raises:
        OptionError: no run.
    """
    if not runs:
        raise OptionError("a model of the layers needs at least one measured run")
    compute: dict[int, list[float]] = {}
    before: dict[int, list[float]] = {}
    for run in runs:
        whole = [n for n, width in enumerate(run.widths) if width == min(run.chunk, run.tokens)]
        rows = run.layers[run.layers["chunk"].isin(whole)]
        width = min(run.chunk, run.tokens)
        compute.setdefault(width, []).append(float(rows["compute_s"].mean()))
        before.setdefault(width, []).append(run.before_s)
    every = pd.concat([run.layers for run in runs])
    return LayerModel(
        read_mib_s=float(np.median([run.layers["read_bytes"].sum() / run.read_s for run in runs]))
        / _MIB,
        layer_mib={
            int(layer): float(rows["read_bytes"].mean() / _MIB)  # type: ignore[call-overload]
            for layer, rows in every.groupby("layer")
        },
        compute_s={width: float(np.median(values)) for width, values in compute.items()},
        before_s={width: float(np.median(values)) for width, values in before.items()},
    )


def own_runs(result: PrefillResult) -> list[OwnPrefill]:
    """The prompts of a measurement that went through the two slots, every round."""
    runs = []
    done = result.prefills[result.prefills["path"] == "layers"]
    for row in done.to_dict("records"):
        same = (result.layers["round"] == row["round"]) & (result.layers["tokens"] == row["tokens"])
        layers = result.layers[same].sort_values(["chunk", "layer"], kind="stable")
        if len(layers):  # a prompt of one token takes the cache
            tokens = int(row["tokens"])
            chunk = min(int(result.facts["chunk"]), tokens)
            runs.append(OwnPrefill(tokens, chunk, row["ttft_s"], row["read_s"], layers))
    return runs


def replay_table(runs: Sequence[OwnPrefill]) -> pd.DataFrame:
    """Every run beside its replay.

    Columns: tokens, chunk, measured_s, predicted_s, error_pct, wait_s, predicted_wait_s,
    read_s, compute_s, hidden_pct (measured).
    """
    return pd.DataFrame([_compare(run, replay(run)) for run in runs])


def prediction_table(runs: Sequence[OwnPrefill], model: LayerModel) -> pd.DataFrame:
    """Every run beside what `model` predicts for it: columns as of `replay_table`."""
    return pd.DataFrame([_compare(run, model.predict(run.tokens, run.chunk)) for run in runs])


def _compare(run: OwnPrefill, made: Timeline) -> dict[str, float]:
    wait = float(run.layers["wait_s"].sum())
    return {
        "tokens": run.tokens,
        "chunk": run.chunk,
        "measured_s": run.wall_s,
        "predicted_s": made.total_s,
        "error_pct": 100 * (made.total_s / run.wall_s - 1),
        "wait_s": wait,
        "predicted_wait_s": made.wait_s,
        "read_s": run.read_s,
        "compute_s": float(run.layers["compute_s"].sum()),
        "hidden_pct": 100 * max(0.0, 1 - wait / run.read_s) if run.read_s else float("nan"),
    }


def _at(by_width: dict[int, float], width: int) -> float:
    widths = sorted(by_width)
    values = [by_width[w] for w in widths]
    if width < widths[0] or (len(widths) > 1 and width > widths[-1]):
        # Beyond the measured widths: along the line of the nearest two, never below 0.
        low, high = (0, 1) if width < widths[0] else (-2, -1)
        if len(widths) > 1:
            slope = (values[high] - values[low]) / (widths[high] - widths[low])
            return max(0.0, values[low] + slope * (width - widths[low]))
    return float(np.interp(width, widths, values))
