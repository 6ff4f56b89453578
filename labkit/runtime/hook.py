"""`RouterHook`: from which a layer's routing is read live, while llama.cpp computes its graph.

llama.cpp tells of a graph in two ways. Its eval callback is asked about every node, thousands a
token, and can stop the graph; stopping costs it a start and an end of all threads. Its abort
callback is called after each node, on the thread that runs the graph. A graph that is new is
stopped by name with the first (`dull_nodes` answers for all other nodes); its run tells how many
nodes lie between the places of interest. While llama.cpp uses that graph again the first callback
is off and the second counts to those places (`node_counter`, `graph_plan`). A graph that is built
anew switches the first on again by itself.

Nothing may leave a callback: an exception would be lost in C, and stopping the graph there would
leave wrong logits without a word. So an error is kept, the abort flag is set, the graph ends at
its next node, and `llama_decode` says that it was aborted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Literal

import numpy as np

from labkit.errors import SeamError
from labkit.runtime import ggml, node_counter
from labkit.runtime.abort import AbortFlag
from labkit.runtime.capture import LOGITS_PREFIX, TOPK_PREFIX, GraphCapture
from labkit.runtime.dull_nodes import DullNodes
from labkit.runtime.graph_plan import (
    GraphPlan,
    LayerNodes,
    choice_view,
    plan_graph,
    weights_view,
)
from labkit.runtime.node_counter import NodeCounter

OnRouting = Callable[[int, np.ndarray], None]
"""(layer, experts (n_tokens, k) int32 in llama.cpp's memory, there until the call returns)"""
OnWeights = Callable[[int, np.ndarray], None]
"""(layer, weights (n_tokens, k) float32 or NaN, likewise): follows the layer's choice"""
OnWait = Callable[[int], None]
"""(layer): called before the layer's down projections are computed"""

_Place = Literal["choice", "routing", "product", "down"]
_NEVER = [1 << 60]


class RouterHook:
    """Calls `on_routing` when a layer has chosen, before its experts are used.

    Args:
        on_routing: gets a layer's choice.
        on_weights: gets its weights, when they are there.
        on_wait: gets a layer that is about to use its last projection, in graphs that stop there
            (`stop_before_down`).

    Attributes:
        callback: what to give llama.cpp as its eval callback; the hook owns it and must outlive
            the context.
        abort: stops the running graph; its function and data are llama.cpp's abort callback.
        error: what a callback raised in the last graph. If it is no error of labkit, whoever is
            called back may be half done.
        missed: layers whose routing did not come through in the last graph. None, unless something
            raised inside a callback before it could be caught, as a signal handler may, or the
            graph was not the one that was learned: the layers computed from what lay there.
        stop_before_down: whether graphs stop a second time in each layer.
        router_logits: address of the layer's router logits node while `on_routing` runs, 0 where
            the graph shows none.
    """

    def __init__(
        self,
        on_routing: OnRouting,
        on_weights: OnWeights | None = None,
        on_wait: OnWait | None = None,
    ) -> None:
        self._on_routing = on_routing
        self._on_weights = on_weights
        self._on_wait = on_wait
        self._capture: GraphCapture | None = None
        self._places: dict[bytes, tuple[_Place, int]] = {}
        self._routed: set[int] = set()
        self._waited: set[int] = set()
        self._topk = self._logits = self._stopped_at = 0
        self._stop: tuple[_Place, int] = ("routing", -1)
        self._learned: dict[int, LayerNodes] = {}
        self._learning = False
        self._plans: dict[bool, GraphPlan | None] = {}  # by `stop_before_down`
        self._plan: GraphPlan | None = None  # of the graph that is counted
        self._listen: Callable[[bool], None] | None = None
        self.router_logits = 0
        self.stop_before_down = False
        self.error: BaseException | None = None
        self.missed: set[int] = set()
        can_count = node_counter.is_available()
        self._counter = NodeCounter(self._on_count) if can_count else None
        self.abort: AbortFlag | NodeCounter = self._counter or AbortFlag()
        self._dull = DullNodes(self._on_node, self._on_first_node)
        # C passes (node, ask, user data) in registers; taking the first alone lets the lookup
        # itself be the callback. That `ask` is over is known: the same node comes a second time.
        # The hook and its callback form a cycle that only the collector ends; the session that
        # owns the hook outlives the context.
        prototype = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_size_t)
        self.callback = prototype(self._dull.__getitem__)

    def attach(self, listen: Callable[[bool], None] | None) -> None:
        """`listen` switches the eval callback on or off until the next graph is built.

        Without it every graph is stopped by name.
        """
        self._listen = listen if self._counter else None

    def begin(self, shape: object = None, *, n_tokens: int = 0) -> None:
        """Call before each graph; graphs of one `shape` are built in the same way."""
        self._routed.clear()
        self._waited.clear()
        self._learned = {}
        self._topk = self._logits = self._stopped_at = self.router_logits = 0
        self.error = None
        single = n_tokens == 1
        self._plan = self._plans.get(self.stop_before_down) if single else None
        if self._plans and not self._plan:
            self._forget_plans()
        self._learning = single and self._listen is not None
        self._dull.begin(None if self._plan else shape)
        if self._counter:
            unplanned = None if self._learning else _NEVER
            self._counter.begin(self._plan.counts if self._plan else unplanned)

    def end(self, *, whole: bool) -> None:
        """Call after each graph; `whole` if it ran to its end."""
        if self._counter:
            self.error = self.error or self._counter.failure
        if self._plan:
            self._end_counted(whole)
            return
        self.missed = set()
        if not whole:
            return
        self.missed = self._layers("routing") - self._routed
        if self.stop_before_down:
            self.missed |= self._layers("down") - self._waited
        if self._learning and not self.missed and not self.error:
            self._make_plans()

    def _end_counted(self, whole: bool) -> None:
        assert self._counter
        as_planned = self._counter.end() if whole else not self._counter.overran
        self.missed = set() if as_planned else self._layers("routing")
        if not as_planned:
            self._forget_plans()
            self._listen = None

    def _make_plans(self) -> None:
        assert self._counter
        assert self._listen
        layers, n_nodes = [*self._learned.values()], self._counter.count
        self._plans = {down: plan_graph(layers, n_nodes, with_down=down) for down in (False, True)}
        self._listen(False)

    def _forget_plans(self) -> None:
        # In this order: a graph with a plan that is listened to is recognised as a new one.
        if self._listen:
            self._listen(True)
        self._plans = {}

    def capture(self, decode: Callable[[], object]) -> GraphCapture:
        """Note the nodes of the graph that `decode` builds; then use its routing nodes."""
        self._capture = captured = GraphCapture()
        self.begin()
        try:
            decode()
        finally:
            self._capture = None
        if self.error:
            raise self.error
        self.watch(captured)
        return captured

    def watch(self, captured: GraphCapture) -> None:
        """Use the nodes that were found."""
        self._places = {}
        groups: dict[_Place, dict[bytes, int]] = {
            "choice": captured.topk_nodes,
            "product": captured.product_nodes,
            "down": captured.down_nodes,
            "routing": captured.sync_nodes,
        }
        for place, nodes in groups.items():
            self._places |= {name: (place, layer) for name, layer in nodes.items()}
        self._dull.watch(list(self._places), (TOPK_PREFIX, LOGITS_PREFIX))

    def close(self) -> None:
        """Nothing calls the hook any more."""
        self.abort.close()

    def _layers(self, place: _Place) -> set[int]:
        return {layer for at, layer in self._places.values() if at == place}

    def _on_first_node(self) -> None:
        """llama.cpp asks about a graph: if it was to be counted, it is a new one instead."""
        self._plans = {}
        if self._plan and self._counter:
            self._plan = None
            self._counter.begin()

    def _on_node(self, address: int) -> bool:
        """Whether to stop after this node; called a second time once the graph stopped there."""
        try:
            if self._capture is not None:
                self._capture.add(address)
                return False
            if address == self._stopped_at:
                self._stopped_at = 0
                self._at_stop(address)
                return True
            return self._is_stop(address)
        except BaseException as error:
            self.error = self.error or error
            self.abort.set()
            return True

    def _is_stop(self, address: int) -> bool:
        name = ctypes.string_at(address + ggml.NAME_OFFSET)
        stop = self._places.get(name)
        if name.startswith(TOPK_PREFIX):
            self._topk = address
        elif name.startswith(LOGITS_PREFIX):
            self._logits = address
        elif stop is None:
            self._dull.look_alike(address, name)
        if stop is None or not self._stops_at(*stop):
            return False
        self._stop, self._stopped_at = stop, address
        return True

    def _stops_at(self, place: _Place, layer: int) -> bool:
        if place == "down":
            return self.stop_before_down or self._learning
        # A block that is built twice in a layer (grovemoe's chunks) routes the same way again.
        if place == "routing":
            return layer not in self._routed
        if place == "choice":
            return self._learning and layer not in self._learned
        return self._learning and layer in self._routed and not self._learned[layer].used

    def _at_stop(self, address: int) -> None:
        place, layer = self._stop
        count = self._counter.count if self._counter else 0
        nodes = self._learned.setdefault(layer, LayerNodes(layer, chosen=count))
        if place == "routing":
            nodes.topk, nodes.logits, nodes.weights = self._topk, self._logits, address
            nodes.routed = count
            self._route(nodes)
        elif place == "product":
            nodes.used = count
        elif place == "down":
            nodes.down = count
            self._waited.add(layer)
            if self.stop_before_down and self._on_wait:
                self._on_wait(layer)

    def _route(self, nodes: LayerNodes) -> None:
        layer = nodes.layer
        if not nodes.topk:
            raise SeamError(
                f"The graph showed layer {layer}'s routing weights but not its choice "
                f"(ffn_moe_topk): {ggml.version()} names its nodes in a way unknown to labkit."
            )
        self._routed.add(layer)
        self.router_logits = nodes.logits
        self._on_routing(layer, choice_view(nodes.topk))
        self.router_logits = self._logits = 0
        if self._on_weights:
            self._on_weights(layer, weights_view(nodes.weights, nodes.topk))

    def _on_count(self, index: int) -> None:
        """A graph that runs again has come to a stop of its plan."""
        try:
            assert self._plan
            stop = self._plan.stops[index]
            if stop.choice is not None:
                self.router_logits = stop.nodes.logits
                self._on_routing(stop.nodes.layer, stop.choice)
                self.router_logits = 0
            if stop.weights is not None and self._on_weights:
                self._on_weights(stop.nodes.layer, stop.weights)
            if stop.down and self._on_wait:
                self._on_wait(stop.nodes.layer)
        except BaseException as error:
            self.error = self.error or error
            self.abort.set()
