"""What one graph of llama.cpp tells before it computes: where its weights live, how it routes."""

from __future__ import annotations

from dataclasses import dataclass, field

from labkit.architectures import parse_expert_tensor
from labkit.errors import StreamingRefusedError
from labkit.runtime import ggml

TOPK_PREFIX = b"ffn_moe_topk-"
LOGITS_PREFIX = b"ffn_moe_logits-"
WEIGHTS_PREFIX = b"ffn_moe_weights"
_NO_OP = 0  # GGML_OP_NONE: a weight or an input


@dataclass
class GraphCapture:
    """Filled with `add`, a node at a time in the graph's order, by a callback that asks for none.

    Attributes:
        experts: address of each expert tensor, by its name in the file.
        dense: addresses of every other tensor that is no result of the graph, by its name; a
            weight that is used in two roles (tied embeddings) has two.
        sync_nodes: name of the node after which a layer's routing is known -> layer. It is the
            last of the layer's `ffn_moe_weights...` nodes, so that one stop gives ids and weights.
        topk_nodes: name of the node with the layer's choice -> layer.
        product_nodes: name of the layer's first product by expert -> layer, where it has a name
            of its own.
        down_nodes: name of the node just before a layer's down projections are computed -> layer.
            A layer where that node has no name of its own is left out.
        nodes: addresses of all nodes in the graph's order; they hold until the next graph is built.
    """

    experts: dict[str, int] = field(default_factory=dict)
    dense: dict[str, set[int]] = field(default_factory=dict)
    sync_nodes: dict[bytes, int] = field(default_factory=dict)
    topk_nodes: dict[bytes, int] = field(default_factory=dict)
    product_nodes: dict[bytes, int] = field(default_factory=dict)
    down_nodes: dict[bytes, int] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)
    _previous: bytes = b""
    _names: set[bytes] = field(default_factory=set)
    _routing_node: bytes = b""
    _topk: int = 0
    _layers_done: set[int] = field(default_factory=set)

    def add(self, address: int) -> None:
        """Note one node.

        Raises:
            StreamingRefusedError: the graph uses expert weights in a way that cannot be streamed.
        """
        self.nodes.append(address)
        node = ggml.tensor_at(address)
        name = node.name
        if name.startswith(TOPK_PREFIX):
            self._topk, self._routing_node = address, name
        elif name.startswith(WEIGHTS_PREFIX):
            self._routing_node = name
        is_product = node.op == ggml.op_code("MUL_MAT_ID")
        for slot, source in enumerate(node.src):
            if not source:
                continue
            leaf = ggml.tensor_at(source)
            origin = ggml.tensor_at(leaf.view_src) if leaf.view_src else leaf
            origin_name = origin.name.decode(errors="replace")
            if parsed := parse_expert_tensor(origin_name):
                if parsed[1] == "down":
                    self._note_down(parsed[0])
                if not (is_product and slot == 0):
                    raise StreamingRefusedError(
                        f"{origin_name} is used by the node {name.decode(errors='replace')}, which "
                        "is no product by expert: it reads all experts, so none can be left out."
                    )
                self._note_product(node, origin_name, source, parsed[0])
            elif leaf.op == _NO_OP and not leaf.view_src:
                self.dense.setdefault(origin_name, set()).add(source)
        if name in self._names:
            self.down_nodes.pop(name, None)
        self._names.add(name)
        self._previous = name

    def _note_product(self, node: ggml.Tensor, tensor_name: str, address: int, layer: int) -> None:
        self.experts[tensor_name] = address
        if layer in self._layers_done:
            return
        if node.src[2] != self._topk:
            raise StreamingRefusedError(
                f"{tensor_name} takes its expert ids from a node that labkit does not know as the "
                "router's choice (ffn_moe_topk), so it cannot know which experts to read."
            )
        self._layers_done.add(layer)
        self.sync_nodes[self._routing_node] = layer
        self.topk_nodes[ggml.tensor_at(self._topk).name] = layer
        if self._is_named(node.name, layer):
            self.product_nodes[node.name] = layer

    def _note_down(self, layer: int) -> None:
        if self._is_named(self._previous, layer) and layer not in self.down_nodes.values():
            self.down_nodes[self._previous] = layer

    @staticmethod
    def _is_named(name: bytes, layer: int) -> bool:
        """Names that llama.cpp gives end in the layer; others count the nodes of one graph."""
        return name.endswith(b"-%d" % layer)
