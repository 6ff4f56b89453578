"""The callback: what it answers from memory is what the names say, graph after graph."""

from __future__ import annotations

import ctypes

from labkit.errors import SeamError
from labkit.runtime import ggml
from labkit.runtime.abort import AbortFlag
from labkit.runtime.capture import GraphCapture
from labkit.runtime.hook import RouterHook
from labkit.runtime.node_counter import NodeCounter

_NODE = ctypes.sizeof(ggml.Tensor) + ggml.OBJECT_BYTES


def is_set(abort: AbortFlag | NodeCounter) -> bool:
    """What llama.cpp would be told after its next node."""
    return ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(abort.function.value or 0)(abort.data)


class Graph:
    """Nodes in one piece of memory, as llama.cpp lays them out, named anew for each graph."""

    def __init__(self, n: int) -> None:
        self._memory = (ctypes.c_char * (_NODE * (n + 1)))()
        base = ctypes.addressof(self._memory)
        self.addresses = [base - base % 8 + 8 + i * _NODE for i in range(n)]

    def name(self, names: list[bytes]) -> None:
        for address, name in zip(self.addresses, names, strict=True):
            ggml.tensor_at(address).name = name


def answers(hook: RouterHook, graph: Graph, seen: list[int]) -> list[bool]:
    seen.clear()
    hook.begin(len(graph.addresses))
    return [hook.callback(address) for address in graph.addresses]


def watching() -> tuple[RouterHook, list[int]]:
    """A hook that watches layer 0, and the list of addresses that it had to look at."""
    hook = RouterHook(lambda *_: None)
    hook.watch(GraphCapture(sync_nodes={b"ffn_moe_weights-0": 0}))
    seen: list[int] = []
    look = hook._dull._on_node

    def note(address: int) -> bool:
        seen.append(address)
        return look(address)

    hook._dull._on_node = note
    return hook, seen


def test_dull_nodes_are_answered_without_looking_and_stay_so() -> None:
    graph = Graph(6)
    like = b"ffn_moe_weights_norm-0"
    graph.name([b"inp_embd", b"attn_norm-0", b"ffn_moe_weights-0", like, b"", b"ffn_out-0"])
    hook, seen = watching()
    for count in range(4):
        assert answers(hook, graph, seen) == [False, False, True, False, False, False]
        assert seen == graph.addresses[2:4] if count == 0 else [graph.addresses[2]]


def test_a_look_alike_that_becomes_the_stop_is_seen() -> None:
    graph = Graph(3)
    hook, seen = watching()
    names = [b"inp_embd", b"ffn_moe_weights-0", b"ffn_moe_weights_norm-0"]
    for order in ([0, 1, 2], [0, 2, 1]) * 3:
        graph.name([names[i] for i in order])
        assert answers(hook, graph, seen).index(True) == order.index(1)


def test_graphs_of_another_shape_begin_elsewhere() -> None:
    graph = Graph(6)
    names = [b"inp_embd", b"a", b"ffn_moe_weights-0", b"b", b"c", b"d"]
    hook, _ = watching()
    for first in (0, 1, 0, 2, 1, 0):
        graph.name([*names[6 - first :], *names[: 6 - first]])
        hook.begin(("shape", first))
        found = [hook.callback(address) for address in graph.addresses[first:]]
        assert found.index(True) == 2


def test_a_graph_built_anew_at_the_same_place_is_seen_as_it_is_now() -> None:
    graph = Graph(6)
    hook, seen = watching()
    layouts = [
        ([b"inp_embd", b"a", b"ffn_moe_weights-0", b"b", b"c", b"d"], 2),
        ([b"inp_embd", b"a", b"b", b"c", b"ffn_moe_weights-0", b"d"], 4),
        ([b"inp_embd", b"ffn_moe_weights-0", b"b", b"c", b"x", b"d"], 1),
    ]
    for names, stop in layouts * 3:
        graph.name(names)
        assert [i for i, yes in enumerate(answers(hook, graph, seen)) if yes] == [stop]


def test_an_error_in_a_stop_sets_the_abort_flag_and_is_kept() -> None:
    graph = Graph(2)
    graph.name([b"inp_embd", b"ffn_moe_weights-0"])
    hook, _ = watching()
    hook.begin()
    assert [hook.callback(address) for address in graph.addresses] == [False, True]
    assert hook.error is None
    assert hook.callback(graph.addresses[1]) is True  # stopped there; no topk was seen before
    assert isinstance(hook.error, SeamError)
    assert is_set(hook.abort)
