"""Lossless means bit-identical: every logit of a streamed run equals stock llama.cpp's.

The reference is llama.cpp without any callback of labkit. Every architecture that the installed
llama.cpp builds runs with the cache off, with one that evicts and with one that holds all. Ten
that differ most run with every expert type, as one file or as three shards, under settings (lanes,
direct or buffered reads, cache, overlap, prefill path) that rotate, so that each setting meets each
of the ten, each type, and each other setting; with LABKIT_FULL=1 the whole product runs. The Q4_K
and Q6_K models have slices of many pages, which are moved and not copied.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import stock

from labkit import host, synth
from labkit.errors import StreamingRefusedError
from labkit.gguf_map import open_gguf
from labkit.runtime import Session
from labkit.runtime.budget import layer_floor_bytes

pytestmark = pytest.mark.filterwarnings("ignore::labkit.runtime.BudgetWarning")

PROMPT = [(7 * i + 3) % 60 for i in range(50)]
STEPS = 64
CACHES = ("off", "evicts", "holds all")
DIFFERENT = (
    "arctic", "deepseek2", "gemma4", "gpt-oss", "grovemoe",
    "jamba", "lfm2moe", "llama4", "qwen3moe", "qwen3next",
)  # fmt: skip
TYPES = ("F32", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4")
OVERLAPS = ("serial", "pipeline", "auto", *["userfaultfd"] * (not host.userfaultfd_problem()))
LANES, DIRECT_IO, PREFILL, SHARDS = (1, 4), (None, False), ("experts", "auto"), (1, 3)
SETTINGS = list(itertools.product(LANES, DIRECT_IO, CACHES, OVERLAPS, PREFILL))


def rotated(arch: int, quant: int) -> tuple:
    """Shards and settings for the so-many-eth of `DIFFERENT` and of `TYPES`."""
    return (
        SHARDS[(arch + quant) % 2],
        LANES[(2 * arch + quant) // 3 % 2],
        DIRECT_IO[(arch + 7 * quant) // 2 % 2],
        CACHES[(4 * arch + 2 * quant) % 3],
        OVERLAPS[(3 * arch + 7 * quant) // 3 % len(OVERLAPS)],
        PREFILL[(7 * arch + 2 * quant) // 3 % 2],
    )


if os.environ.get("LABKIT_FULL"):
    VARIETIES = [
        (arch, quant, shards, SETTINGS)
        for arch, quant, shards in itertools.product(DIFFERENT, TYPES, SHARDS)
    ]
else:
    VARIETIES = [
        (arch, quant, shards, [tuple(setting)])
        for (i, arch), (j, quant) in itertools.product(enumerate(DIFFERENT), enumerate(TYPES))
        for shards, *setting in [rotated(i, j)]
    ]


def cache_mib(path: Path, cache: str) -> float:
    gguf = open_gguf(path)
    evicts = max(layer_floor_bytes(gguf), 0.4 * gguf.expert_bytes)
    return {"off": 0, "evicts": evicts, "holds all": 2 * gguf.expert_bytes}[cache] / 2**20


def streamed(path: Path, *, cache: str, **options) -> tuple[np.ndarray, Session]:
    """Logits (tokens, n_vocab) of the streamed run, and its closed session."""
    rows: list[np.ndarray] = []
    with Session(
        path,
        cache_mib=cache_mib(path, cache),
        all_logits=True,
        on_logits=rows.append,
        n_ctx=256,
        n_ubatch=256,
        threads=2,
        trial=False,
        **options,
    ) as session:
        result = session.generate(PROMPT, STEPS)
        assert result.misses > 0
        if cache == "off":
            assert result.hits == 0
        if cache == "holds all":
            assert result.hits > result.misses
    return np.stack(rows), session


def assert_identical(found: np.ndarray, reference: np.ndarray) -> None:
    assert np.isfinite(reference).all()
    assert found.shape == reference.shape
    # As bits: -0.0 is not 0.0 here.
    differ = (found.view(np.uint32) != reference.view(np.uint32)).any(axis=1)
    assert not differ.any(), f"logits differ first at token {int(differ.argmax())}"


@pytest.mark.parametrize("arch", synth.architectures())
def test_every_architecture(arch: str, synth_model: Callable[..., Path]) -> None:
    path = synth_model(arch)
    reference = stock.logits(path, PROMPT, STEPS)
    assert len(np.unique(reference.argmax(axis=1))) > 1, "the model says one thing only"
    turn = synth.architectures().index(arch)
    for number, cache in enumerate(CACHES):
        overlap = OVERLAPS[(turn + number) % len(OVERLAPS)]
        assert_identical(streamed(path, cache=cache, overlap=overlap)[0], reference)


@pytest.mark.parametrize(
    ("arch", "quant", "shards", "settings"),
    VARIETIES,
    ids=[f"{arch}-{quant}-{shards}" for arch, quant, shards, _ in VARIETIES],
)
def test_types_shards_and_settings(
    arch: str, quant: str, shards: int, settings: list[tuple], synth_model: Callable[..., Path]
) -> None:
    path = synth_model(arch, quant=quant, shards=shards)
    reference = stock.logits(path, PROMPT, STEPS)
    for lanes, direct_io, cache, overlap, prefill in settings:
        options = {"lanes": lanes, "direct_io": direct_io, "overlap": overlap}
        found, _ = streamed(path, cache=cache, prefill=prefill, **options)
        assert_identical(found, reference)


@pytest.mark.skipif(len(OVERLAPS) < 4, reason="no userfaultfd here")
def test_each_setting_meets_each_architecture_each_type_and_each_other() -> None:
    runs = [(i, j, *rotated(i, j)) for i in range(len(DIFFERENT)) for j in range(len(TYPES))]
    values = [set(column) for column in zip(*runs, strict=True)]
    for one, other in itertools.combinations(range(len(values)), 2):
        met = {(run[one], run[other]) for run in runs}
        assert met == set(itertools.product(values[one], values[other])), (one, other)


def test_a_corrupted_slice_is_noticed(synth_model: Callable[..., Path], tmp_path: Path) -> None:
    original = synth_model("qwen3moe")
    reference = stock.logits(original, PROMPT, STEPS)
    _, session = streamed(original, cache="evicts")
    used = session.trace.table.iloc[-1]
    where = open_gguf(original).expert(int(used["layer"]), int(used["expert"]))[-1]
    copy = tmp_path / "corrupted.gguf"
    shutil.copy(original, copy)
    with copy.open("r+b") as file:
        file.seek(where.offset)
        data = np.frombuffer(file.read(where.nbytes), np.float32)
        file.seek(where.offset)
        file.write((-data).tobytes())
    found, _ = streamed(copy, cache="evicts")
    with pytest.raises(AssertionError, match="logits differ"):
        assert_identical(found, reference)


def test_experts_that_no_graph_uses_are_refused(synth_model: Callable[..., Path]) -> None:
    with pytest.raises(StreamingRefusedError, match="uses none"):
        Session(synth_model("refact"))
