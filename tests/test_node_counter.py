"""Counting computed nodes in libc: where Python is called, and what ends a graph."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest

from labkit.runtime import node_counter
from labkit.runtime.node_counter import NodeCounter

pytestmark = pytest.mark.skipif(
    not node_counter.is_available(), reason="this libc cannot count nodes"
)


class Run:
    """A counter, what it called, and llama.cpp's side of it."""

    def __init__(self) -> None:
        self.reached: list[tuple[int, int]] = []
        self.n_nodes = 0
        self.counter = NodeCounter(lambda index: self.reached.append((index, self.n_nodes)))
        prototype = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
        self._tick = prototype(self.counter.function.value or 0)

    def begin(self, stops: list[int] | None) -> None:
        self.counter.begin(stops)
        self.reached.clear()
        self.n_nodes = 0

    def nodes(self, n: int) -> bool:
        """Compute at most n nodes; whether one of them was the last because of the flag."""
        for _ in range(n):
            self.n_nodes += 1
            if self._tick(self.counter.data):
                return True
        return False


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    made.counter.close()


def test_every_node_is_counted_where_no_stops_are_given(run: Run) -> None:
    for n in (1, 700, 3):
        run.begin(None)
        assert not run.nodes(n)
        assert run.counter.count == n
    assert run.reached == []


@pytest.mark.parametrize("stops", [[1, 2, 3, 4], [7, 9], [1, 5000, 9000], [12345, 12346]])
def test_stops_are_reached_at_their_nodes_graph_after_graph(run: Run, stops: list[int]) -> None:
    for _ in range(3):
        run.begin(stops)
        assert not run.nodes(stops[-1] - 1)
        assert run.counter.end()
        assert run.reached == list(enumerate(stops[:-1]))
        assert not run.counter.overran


def test_a_graph_that_has_fewer_nodes_than_told_is_noticed(run: Run) -> None:
    for n in (0, 1, 2, 4, 8):
        run.begin([3, 10])
        assert not run.nodes(n)
        assert not run.counter.end()
    run.begin([3, 10])
    assert not run.nodes(9)
    assert run.counter.end()


def test_a_graph_that_has_more_nodes_than_told_is_stopped(run: Run) -> None:
    run.begin([3, 10])
    assert run.nodes(30)
    assert run.n_nodes == 10
    assert run.counter.overran
    run.begin([3, 10])
    assert not run.counter.overran
    assert not run.nodes(9)
    assert run.counter.end()


@pytest.mark.parametrize("stops", [None, [2, 50], [40, 50]])
def test_the_flag_stops_a_graph_at_its_next_node(run: Run, stops: list[int] | None) -> None:
    run.begin(stops)
    assert not run.nodes(20)
    run.counter.set()
    assert run.nodes(1)
    run.begin(stops)
    assert run.nodes(1), "the flag stays until it is cleared"
    run.counter.clear()
    run.begin(stops)
    assert not run.nodes(49)


def test_the_flag_can_be_set_from_within_a_stop(run: Run) -> None:
    def stop(_: int) -> None:
        run.counter.set()

    run.counter._on_count = stop
    run.begin([5, 50])
    assert run.nodes(20)
    assert run.n_nodes == 5


def test_what_is_raised_out_of_a_stop_ends_the_graph(run: Run) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("lost in C")

    keep: Callable[[int], None] = run.counter._on_count
    run.counter._on_count = fail
    run.begin([5, 50])
    assert run.nodes(20)
    assert run.n_nodes == 5
    run.counter._on_count = keep
    run.counter.clear()
    run.begin([5, 50])
    assert not run.nodes(49)
    assert run.counter.end()
