"""`GraphPlan`: after which of a graph's nodes Python must run, learned from the graph itself.

A graph that llama.cpp builds once and uses again computes the same nodes in the same memory every
time. So its first run, in which it is stopped by name at each place of interest, tells after how
many nodes these places come; from then on counting is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from labkit.runtime import ggml


@dataclass(slots=True)
class LayerNodes:
    """Where a layer's routing lies, and how many nodes had been computed at each step of it.

    When n nodes are counted, the thread that counts has done its part of the n-th and others may
    not; all before it are whole.

    Attributes:
        layer: the layer.
        topk, weights, logits: addresses of the nodes with its choice, its weights, its logits.
        chosen, routed: the count when all of the choice, of the weights is there for sure is one
            more than this.
        used: the count with the layer's first product by expert, 0 if that was not seen.
        down: the count with the last node before its down projections, 0 if there is none.
    """

    layer: int
    topk: int = 0
    weights: int = 0
    logits: int = 0
    chosen: int = 0
    routed: int = 0
    used: int = 0
    down: int = 0


@dataclass(slots=True)
class Stop:
    """A place where Python runs, with what it does there.

    Attributes:
        count: after how many nodes.
        nodes: of which layer.
        choice: (1, k) int32, the layer's choice in llama.cpp's memory, if it is read here.
        weights: (1, k) float32, its weights, if they are read here.
        down: whether the layer is about to need its down projections.
    """

    count: int
    nodes: LayerNodes
    choice: np.ndarray | None = None
    weights: np.ndarray | None = None
    down: bool = False


@dataclass(slots=True)
class GraphPlan:
    """The stops of a graph of one token.

    Attributes:
        stops: in the order of their counts.
        counts: their counts, and one more than the graph has nodes.
    """

    stops: list[Stop]
    counts: list[int]


def plan_graph(layers: list[LayerNodes], n_nodes: int, *, with_down: bool) -> GraphPlan | None:
    """The plan of a graph of one token and `n_nodes` computed nodes.

    `with_down` stops it a second time in each layer, before its down projections.

    None if a layer leaves no node at which its choice is there and its experts are not in use yet.
    """
    stops: list[Stop] = []
    for nodes in layers:
        choice, weights = choice_view(nodes.topk), weights_view(nodes.weights, nodes.topk)
        if nodes.routed + 1 < nodes.used:
            stops.append(Stop(nodes.routed + 1, nodes, choice, weights))
        elif nodes.chosen < nodes.routed < nodes.used:
            stops.append(Stop(nodes.routed, nodes, choice))
            stops.append(Stop(nodes.used, nodes, weights=weights))
        else:
            return None
        if with_down and nodes.down:
            stops.append(Stop(nodes.down, nodes, down=True))
    counts = [stop.count for stop in stops] + [n_nodes + 1]
    if any(late <= early for early, late in pairwise(counts)):
        return None
    return GraphPlan(stops, counts)


def choice_view(address: int) -> np.ndarray:
    """(n_tokens, k) int32 ids of a `ffn_moe_topk` node, in place, by its strides.

    The node is a view of the whole argsort: its rows lie n_expert apart, not k.
    """
    (k, n_tokens, *_), (step, row, *_) = ggml.extents(address), ggml.strides(address)
    return ggml.matrix_view(address, np.int32, (n_tokens, k), (row, step))


def weights_view(address: int, topk: int) -> np.ndarray:
    """(n_tokens, k) float32 of a weights node shaped (1, k, n) or (k, n), in place.

    NaN for a node of any other shape or type.
    """
    k, n_tokens, *_ = ggml.extents(topk)
    if ggml.is_float32(address):
        ne, nb = ggml.extents(address), ggml.strides(address)
        if ne[:3] == [1, k, n_tokens]:
            return ggml.matrix_view(address, np.float32, (n_tokens, k), (nb[2], nb[1]))
        if ne[:3] == [k, n_tokens, 1]:
            return ggml.matrix_view(address, np.float32, (n_tokens, k), (nb[1], nb[0]))
    return np.full((n_tokens, k), np.nan, np.float32)
