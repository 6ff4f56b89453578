"""Slices arrive whole, their pages go round, and nobody sleeps for ever on what is not there."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from labkit import host
from labkit.errors import ReadError, ResourceError
from labkit.gguf_map import GGUFMap, open_gguf
from labkit.policy import make_policy
from labkit.runtime import mappings
from labkit.runtime.expert_memory import ExpertMemory
from labkit.runtime.frames import move_pages
from labkit.runtime.memory import PAGE, PageRange
from labkit.runtime.reader import FileReader
from labkit.runtime.source import ExpertStreamSource, Overlap
from labkit.runtime.userfault import UserFault

needs_userfault = pytest.mark.skipif(
    bool(host.userfaultfd_problem()), reason=str(host.userfaultfd_problem())
)

SERIAL_AND_USERFAULTFD = ["serial", pytest.param("userfaultfd", marks=needs_userfault)]


@pytest.fixture(params=["F32", "Q6_K"], ids=["slices of few pages", "slices of many pages"])
def gguf(request: pytest.FixtureRequest, synth_model: Callable[..., Path]) -> GGUFMap:
    return open_gguf(synth_model("qwen3moe", quant=request.param))


@contextlib.contextmanager
def streaming(
    gguf: GGUFMap, n_entries: float, overlap: Overlap = "serial", **options
) -> Iterator[ExpertStreamSource]:
    """A source with room for so many entries, without a model that computes."""
    memory = ExpertMemory(gguf, UserFault() if overlap == "userfaultfd" else None)
    memory.watch(overlap == "userfaultfd")
    reader = FileReader(gguf.paths, **options)
    entry_bytes = gguf.entry_bytes(gguf.moe_layers[0])
    policy = make_policy("lru", int(n_entries * entry_bytes), {})
    source = ExpertStreamSource(gguf, reader, policy, memory)
    source.overlap = overlap
    try:
        yield source
    finally:
        reader.close()
        memory.close()


def slices_in_memory(source: ExpertStreamSource, layer: int, expert: int) -> list[bytes]:
    """The bytes of each projection, read as compute would: by address, without the GIL."""
    found = []
    for part in source.memory._parts[layer]:
        start, stop = part.window.span(expert)
        copy = ctypes.create_string_buffer(stop - start)
        ctypes.memmove(copy, part.window.address(start), stop - start)
        found.append(copy.raw)
    return found


def slices_in_file(gguf: GGUFMap, layer: int, expert: int) -> list[bytes]:
    found = []
    for piece in gguf.expert(layer, expert):
        with gguf.paths[piece.shard].open("rb") as file:
            file.seek(piece.offset)
            found.append(file.read(piece.nbytes))
    return found


@pytest.mark.parametrize("direct_io", [None, False], ids=["direct", "buffered"])
@pytest.mark.parametrize(
    "overlap", ["serial", "pipeline", pytest.param("userfaultfd", marks=needs_userfault)]
)
def test_whatever_goes_and_comes_the_bytes_are_the_files(
    gguf: GGUFMap, overlap: Overlap, direct_io: bool | None
) -> None:
    rng = np.random.default_rng(3)
    with streaming(gguf, 7.5, overlap, direct_io=direct_io) as source:
        source.down_stops = frozenset(gguf.moe_layers)
        for _ in range(120):
            layer = int(rng.choice(gguf.moe_layers))
            chosen = rng.choice(gguf.n_expert, 2, replace=False).tolist()
            source.fetch(layer, chosen)
            source.wait_for_down(layer)
            for expert in chosen:
                assert slices_in_memory(source, layer, expert) == slices_in_file(
                    gguf, layer, expert
                )
            assert source.policy.resident_bytes <= source.policy.budget_bytes
        source.settle()
        # Pages at the ends of slices are shared: at most two beyond each slice's own.
        n_slices = len(source.memory.resident) * 3
        assert source.resident_bytes() <= source.policy.resident_bytes + n_slices * 2 * PAGE
        assert not source.orphaned


@pytest.mark.parametrize("overlap", SERIAL_AND_USERFAULTFD)
def test_moved_pages_leave_half_of_the_mappings_to_others(
    synth_model: Callable[..., Path], overlap: Overlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = open_gguf(synth_model("qwen3moe", quant="Q6_K"))
    if not can_move():
        pytest.skip("this system moves no pages")
    moved_by_one = 2 * gguf.n_expert
    monkeypatch.setattr(mappings, "most_mappings", lambda: 2 * 3 * moved_by_one)
    before = mappings._taken
    with streaming(gguf, 100, overlap) as source, streaming(gguf, 100, overlap) as second:
        begin = n_mappings()
        for one in (source, second):
            for layer in gguf.moe_layers:
                one.fetch(layer, range(gguf.n_expert))
            one.finish_reads()
        # Beside what moved pages take, each of a few frames is three mappings.
        assert n_mappings() - begin <= 3 * moved_by_one + 3 * 2 * 4 + 8
        for expert in range(gguf.n_expert):
            found = slices_in_memory(second, gguf.moe_layers[-1], expert)
            assert found == slices_in_file(gguf, gguf.moe_layers[-1], expert)
    assert mappings._taken == before


def test_what_is_there_is_counted_beside_closing(gguf: GGUFMap) -> None:
    memory = ExpertMemory(gguf)
    window = memory._parts[gguf.moe_layers[0]][0].window
    counting, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    counted: list[int] = []
    count = window.pages.resident_bytes

    def slow() -> int:
        counting.set()
        go_on.wait()
        return count()

    def close() -> None:
        memory.close()
        closed.set()

    window.pages.resident_bytes = slow
    counter = threading.Thread(target=lambda: counted.append(memory.resident_bytes()))
    closer = threading.Thread(target=close)
    counter.start()
    assert counting.wait(60)
    closer.start()
    is_early = closed.wait(0.1)
    go_on.set()
    counter.join()
    closer.join()
    assert not is_early
    assert counted == [0]
    assert memory.resident_bytes() == 0


def n_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("overlap", SERIAL_AND_USERFAULTFD)
def test_reads_take_the_pages_of_evicted_slices(
    synth_model: Callable[..., Path], overlap: Overlap
) -> None:
    gguf = open_gguf(synth_model("qwen3moe", quant="Q6_K"))
    if not can_move():
        pytest.skip("this system does not move pages (mremap with MREMAP_DONTUNMAP)")
    layer, other = gguf.moe_layers[:2]
    n_faults = {}
    for keep in (True, False):
        with streaming(gguf, 2 * gguf.n_expert, overlap) as source:
            memory, reader = source.memory, source._reader
            memory._fresh = None  # new pages come singly then, each with a fault
            held = [(layer, expert) for expert in range(gguf.n_expert)]
            wanted = [(other, expert) for expert in range(gguf.n_expert)]
            memory.evict((), held)
            reader.read(memory.requests(held))
            assert source.resident_bytes() >= gguf.entry_bytes(layer) * gguf.n_expert
            begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            memory.evict(held, wanted if keep else ())
            memory.evict((), wanted)
            reader.read(memory.requests(wanted))
            n_faults[keep] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin
            assert not any(part.window.resident_bytes() for part in memory._parts[layer])
            memory.evict(wanted, ())
            assert source.resident_bytes() == 0
    assert n_faults[True] < n_faults[False] / 2


def hold_reads(source: ExpertStreamSource) -> threading.Event:
    """No read ends before the event is set: the disk is slow."""
    gate, real = threading.Event(), source._reader._read_one

    def held(request):
        gate.wait()
        return real(request)

    source._reader._read_one = held
    return gate


@needs_userfault
def test_an_entry_wanted_again_before_a_read_took_its_pages_is_read(gguf: GGUFMap) -> None:
    layer = gguf.moe_layers[0]
    with streaming(gguf, 2, "userfaultfd") as source:
        source.fetch(layer, [0, 1])
        source.settle()
        gate = hold_reads(source)
        source.fetch(layer, [2])  # in place of 0, whose pages are still there
        source.prefetch(layer, [0], keep=[(layer, 2)])  # in place of 1
        gate.set()
        source.finish_reads()
        for expert in (0, 2):
            assert slices_in_memory(source, layer, expert) == slices_in_file(gguf, layer, expert)
        source.settle()
        assert not source.orphaned


def test_a_read_that_is_taken_back_leaves_no_pages_behind(gguf: GGUFMap) -> None:
    first, second = gguf.moe_layers[:2]
    with streaming(gguf, 4, lanes=1) as source:
        source.fetch(first, [0, 1])
        source.fetch(second, [0, 1])
        gate = hold_reads(source)
        source.prefetch(second, [4, 5, 6], keep=[(second, 0)])  # in place of three; a lane has one
        threading.Timer(0.1, gate.set).start()
        source.fetch(second, [0])
        source.settle()
        source.finish_reads()
        slices = len(source.memory.resident) * 3
        assert source.resident_bytes() <= source.policy.resident_bytes + slices * 2 * PAGE
        assert source.policy.resident_bytes < 4 * gguf.entry_bytes(second)


def can_move() -> bool:
    source, target = PageRange(PAGE), PageRange(PAGE)
    source.memory[:3] = b"abc"
    moved = move_pages(source.base, target.base, PAGE)
    assert not moved or bytes(target.memory[:3]) == b"abc"
    source.close()
    target.close()
    return moved


@needs_userfault
def test_whoever_comes_early_sleeps_until_the_slice_is_there(gguf: GGUFMap) -> None:
    layer = gguf.moe_layers[0]
    with streaming(gguf, 8, "userfaultfd") as source:
        real = source._reader._read_one

        def late(request):
            time.sleep(0.05)
            return real(request)

        source._reader._read_one = late  # a slow disk
        source.fetch(layer, [0, 3])
        assert slices_in_memory(source, layer, 3) == slices_in_file(gguf, layer, 3)
        source.settle()
        assert source.totals.wait_s > 0.02
        assert not source.orphaned


@needs_userfault
@pytest.mark.parametrize("direct_io", [None, False])
def test_memory_is_watched_and_left_alone_again_in_turns(
    gguf: GGUFMap, direct_io: bool | None
) -> None:
    """What came straight shares pages with what comes by a frame, and the other way round."""
    layer = gguf.moe_layers[0]
    with streaming(gguf, 8, "userfaultfd", direct_io=direct_io) as source:
        there: list[int] = []
        for expert in (2, 3, 1, 5, 4, 7):
            source.memory.watch(not source.memory.is_watched)
            source.overlap = "userfaultfd" if source.memory.is_watched else "serial"
            there.append(expert)
            if not source.memory.is_watched:
                slices_in_memory(source, layer, 7)  # zeros, as for a graph that is to end
            source.fetch(layer, there)
            for each in there:
                assert slices_in_memory(source, layer, each) == slices_in_file(gguf, layer, each)
            source.settle()
            assert not source.orphaned


@needs_userfault
def test_memory_that_the_system_does_not_watch_stays_as_it_is(gguf: GGUFMap) -> None:
    layer = gguf.moe_layers[0]
    with streaming(gguf, 8, "userfaultfd") as source:
        memory = source.memory
        assert memory.userfault
        memory.watch(False)
        source.overlap = "serial"
        source.fetch(layer, [0, 1])
        parts = list(memory._all_parts())
        parts[-1].window.pages.length += PAGE // 2  # as the system refuses a part of a page
        with pytest.raises(ResourceError, match=r"does not let labkit see.*Open the model with"):
            memory.watch(True)
        parts[-1].window.pages.length -= PAGE // 2
        assert not memory.is_watched
        slices_in_memory(source, layer, 2)  # nobody sleeps on it
        source.fetch(layer, [0, 1, 2])
        for expert in (0, 1, 2):
            assert slices_in_memory(source, layer, expert) == slices_in_file(gguf, layer, expert)


@needs_userfault
def test_whoever_touches_what_nobody_reads_is_woken_and_the_layer_is_forgotten(
    gguf: GGUFMap,
) -> None:
    layer = gguf.moe_layers[1]
    stopped = threading.Event()
    with streaming(gguf, 8, "userfaultfd") as source:
        source.memory.on_orphan = stopped.set
        source.fetch(layer, [0])
        slices_in_memory(source, layer, 1)  # would sleep for ever
        assert stopped.is_set()
        source.settle()
        assert source.orphaned == {layer}
        assert (layer, 0) not in source.policy
        source.fetch(layer, [0, 1])
        for expert in (0, 1):
            assert slices_in_memory(source, layer, expert) == slices_in_file(gguf, layer, expert)
        source.settle()
        assert not source.orphaned


@needs_userfault
def test_whoever_touches_what_came_and_was_taken_away_is_woken(gguf: GGUFMap) -> None:
    layer = gguf.moe_layers[1]
    with streaming(gguf, 8, "userfaultfd") as source:
        for _ in range(20):  # the watcher may look early or late
            source.fetch(layer, [0, 3])
            assert slices_in_memory(source, layer, 0) == slices_in_file(gguf, layer, 0)
            source._forget_reads()  # as after a read that failed, in the same graph
            slices_in_memory(source, layer, 0)  # would sleep for ever
            source.settle()
            assert source.orphaned == {layer}


@pytest.mark.parametrize(
    "overlap", ["serial", "pipeline", pytest.param("userfaultfd", marks=needs_userfault)]
)
def test_a_read_that_does_not_end_is_an_error_and_poisons_the_source(
    gguf: GGUFMap, overlap: Overlap
) -> None:
    layer = gguf.moe_layers[0]
    gate, stopped = threading.Event(), threading.Event()
    with streaming(gguf, 8, overlap, slow_read_s=0.3) as source:
        real = source._reader._read_one

        def stuck(request):
            gate.wait()
            return real(request)

        source._reader._read_one = stuck  # a disk that does not answer
        source.memory.on_orphan = stopped.set
        source.memory.look_for_stuck = source._reader.look_for_stuck
        said = r"expert 2 in layer 0 .*has not ended after 0\.3 sec"
        if overlap == "userfaultfd":
            source.fetch(layer, [2])
            slices_in_memory(source, layer, 2)  # sleeps, and is woken
            assert stopped.is_set()
            with pytest.raises(ReadError, match=said):
                source.settle()
        else:
            with pytest.raises(ReadError, match=said):
                source.fetch(layer, [2])
        assert source._reader.stuck is not None
        gate.set()
        assert source._reader.close()


@needs_userfault
def test_a_read_that_ends_after_compute_was_woken_is_an_error_all_the_same(gguf: GGUFMap) -> None:
    layer = gguf.moe_layers[0]
    gate, stopped = threading.Event(), threading.Event()
    with streaming(gguf, 8, "userfaultfd", slow_read_s=0.3) as source:
        real = source._reader._read_one

        def late(request):
            gate.wait()
            return real(request)

        source._reader._read_one = late
        source.memory.on_orphan = stopped.set
        source.memory.look_for_stuck = source._reader.look_for_stuck
        source.fetch(layer, [2])
        slices_in_memory(source, layer, 2)
        assert stopped.is_set()
        gate.set()
        with pytest.raises(ReadError, match="has not ended"):
            source.settle()


def test_a_read_ahead_that_fails_takes_what_was_asked_for_with_it(gguf: GGUFMap) -> None:
    first, second = gguf.moe_layers[:2]
    gate = threading.Event()
    with streaming(gguf, 4) as source:
        source.fetch(first, [0, 1])
        real = source._reader._read_one

        def failing(request):
            gate.wait()
            raise source._reader._error(request, "the system says: Input/output error")

        source._reader._read_one = failing
        source.prefetch(second, [4, 5], keep=[(first, 0), (first, 1)])
        threading.Timer(0.1, gate.set).start()  # so that the read is still under way when met
        with pytest.raises(ReadError, match="Input/output error"):
            source.fetch(second, [4, 6])
        source._reader._read_one = real
        for expert in (4, 5, 6):
            assert (second, expert) not in source.policy
        source.fetch(second, [4, 6])
        for expert in (4, 6):
            assert slices_in_memory(source, second, expert) == slices_in_file(gguf, second, expert)


def test_a_failed_read_leaves_nothing_that_counts_as_resident(
    gguf: GGUFMap, tmp_path: Path
) -> None:
    layer = gguf.moe_layers[0]
    with streaming(gguf, 8) as source:
        source.fetch(layer, [0])
        real = source._reader._files[0]
        with (tmp_path / "empty").open("wb") as empty:
            pass
        with Path(empty.name).open("rb") as empty:
            source._reader._files[0] = empty.fileno()
            with pytest.raises(ReadError, match="the file ends at byte"):
                source.fetch(layer, [1, 2])
            source._reader._files[0] = real
        assert (layer, 0) in source.policy
        assert (layer, 1) not in source.policy
        source.fetch(layer, [1, 2])
        assert slices_in_memory(source, layer, 2) == slices_in_file(gguf, layer, 2)


def test_what_is_read_ahead_is_a_hit_and_counted_apart(gguf: GGUFMap) -> None:
    first, second = gguf.moe_layers[:2]
    with streaming(gguf, 4) as source:
        source.fetch(first, [0, 1])
        source.prefetch(second, [4, 5], keep=[(first, 0), (first, 1)])
        lookup = source.fetch(second, [4, 6])
        assert lookup.hits == [(second, 4)]
        assert slices_in_memory(source, second, 4) == slices_in_file(gguf, second, 4)
        source.finish_reads()
        source.settle()
        assert source.totals.prefetch_hits == 1
        assert 0 < source.totals.prefetch_bytes < source.totals.bytes_read
