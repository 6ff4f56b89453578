"""The check of the two-slot model: schedules that it must find again, and a real prefill."""

from __future__ import annotations

import pandas as pd
import pytest

from labkit.bundled import model_path
from labkit.device.pipeline import COMPUTE, DEVICE, READER, WAIT, Job, schedule
from labkit.errors import BudgetError, OptionError
from labkit.prefill_lab.check import (
    LayerModel,
    OwnPrefill,
    layer_model,
    prediction_table,
    replay,
    replay_table,
    run_own,
)

READ = {1: 0.04, 2: 0.07, 3: 0.05}
MIB = 2**20


def own(tokens: int, chunk: int, *, slow: float = 1.0, lanes_overlap: float = 1.0) -> OwnPrefill:
    """A prefill whose layers took what a schedule says, as labkit would have measured it."""
    jobs = []
    for number, low in enumerate(range(0, tokens, chunk)):
        width = min(chunk, tokens - low)
        jobs.append(Job(number, -1, compute_s=0.001 * width))
        jobs += [
            Job(number, layer, read_s=slow * read, compute_s=0.0005 * width + 0.002)
            for layer, read in READ.items()
        ]
    made = schedule(jobs)
    table = made.table.assign(seconds=made.table["end_s"] - made.table["start_s"])
    rows = []
    for job in jobs:
        if job.layer < 0:
            continue
        mine = table[(table["chunk"] == job.chunk) & (table["layer"] == job.layer)]
        seconds = {
            (w, k): float(s)
            for w, k, s in mine[["worker", "work", "seconds"]].itertuples(index=False)
        }
        prepare = sum(s for (worker, _), s in seconds.items() if worker == READER)
        rows.append(
            {
                "chunk": job.chunk,
                "layer": job.layer,
                "prepare_s": prepare * lanes_overlap,
                "wait_s": seconds.get((DEVICE, WAIT), 0.0),
                "compute_s": seconds[DEVICE, COMPUTE],
                "read_bytes": int(READ[job.layer] * 1000 * MIB),
            }
        )
    read_s = sum(row["prepare_s"] for row in rows) / lanes_overlap
    return OwnPrefill(tokens, chunk, made.total_s, read_s, pd.DataFrame(rows))


@pytest.mark.parametrize("chunk", [8, 16, 64, 256])
@pytest.mark.parametrize("overlap", [1.0, 1.3])
def test_a_replay_finds_wall_time_and_wait_again(chunk: int, overlap: float):
    run = own(256, chunk, lanes_overlap=overlap)
    made = replay(run)
    assert made.total_s == pytest.approx(run.wall_s)
    assert made.wait_s == pytest.approx(run.layers["wait_s"].sum())


def test_a_replay_is_wrong_where_the_slots_did_not_overlap():
    """Layers read one after the other, each before its compute: the model must show it."""
    layers = pd.DataFrame(
        {
            "chunk": 0,
            "layer": [1, 2, 3, 4],
            "prepare_s": 1.0,
            "wait_s": 1.0,
            "compute_s": 1.0,
            "read_bytes": 1,
        }
    )
    error = replay_table([OwnPrefill(64, 64, 8.0, 4.0, layers)])["error_pct"].iloc[0]
    assert error == pytest.approx(100 * (5 / 8 - 1))


def test_chunk_lengths_that_were_not_run_are_predicted():
    model = layer_model([own(256, chunk) for chunk in (16, 256)])
    assert model.read_mib_s == pytest.approx(1000, rel=0.01)
    unseen = [own(256, 64), own(256, 128), own(200, 64), own(512, 32)]
    table = prediction_table(unseen, model)
    assert table["error_pct"].abs().max() < 5
    read_bound = own(256, 16)
    assert read_bound.layers["wait_s"].sum() > 0.5 * read_bound.wall_s  # reads cannot hide here


def test_a_slower_disk_shows_where_hiding_ends():
    model = layer_model([own(256, 64)])
    slower = LayerModel(model.read_mib_s / 4, model.layer_mib, model.compute_s, model.before_s)
    fast, slow = model.predict(256, 64), slower.predict(256, 64)
    assert slow.prepare_s == pytest.approx(4 * fast.prepare_s)
    assert slow.wait_s > fast.wait_s
    assert slow.total_s == pytest.approx(own(256, 64, slow=4).wall_s, rel=0.01)


def test_labkits_own_two_slots_are_predicted():
    """On this machine, whatever else it does: a pause in a run is in its measured times as well."""
    prompt = [20 + n % 400 for n in range(96)]
    runs = run_own(model_path(), prompt, chunks=[24, 96], repeats=2, cache_mib=3, n_ctx=256)
    assert [run.chunk for run in runs] == [24, 96, 24, 96]
    assert [run.n_chunks for run in runs] == [4, 1, 4, 1]
    table = replay_table(runs)
    assert (table["read_s"] > 0).all()
    # It may miss what a thread takes to wake up, and never invents more time than there was.
    assert (table["predicted_s"] <= 1.02 * table["measured_s"]).all(), table
    assert (table["predicted_s"] >= table["measured_s"] - table["wait_s"] - 1e-6).all(), table


def test_what_does_not_go_through_slots_is_refused():
    with pytest.raises(OptionError, match="one token"):
        run_own(model_path(), [1, 2], chunks=[1], cache_mib=3)
    with pytest.raises(BudgetError, match="two whole layers"):
        run_own(model_path(), [1, 2], chunks=[2], cache_mib=0.7)
    with pytest.raises(OptionError, match="at least one measured run"):
        layer_model([])
