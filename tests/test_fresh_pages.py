"""New pages lie side by side in physical memory, hold nothing, and what nobody takes goes back."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest

from labkit import bundled
from labkit.gguf_map import open_gguf
from labkit.runtime import Session
from labkit.runtime.fresh_pages import HUGE_PAGE, FreshPages
from labkit.runtime.memory import PAGE, PageRange, process_memory
from labkit.runtime.overlap import OverlapTrial

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are moved on Linux only")

SLICE = 211 * PAGE


def frames_of(base: int, length: int) -> np.ndarray:
    """Physical page numbers of a range; zeros to whom the kernel does not show them."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(base // PAGE * 8)
        entries = np.frombuffer(pagemap.read(length // PAGE * 8), np.uint64)
    return entries & np.uint64((1 << 55) - 1)


def has_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


def test_slices_get_pages_that_are_empty_and_all_their_own() -> None:
    fresh, n = FreshPages(), 200  # several regions
    target = PageRange(n * SLICE)
    before = process_memory()["anonymous"] or 0
    for index in range(n):
        assert fresh.move_to(target.base + index * SLICE, SLICE)
        view = target.memory[index * SLICE : (index + 1) * SLICE]
        assert not any(view[::1024])
        view[:] = bytes([index % 251 + 1]) * SLICE
    for index in range(n):
        assert set(target.memory[index * SLICE : (index + 1) * SLICE : 999]) == {index % 251 + 1}
    grown = (process_memory()["anonymous"] or 0) - before
    assert grown <= n * SLICE + 2 * HUGE_PAGE
    fresh.close()
    target.close()


@pytest.mark.skipif(not has_huge_pages(), reason="this system has no huge pages")
def test_pages_of_a_slice_lie_side_by_side() -> None:
    fresh, n = FreshPages(), 40
    target = PageRange(n * SLICE)
    for index in range(n):
        fresh.move_to(target.base + index * SLICE, SLICE)
    found = frames_of(target.base, target.length)
    if not found.any():
        pytest.skip("only the superuser sees where pages lie")
    runs = 1 + np.count_nonzero(np.diff(found.astype(np.int64)) != 1)
    # Two runs a slice where all were huge pages; one by one they would be nearer to 211.
    assert runs < 20 * n
    fresh.close()
    target.close()


def test_more_than_a_region_is_refused() -> None:
    fresh = FreshPages()
    target = PageRange(65 * HUGE_PAGE)
    assert not fresh.move_to(target.base, target.length)
    fresh.close()
    target.close()


def test_a_budget_that_holds_every_expert_is_not_watched_and_takes_huge_pages() -> None:
    assert "userfaultfd" not in OverlapTrial("auto", may_watch=False).note
    path = bundled.model_path()
    whole = open_gguf(path).expert_bytes
    hashes = set()
    for cache_mib in (whole / 2**20, 2.0):
        with Session(path, cache_mib=cache_mib, n_ctx=256, trial=False) as session:
            assert session._streaming
            memory = session._streaming.source.memory
            assert (memory.userfault is None) or cache_mib < whole / 2**20
            hashes.add(session.generate([5, 6, 7, 8], 40, hash_logits=True).logits_sha256)
            assert (session.resident_expert_bytes or 0) <= whole + 64 * PAGE
    assert len(hashes) == 1


def test_memory_of_a_slice_stays_together_when_it_goes_from_one_to_another() -> None:
    from labkit.runtime.frames import move_pages

    fresh = FreshPages()
    target = PageRange(2 * SLICE)
    fresh.move_to(target.base, SLICE)
    before = frames_of(target.base, SLICE)
    ctypes.memset(target.base, 7, SLICE)
    assert move_pages(target.base, target.base + SLICE, SLICE)
    assert (frames_of(target.base + SLICE, SLICE) == before).all()
    assert set(target.memory[SLICE:]) == {7}
    fresh.close()
    target.close()
