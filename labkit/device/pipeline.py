"""The two-slot pipeline: who works when while a prompt goes through a model that does not fit.

A wide batch touches nearly every expert, so whole layers pass through a few reusable slots. While
the device computes layer i out of one slot, layer i+1 is prepared in the next: read from flash,
copied in memory, its layout changed for the device. A slot is prepared anew only when the layer
that was in it is done (the barrier). Operations that the device lacks go to the CPU, and each
makes the device wait. This module schedules such jobs exactly; where their times come from, a
model or a measurement, is not its business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import pandas as pd

from labkit.errors import OptionError

READER = "preparation"
DEVICE = "device"
CPU = "CPU"
#: Who can work, in the order in which a timeline shows them.
WORKERS = (READER, DEVICE, CPU)

READ, COPY, LAYOUT = "read flash", "copy in memory", "change layout"
COMPUTE, BARRIER, SYNC = "compute", "barrier", "synchronise"
FALLBACK, TAIL, DECODE = "operation the device lacks", "tail of the prompt", "decode"
WAIT = "wait for preparation"
#: What a worker can be busy with; "wait for preparation" is the one that nobody wants.
WORK = (READ, COPY, LAYOUT, COMPUTE, WAIT, BARRIER, SYNC, FALLBACK, TAIL, DECODE)


@dataclass(frozen=True)
class Job:
    """One layer of one chunk of the prompt. All times in seconds.

    Attributes:
        chunk, layer: which; layer -1 is work outside the layers (embedding, first attention).
        read_s, copy_s, layout_s: preparation, in this order, by one worker. A job whose
            preparation takes no time uses no slot.
        compute_s: on the device, or on the CPU with `on_cpu`.
        fallbacks: operations of this layer that the device lacks.
        fallback_s: CPU time of all of them together.
        on_cpu: a job of the prompt's tail: the CPU reads what it needs, then computes.
    """

    chunk: int
    layer: int
    read_s: float = 0.0
    copy_s: float = 0.0
    layout_s: float = 0.0
    compute_s: float = 0.0
    fallbacks: int = 0
    fallback_s: float = 0.0
    on_cpu: bool = False

    @property
    def prepare_s(self) -> float:
        """All of the preparation."""
        return self.read_s + self.copy_s + self.layout_s


@dataclass(frozen=True)
class Timeline:
    """A schedule.

    Attributes:
        table: a row per piece of work: worker, work, chunk, layer, slot (NaN where none is used),
            start_s, end_s; in order of time for each worker. Workers never do two things at once.
        total_s: when the last piece ends.
        prepare_s, compute_s: all preparation; all compute on the device.
        wait_s: how long the device stood still because a slot was not ready (exposed wait).
        barrier_s, sync_s, fallback_s, tail_s: what else the device spent, or waited for.
    """

    table: pd.DataFrame = field(repr=False)
    total_s: float
    prepare_s: float
    compute_s: float
    wait_s: float
    barrier_s: float
    sync_s: float
    fallback_s: float
    tail_s: float

    @property
    def hidden_pct(self) -> float:
        """The part of the preparation that ran beside compute, in %; NaN if there was none."""
        if not self.prepare_s:
            return math.nan
        return 100 * max(0.0, 1 - self.wait_s / self.prepare_s)


def schedule(
    jobs: Sequence[Job], *, slots: int = 2, barrier_s: float = 0.0, sync_s: float = 0.0
) -> Timeline:
    """Schedule `jobs` in their order.

    Args:
        jobs: every layer of the first chunk, then of the second, and so on; a tail at the end.
        slots: reusable slots of one layer each. 1 is no overlap at all; as many as there are
            layers to prepare means that each is prepared once, for the first chunk.
        barrier_s: the device's cost of handing a slot over, for each job that uses one.
        sync_s: the cost of each operation that goes to the CPU, on top of its own time: stopping
            the device, the hand-over there and back.

    Raises:
        OptionError: no job, no slot, or a time that is negative or not a number.
    """
    _check(jobs, slots, barrier_s, sync_s)
    state = _State(slots=slots, barrier_s=barrier_s, sync_s=sync_s)
    for job in jobs:
        if job.on_cpu:
            state.on_cpu(job)
        else:
            state.on_device(job)
    return state.timeline()


class _State:
    """Clocks of the workers and the slots while jobs are put into the schedule."""

    def __init__(self, *, slots: int, barrier_s: float, sync_s: float) -> None:
        self.barrier_s, self.sync_s = barrier_s, sync_s
        self.reader_free = self.device_free = 0.0
        self.slot_free = [0.0] * slots
        self.slot_layer: list[int | None] = [None] * slots
        self.next_slot = 0
        self.rows: list[tuple[str, str, int, int, float, float, float]] = []

    def on_device(self, job: Job) -> None:
        slot, ready = self._prepare(job)
        start = self.device_free
        begin = max(start, ready)
        number = math.nan if slot is None else float(slot)
        if begin > start:
            self._add(DEVICE, WAIT, job, number, start, begin)
        if slot is not None:
            begin = self._add(DEVICE, BARRIER, job, number, begin, begin + self.barrier_s)
        end = self._add(DEVICE, COMPUTE, job, number, begin, begin + job.compute_s)
        if job.fallbacks:
            paused = end + job.fallbacks * self.sync_s
            self._add(DEVICE, SYNC, job, number, end, paused)
            end = self._add(CPU, FALLBACK, job, number, paused, paused + job.fallback_s)
        self.device_free = end
        if slot is not None:
            self.slot_free[slot] = end

    def on_cpu(self, job: Job) -> None:
        """Read, then compute: with one short batch there is nothing to overlap with."""
        begin = self._prepare_from(job, max(self.reader_free, self.device_free), math.nan)
        self.reader_free = max(self.reader_free, begin)
        begin = max(begin, self.device_free)
        self.device_free = self._add(CPU, TAIL, job, math.nan, begin, begin + job.compute_s)

    def _prepare(self, job: Job) -> tuple[int | None, float]:
        """The job's slot, if it needs one, and when its layer is ready in it."""
        if not job.prepare_s:
            return None, 0.0
        if job.layer in self.slot_layer:  # still there from the chunk before
            return self.slot_layer.index(job.layer), 0.0
        slot = self.next_slot
        self.next_slot = (slot + 1) % len(self.slot_free)
        self.slot_layer[slot] = job.layer
        start = max(self.reader_free, self.slot_free[slot])
        self.reader_free = self._prepare_from(job, start, float(slot))
        return slot, self.reader_free

    def _prepare_from(self, job: Job, start: float, slot: float) -> float:
        parts = ((READ, job.read_s), (COPY, job.copy_s), (LAYOUT, job.layout_s))
        for work, seconds in parts:
            start = self._add(READER, work, job, slot, start, start + seconds)
        return start

    def _add(
        self, worker: str, work: str, job: Job, slot: float, start: float, end: float
    ) -> float:
        if end > start:
            self.rows.append((worker, work, job.chunk, job.layer, slot, start, end))
        return end

    def timeline(self) -> Timeline:
        names = ["worker", "work", "chunk", "layer", "slot", "start_s", "end_s"]
        table = pd.DataFrame(self.rows, columns=names)
        table["worker"] = pd.Categorical(table["worker"], WORKERS, ordered=True)
        table = table.sort_values(["worker", "start_s"], kind="stable", ignore_index=True)
        table["worker"] = table["worker"].astype(str)
        spent = (table["end_s"] - table["start_s"]).groupby(table["work"]).sum()
        device = table[table["worker"] == DEVICE]
        compute = device.loc[device["work"] == COMPUTE]
        return Timeline(
            table=table,
            total_s=max(self.device_free, self.reader_free),
            prepare_s=float(sum(spent.get(part, 0.0) for part in (READ, COPY, LAYOUT))),
            compute_s=float((compute["end_s"] - compute["start_s"]).sum()),
            wait_s=float(spent.get(WAIT, 0.0)),
            barrier_s=float(spent.get(BARRIER, 0.0)),
            sync_s=float(spent.get(SYNC, 0.0)),
            fallback_s=float(spent.get(FALLBACK, 0.0)),
            tail_s=float(spent.get(TAIL, 0.0)),
        )


def _check(jobs: Sequence[Job], slots: int, barrier_s: float, sync_s: float) -> None:
    if not jobs:
        raise OptionError("there is no job to schedule: give at least one layer of one chunk")
    if slots < 1:
        raise OptionError(f"slots is {slots}; a layer needs at least one to be prepared in")
    for name, value in (("barrier_s", barrier_s), ("sync_s", sync_s)):
        _check_time(name, value)
    times = [item.name for item in fields(Job) if item.name.endswith("_s")]
    for job in jobs:
        for name in times:
            _check_time(f"{name} of layer {job.layer}, chunk {job.chunk}", getattr(job, name))
        if job.fallbacks < 0:
            raise OptionError(f"fallbacks of layer {job.layer} is {job.fallbacks}; 0 or more")


def _check_time(name: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
        raise OptionError(f"{name} is {value!r}; it must be a time in seconds, 0 or more")
