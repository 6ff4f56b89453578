"""The two-slot schedule against laws that any schedule obeys, and against small ones by hand."""

from __future__ import annotations

import math
import random

import pandas as pd
import pytest

from labkit.device.pipeline import (
    BARRIER,
    COMPUTE,
    CPU,
    DEVICE,
    FALLBACK,
    READER,
    SYNC,
    WAIT,
    Job,
    Timeline,
    schedule,
)
from labkit.errors import OptionError


def jobs(chunks: int, layers: int, read: float, compute: float) -> list[Job]:
    return [
        Job(chunk, layer, read_s=read, compute_s=compute)
        for chunk in range(chunks)
        for layer in range(layers)
    ]


def pieces(timeline: Timeline, worker: str, *work: str) -> pd.DataFrame:
    table = timeline.table
    found = table[table["worker"] == worker]
    return found[found["work"].isin(work)] if work else found


@pytest.mark.parametrize(("read", "compute"), [(1.0, 3.0), (3.0, 1.0), (2.0, 2.0)])
def test_equal_layers_take_the_slower_of_both_and_one_of_the_other(read: float, compute: float):
    timeline = schedule(jobs(2, 5, read, compute))
    assert timeline.total_s == pytest.approx(read + 9 * max(read, compute) + compute)
    assert timeline.wait_s == pytest.approx(read + 9 * max(0.0, read - compute))


def test_one_slot_overlaps_nothing():
    timeline = schedule(jobs(1, 4, 2.0, 3.0), slots=1)
    assert timeline.total_s == pytest.approx(4 * 5.0)
    assert timeline.hidden_pct == pytest.approx(0.0)


def test_two_slots_by_hand():
    uneven = [
        Job(0, 0, read_s=1, compute_s=4),
        Job(0, 1, read_s=1, compute_s=1),
        Job(0, 2, read_s=6, compute_s=2),
        Job(0, 3, read_s=1, compute_s=1),
    ]
    timeline = schedule(uneven)
    reads = pieces(timeline, READER)
    # Layer 2 must wait for layer 0 to leave its slot at 5, layer 3 for layer 1, done at 6, and
    # for the reader, free at 11.
    assert list(zip(reads["start_s"], reads["end_s"], strict=True)) == [
        (0, 1),
        (1, 2),
        (5, 11),
        (11, 12),
    ]
    assert timeline.total_s == 14
    assert timeline.wait_s == 1 + 5
    assert timeline.hidden_pct == pytest.approx(100 * (1 - 6 / 9))


def test_as_many_slots_as_layers_prepare_each_once():
    once = schedule(jobs(3, 4, 2.0, 1.0), slots=4)
    again = schedule(jobs(3, 4, 2.0, 1.0), slots=3)
    assert once.prepare_s == pytest.approx(4 * 2.0)
    assert again.prepare_s == pytest.approx(3 * 4 * 2.0)  # one slot too few is as bad as two


def test_layers_without_experts_use_no_slot_and_hide_reads():
    dense_first = [Job(0, 0, compute_s=5.0), *jobs(1, 3, 1.0, 2.0)]
    timeline = schedule(dense_first)
    assert timeline.wait_s == 0
    assert timeline.total_s == pytest.approx(5 + 3 * 2)
    assert pieces(timeline, DEVICE)["slot"].isna().tolist() == [True, False, False, False]


def test_operations_that_the_device_lacks_stop_it():
    one = [Job(0, 0, read_s=1.0, compute_s=2.0, fallbacks=3, fallback_s=0.6)]
    timeline = schedule(one, barrier_s=0.25, sync_s=0.5)
    assert timeline.total_s == pytest.approx(1 + 0.25 + 2 + 3 * 0.5 + 0.6)
    assert pieces(timeline, DEVICE)["work"].tolist() == [WAIT, BARRIER, COMPUTE, SYNC]
    assert pieces(timeline, CPU)["work"].tolist() == [FALLBACK]
    assert (timeline.sync_s, timeline.fallback_s) == (pytest.approx(1.5), pytest.approx(0.6))


def test_the_tail_follows_on_the_cpu():
    tail = Job(1, 0, read_s=0.5, compute_s=1.0, on_cpu=True)
    timeline = schedule([Job(0, 0, read_s=1.0, compute_s=2.0), tail])
    assert timeline.total_s == pytest.approx(3 + 1.5)
    assert timeline.tail_s == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_random_schedule_keeps_the_laws(seed: int):
    draw = random.Random(seed)
    slots = draw.randint(1, 4)
    layers = draw.randint(slots + 1, 7)
    work = [
        Job(
            chunk,
            layer,
            read_s=draw.choice([0.0, draw.random()]),
            layout_s=draw.random(),
            compute_s=draw.random(),
            fallbacks=draw.randint(0, 2),
            fallback_s=draw.random(),
        )
        for chunk in range(3)
        for layer in range(layers)
    ]
    timeline = schedule(work, slots=slots, barrier_s=0.01, sync_s=0.02)
    for worker in (READER, DEVICE, CPU):
        rows = pieces(timeline, worker)
        assert (rows["start_s"].to_numpy()[1:] >= rows["end_s"].to_numpy()[:-1] - 1e-9).all()
    reads = (
        pieces(timeline, READER)
        .groupby(["chunk", "layer"])
        .agg(start=("start_s", "min"), end=("end_s", "max"), slot=("slot", "first"))
    )
    used = pieces(timeline, DEVICE, COMPUTE).set_index(["chunk", "layer"])["start_s"].to_dict()
    ends = timeline.table[timeline.table["worker"] != READER].groupby(["chunk", "layer"])
    done = ends["end_s"].max().to_dict()
    in_slot = {}
    for job, start, end, slot in reads.itertuples():
        assert used[job] >= end - 1e-9  # nothing is computed unread
        if slot in in_slot:  # and nothing is overwritten that is still in use
            assert start >= done[in_slot[slot]] - 1e-9
        in_slot[slot] = job
    spent = timeline.compute_s + timeline.wait_s + timeline.barrier_s
    spent += timeline.sync_s + timeline.fallback_s
    assert timeline.total_s == pytest.approx(spent)
    assert timeline.wait_s <= timeline.prepare_s + 1e-9


def test_more_slots_never_take_longer():
    draw = random.Random(3)
    work = [Job(0, n, read_s=draw.random(), compute_s=draw.random()) for n in range(30)]
    times = [schedule(work, slots=n).total_s for n in (1, 2, 3, 5)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[1]


@pytest.mark.parametrize(
    ("work", "options", "words"),
    [
        ([], {}, "no job"),
        (jobs(1, 1, 1, 1), {"slots": 0}, "slots is 0"),
        (jobs(1, 1, -1, 1), {}, "read_s of layer 0"),
        (jobs(1, 1, 1, math.nan), {}, "compute_s of layer 0"),
        (jobs(1, 1, 1, 1), {"sync_s": -1.0}, "sync_s"),
        ([Job(0, 4, compute_s=1, fallbacks=-1)], {}, "fallbacks of layer 4"),
    ],
)
def test_what_is_no_schedule_is_refused(work: list[Job], options: dict, words: str):
    with pytest.raises(OptionError, match=words):
        schedule(work, **options)
