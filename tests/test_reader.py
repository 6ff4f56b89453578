"""Reads land byte for byte where they belong, whatever the alignment, and fail by name."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from labkit.errors import ReadError
from labkit.runtime.direct_io import direct_io_problem
from labkit.runtime.memory import PAGE, ExpertWindow, PageRange
from labkit.runtime.reader import FileReader, ReadRequest

SLICE = 10_000
N = 9


def write(path: Path, offset: int) -> np.ndarray:
    """A file with N slices from `offset` to its very end; returns all of its bytes."""
    data = np.random.default_rng(0).integers(0, 256, offset + SLICE * N, np.uint8)
    path.write_bytes(data.tobytes())
    return data


def requests(window: ExpertWindow, experts: range | list[int]) -> list[ReadRequest]:
    return [ReadRequest(0, *window.span(e), window, f"expert {e}") for e in experts]


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def direct_io(request: pytest.FixtureRequest, tmp_path: Path) -> bool:
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(8192))
    if request.param and (problem := direct_io_problem(probe)):
        pytest.skip(problem)
    return request.param


@pytest.mark.parametrize("offset", [0, 32, 4096, 5000, 12_320])
@pytest.mark.parametrize("lanes", [1, 4])
def test_every_slice_lands_in_place(
    offset: int, lanes: int, direct_io: bool, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    data = write(path, offset)
    window = ExpertWindow(offset, SLICE, N)
    reader = FileReader([path], lanes=lanes, direct_io=direct_io)
    assert window.address(offset) % PAGE == offset % PAGE
    got = reader.read(requests(window, [0, 4, N - 1, 5]))
    assert got >= 4 * SLICE if direct_io else got == 4 * SLICE
    for expert in (0, 4, 5, N - 1):
        start, stop = window.span(expert)
        assert bytes(window.view(start, stop)) == data[start:stop].tobytes()
    reader.close()
    window.close()


def test_releasing_an_expert_keeps_its_neighbours(direct_io: bool, tmp_path: Path) -> None:
    path = tmp_path / "data"
    data = write(path, 1000)
    window = ExpertWindow(1000, SLICE, N)
    reader = FileReader([path], direct_io=direct_io)
    reader.read(requests(window, range(N)))
    resident = {0, 2, 3, 6}
    before = window.resident_bytes()
    for expert in sorted(set(range(N)) - resident):
        window.release(*window.releasable(expert, resident.__contains__))
    assert window.resident_bytes() < before
    for expert in resident:
        start, stop = window.span(expert)
        assert bytes(window.view(start, stop)) == data[start:stop].tobytes()
    resident.clear()
    for expert in range(N):
        window.release(*window.releasable(expert, resident.__contains__))
    assert window.resident_bytes() == 0
    reader.close()
    window.close()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is locked as Linux does it")
def test_locked_pages_go_back_as_well() -> None:
    """A model that is loaded by another thread locks all memory that is mapped meanwhile."""
    pages = PageRange(4 * PAGE)
    address, length = ctypes.c_void_p(pages.base), ctypes.c_size_t(pages.length)
    if ctypes.CDLL(None).mlock(address, length):
        pytest.skip("this user may not lock four pages")
    pages.memory[:] = b"x" * pages.length
    pages.drop(PAGE, 3 * PAGE)
    assert pages.resident_bytes() == 2 * PAGE
    pages.drop(0, pages.length)
    assert pages.resident_bytes() == 0
    pages.close()


def test_slices_smaller_than_a_page_share_it(direct_io: bool, tmp_path: Path) -> None:
    path = tmp_path / "data"
    data = np.random.default_rng(1).integers(0, 256, 100 * 40, np.uint8)
    path.write_bytes(data.tobytes())
    window = ExpertWindow(0, 100, 40)
    reader = FileReader([path], direct_io=direct_io)
    reader.read(requests(window, range(40)))
    window.release(*window.releasable(3, lambda other: other == 30))
    assert bytes(window.view(*window.span(30))) == data[3000:3100].tobytes()
    window.release(*window.releasable(30, lambda _: False))
    assert window.resident_bytes() == 0
    reader.close()
    window.close()


def test_a_file_that_shrank_is_an_error_never_zeros(direct_io: bool, tmp_path: Path) -> None:
    path = tmp_path / "data"
    write(path, 64)
    window = ExpertWindow(64, SLICE, N)
    reader = FileReader([path], direct_io=direct_io)
    os.truncate(path, 64 + SLICE * 5 + 17)
    reader.read(requests(window, [0, 4]))
    for expert in (5, 8):
        with pytest.raises(ReadError, match=f"expert {expert} .*the file ends at byte"):
            reader.read(requests(window, [0, expert]))
    reader.close()
    window.close()


def test_an_error_of_the_system_names_file_and_place(tmp_path: Path) -> None:
    path = tmp_path / "data"
    write(path, 0)
    window = ExpertWindow(0, SLICE, N)
    reader = FileReader([path], direct_io=False)
    os.close(reader._files[0])
    try:
        with pytest.raises(ReadError, match=r"data: cannot read expert 2 \(bytes 20000 to 30000\)"):
            reader.read(requests(window, [2]))
    finally:
        reader._files.clear()
        reader.close()
        window.close()


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="cannot be opened"):
        FileReader([tmp_path / "absent"], direct_io=False)


def test_close_ends_the_lanes(tmp_path: Path) -> None:
    path = tmp_path / "data"
    write(path, 0)
    before = threading.active_count()
    window = ExpertWindow(0, SLICE, N)
    reader = FileReader([path], lanes=3)
    reader.read(requests(window, range(N)))
    assert threading.active_count() > before
    reader.close()
    reader.close()
    window.close()
    assert threading.active_count() == before


def test_memory_of_a_read_under_way_outlives_its_window(tmp_path: Path) -> None:
    write(tmp_path / "data", 0)
    window = ExpertWindow(0, SLICE, N)
    view = window.view(0, SLICE)
    window.close()
    view[:] = b"x" * SLICE  # would end the process if it were unmapped
    view.release()
