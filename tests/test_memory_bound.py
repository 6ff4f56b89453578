"""Peak memory as the kernel confirms it: dense weights + budget + KV + compute buffers + 64 MiB."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import memory_bound
import pytest
from memory_bound import MIB, Measured

from labkit import host, synth
from labkit.bench import cgroup
from labkit.gguf_map import open_gguf
from labkit.runtime import Session

REFUSAL = "Linux alone has memory cgroups" if sys.platform != "linux" else cgroup.why_not()

pytestmark = [
    pytest.mark.skipif(REFUSAL is not None, reason=REFUSAL or ""),
    pytest.mark.filterwarnings("ignore::labkit.runtime.BudgetWarning"),
]
OVERLAPS = ["serial", "pipeline"] + ["userfaultfd"] * (host.userfaultfd_problem() is None)
LOW, MIDDLE, MOST = 12, 90, 320  # of 324 MiB of experts; two whole layers are 81 MiB
CASES: list[dict] = [
    {"cache_mib": 0},
    {"cache_mib": LOW, "overlap": "pipeline", "prefetch": "previous"},
    {"cache_mib": MIDDLE, "prefill": "experts", "overlap": "serial"},
    {"cache_mib": MIDDLE, "prefill": "experts", "overlap": OVERLAPS[-1], "lanes": 8},
    {"cache_mib": MIDDLE, "prefill": "layers", "overlap": "pipeline"},
    {"cache_mib": MIDDLE, "dense": "mmap", "direct_io": False},
    {"cache_mib": MOST, "prefill": "layers", "overlap": OVERLAPS[-1]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, synth_worker: synth.LlamaWorker) -> Path:
    path = tmp_path_factory.mktemp("bound") / "model.gguf"
    shape: dict = {"layers": 8, "experts": 32, "d_model": 1024, "d_ff": 768}
    synth.make_large("qwen3moe", path, worker=synth_worker, **shape)
    return path


@pytest.fixture(scope="module")
def measured(model: Path) -> Callable[[dict], Measured]:
    """Runs a case under its bound as the limit; its logits must be the resident run's."""
    options: dict = {"n_ctx": memory_bound.N_CTX, "n_ubatch": memory_bound.N_UBATCH}
    with Session(model, resident=True, **options) as session:
        expected = memory_bound.two_prompts(session)

    def run(case: dict) -> Measured:
        limit = memory_bound.bound(model, int(case["cache_mib"] * MIB)).total
        found = memory_bound.run(model, limit, **case)
        assert found.oom_kills == 0, "the kernel ended it: it needs more than the bound"
        assert not found.words
        assert found.hash == expected
        return found

    return run


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_the_peak_is_within_the_bound(
    model: Path, measured: Callable[[dict], Measured], case: dict
) -> None:
    found = measured(case)
    assert found.peak is not None
    assert found.peak <= memory_bound.bound(model, int(case["cache_mib"] * MIB)).total
    # Two layers through slots; without room for them, a layer's experts at once.
    slots = case["cache_mib"] >= MIDDLE and case.get("prefill") != "experts"
    assert found.paths == (("layers",) if slots else ("cache",))
    # Were less in memory than was budgeted for, the bound would say little.
    assert found.peak > open_gguf(model).dense_bytes + case["cache_mib"] * MIB


def test_less_than_the_budget_is_deadly(model: Path) -> None:
    limit = open_gguf(model).dense_bytes + (MIDDLE + 2) * MIB  # any less is refused at once
    found = memory_bound.run(model, limit, cache_mib=MIDDLE)
    assert found.oom_kills == 1
    assert found.peak is None
