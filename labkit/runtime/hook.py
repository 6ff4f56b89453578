"""`RouterHook`: llama.cpp's graph callback, from which a layer's routing is read live.

llama.cpp asks about every node of a graph, thousands a token, so the common answer must cost
nearly nothing. It comes from a dictionary of the addresses of dull nodes: the callback that C calls
is the dictionary's own lookup, and Python code runs only for what is not in it (`dull_nodes`).

Nothing may leave the callback: an exception would be lost in C, and stopping the graph there would
leave wrong logits without a word. So an error is kept, the abort flag is set, the graph ends at
its next node, and `llama_decode` says that it was aborted.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import numpy as np

from labkit.errors import SeamError
from labkit.runtime import ggml
from labkit.runtime.capture import LOGITS_PREFIX, TOPK_PREFIX, GraphCapture
from labkit.runtime.dull_nodes import DullNodes

OnRouting = Callable[[int, np.ndarray, np.ndarray], None]
"""(layer, experts (n_tokens, k) int32, weights (n_tokens, k) float32 or NaN)"""
OnWait = Callable[[int], None]
"""(layer): called before the layer's down projections are computed"""


class AbortFlag:
    """A byte that llama.cpp looks at before every node, without a call into Python.

    llama.cpp calls a function with a pointer and stops if it returns true; libc's `strlen` on
    this buffer is such a function: the string is empty until the flag is set.
    """

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(2)
        libc = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        self.function = ctypes.cast(libc.strlen, ctypes.c_void_p)
        self.data = ctypes.cast(self._buffer, ctypes.c_void_p)

    def set(self) -> None:
        """Ask llama.cpp to stop at the next node. Safe from any thread and signal handler."""
        self._buffer[0] = b"x"

    def clear(self) -> None:
        """Let graphs run again."""
        self._buffer[0] = b"\0"


class RouterHook:
    """Calls `on_routing` when a layer has chosen, before its experts are used.

    Args:
        on_routing: gets a layer's choice.
        on_wait: gets a layer that is about to use its last projection, in graphs that stop there
            (`stop_before_down`).

    Attributes:
        callback: what to give llama.cpp; the hook owns it and must outlive the context.
        abort: stops the running graph.
        error: what `on_routing` raised in the last graph.
        stop_before_down: whether graphs stop a second time in each layer.
        router_logits: address of the layer's router logits node while `on_routing` runs, 0 where
            the graph shows none.
    """

    def __init__(self, on_routing: OnRouting, on_wait: OnWait | None = None) -> None:
        self._on_routing = on_routing
        self._on_wait = on_wait
        self._routing_nodes: dict[bytes, int] = {}
        self._down_nodes: dict[bytes, int] = {}
        self._capture: GraphCapture | None = None
        self._last_layer = -1
        self._routed: set[int] = set()
        self._waited: set[int] = set()
        self._topk = 0
        self._stopped_at = self._stop_layer = 0
        self._stop_is_down = False
        self.router_logits = 0
        self.stop_before_down = False
        self.abort = AbortFlag()
        self.error: BaseException | None = None
        self._dull = DullNodes(self._on_node)
        # C passes (node, ask, user data) in registers; taking the first alone lets the lookup
        # itself be the callback. That `ask` is over is known: the same node comes a second time.
        # The hook and its callback form a cycle that only the collector ends; the session that
        # owns the hook outlives the context.
        prototype = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_size_t)
        self.callback = prototype(self._dull.__getitem__)

    def begin(self, shape: object = None) -> None:
        """Call before each graph; graphs of one `shape` are built in the same way."""
        self._last_layer = -1
        self._routed.clear()
        self._waited.clear()
        self._stopped_at = self._topk = self.router_logits = 0
        self.error = None
        self._dull.begin(shape)

    def layers_missed(self) -> set[int]:
        """Layers whose routing did not come through in the graph that just ended.

        None, unless something raised inside the callback before it could catch it, as a signal
        handler may: such an exception is lost in C, and the layer computed from what lay there.
        """
        missed = set(self._routing_nodes.values()) - self._routed
        if self.stop_before_down:
            missed |= set(self._down_nodes.values()) - self._waited
        return missed

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
        self._routing_nodes = captured.sync_nodes
        self._down_nodes = captured.down_nodes
        prefixes = (TOPK_PREFIX, LOGITS_PREFIX)
        self._dull.watch([*self._routing_nodes, *self._down_nodes], prefixes)
        return captured

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
        layer = self._routing_nodes.get(name)
        # A block that is built twice in a layer (grovemoe's chunks) routes the same way again.
        if layer is not None and layer != self._last_layer:
            self._stop_layer, self._stop_is_down = layer, False
        elif self.stop_before_down and (layer := self._down_nodes.get(name)) is not None:
            self._stop_layer, self._stop_is_down = layer, True
        else:
            if name.startswith(TOPK_PREFIX):
                self._topk = address
            elif name.startswith(LOGITS_PREFIX):
                self.router_logits = address
            else:
                self._dull.look_alike(address, name)
            return False
        self._stopped_at = address
        return True

    def _at_stop(self, address: int) -> None:
        layer = self._stop_layer
        if self._stop_is_down:
            if self._on_wait:
                self._on_wait(layer)
            self._waited.add(layer)
            return
        if not self._topk:
            raise SeamError(
                f"The graph showed layer {layer}'s routing weights but not its choice "
                f"(ffn_moe_topk): {ggml.version()} names its nodes in a way unknown to labkit."
            )
        self._last_layer = layer
        self._routed.add(layer)
        experts = read_experts(self._topk)
        self._on_routing(layer, experts, read_weights(address, *experts.shape))
        self.router_logits = 0


def read_experts(address: int) -> np.ndarray:
    """(n_tokens, k) int32 ids of a `ffn_moe_topk` node, read by its strides.

    The node is a view of the whole argsort: its rows lie n_expert apart, not k.
    """
    (k, n_tokens, *_), (step, row, *_) = ggml.extents(address), ggml.strides(address)
    return ggml.read_matrix(address, np.int32, (n_tokens, k), (row, step))


def read_weights(address: int, n_tokens: int, k: int) -> np.ndarray:
    """(n_tokens, k) float32 of a weights node shaped (1, k, n) or (k, n); NaN for any other."""
    if ggml.is_float32(address):
        ne, nb = ggml.extents(address), ggml.strides(address)
        if ne[:3] == [1, k, n_tokens]:
            return ggml.read_matrix(address, np.float32, (n_tokens, k), (nb[2], nb[1]))
        if ne[:3] == [k, n_tokens, 1]:
            return ggml.read_matrix(address, np.float32, (n_tokens, k), (nb[1], nb[0]))
    return np.full((n_tokens, k), np.nan, np.float32)
