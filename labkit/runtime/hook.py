"""`RouterHook`: llama.cpp's graph callback, from which a layer's routing is read live.

llama.cpp asks about every node of a graph, thousands a token, so the common answer must cost
nearly nothing: one word of the node's name is looked at through a view of memory. Only the node
after which a layer's routing is known stops the graph.

Nothing may leave the callback: an exception would be lost in C, and stopping the graph there would
leave wrong logits without a word. So an error is kept, the abort flag is set, the graph ends at
its next node, and `llama_decode` says that it was aborted.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Literal

import numpy as np

from labkit.runtime import ggml
from labkit.runtime.capture import TOPK_PREFIX, GraphCapture

# Bytes 8 to 12 of a name decide: `ffn_moe_topk-..` and `ffn_moe_weights..`.
_SECOND_WORD = ggml.NAME_OFFSET + 8
_FIVE_BYTES = (1 << 40) - 1
_INTERESTING = frozenset(int.from_bytes(text, "little") for text in (b"topk-", b"weigh"))

OnRouting = Callable[[int, np.ndarray, np.ndarray], None]
"""(layer, experts (n_tokens, k) int32, weights (n_tokens, k) float32 or NaN)"""


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

    Attributes:
        callback: what to give llama.cpp; the hook owns it and must outlive the context.
        abort: stops the running graph.
        error: what `on_routing` raised in the last graph.
    """

    def __init__(self, on_routing: OnRouting) -> None:
        self._on_routing = on_routing
        self._sync_nodes: dict[bytes, int] = {}
        self._capture: GraphCapture | None = None
        self._last_layer = -1
        self._routed: set[int] = set()
        self._topk = 0
        self.abort = AbortFlag()
        self.error: BaseException | None = None
        prototype = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_size_t, ctypes.c_bool, ctypes.c_size_t)
        # Bound late through self, so the hook and its callback form a cycle that only the
        # collector ends; the session that owns the hook outlives the context.
        self.callback = prototype(self._make_on_node())

    def begin(self) -> None:
        """Call before each graph."""
        self._last_layer = -1
        self._routed.clear()
        self.error = None

    def layers_missed(self) -> set[int]:
        """Layers whose routing did not come through in the graph that just ended.

        None, unless something raised inside the callback before it could catch it, as a signal
        handler may: such an exception is lost in C, and the layer computed from what lay there.
        """
        return set(self._sync_nodes.values()) - self._routed

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
        self._sync_nodes = captured.sync_nodes
        return captured

    def _make_on_node(self) -> Callable[[int, bool, int], bool]:
        words = ggml.all_memory("Q")

        def on_node(address: int, ask: bool, _user_data: int) -> bool:
            if (
                words[(address + _SECOND_WORD) >> 3] & _FIVE_BYTES not in _INTERESTING
                and self._capture is None
            ):
                return False
            try:
                return self._on_routing_node(address, ask)
            except BaseException as error:
                self.error = self.error or error
                self.abort.set()
                return True

        return on_node

    def _on_routing_node(self, address: int, ask: bool) -> bool:
        if self._capture is not None:
            self._capture.add(address)
            return False
        name = ctypes.string_at(address + ggml.NAME_OFFSET)
        if ask and name.startswith(TOPK_PREFIX):
            self._topk = address
        layer = self._sync_nodes.get(name)
        # A block that is built twice in a layer (grovemoe's chunks) routes the same way again.
        if layer is None or layer == self._last_layer:
            return False
        if not ask:
            self._last_layer = layer
            self._routed.add(layer)
            experts = read_experts(self._topk)
            self._on_routing(layer, experts, read_weights(address, *experts.shape))
        return True


def read_experts(address: int) -> np.ndarray:
    """(n_tokens, k) int32 ids of a `ffn_moe_topk` node, read by its strides.

    The node is a view of the whole argsort: its rows lie n_expert apart, not k.
    """
    node = ggml.tensor_at(address)
    k, n_tokens = node.ne[0], node.ne[1]
    return _read(node.data, "i", np.int32, (n_tokens, k), (node.nb[1], node.nb[0]))


def read_weights(address: int, n_tokens: int, k: int) -> np.ndarray:
    """(n_tokens, k) float32 of a weights node shaped (1, k, n) or (k, n); NaN for any other."""
    node = ggml.tensor_at(address)
    ne, nb = list(node.ne), list(node.nb)
    if node.type == 0 and ne[:3] == [1, k, n_tokens]:
        return _read(node.data, "f", np.float32, (n_tokens, k), (nb[2], nb[1]))
    if node.type == 0 and ne[:3] == [k, n_tokens, 1]:
        return _read(node.data, "f", np.float32, (n_tokens, k), (nb[1], nb[0]))
    return np.full((n_tokens, k), np.nan, np.float32)


def _read(
    address: int,
    code: Literal["i", "f"],
    dtype: type,
    shape: tuple[int, int],
    strides: tuple[int, int],
) -> np.ndarray:
    extent = (shape[0] - 1) * strides[0] + (shape[1] - 1) * strides[1] + 4
    raw = ggml.all_memory(code)[address >> 2 : (address + extent) >> 2]
    flat = np.frombuffer(raw, dtype=dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, strides).copy()
