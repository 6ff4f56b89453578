"""`NextRouter`: the next layer's choice, from its own router on what this layer's router saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, pairwise

import numpy as np
import pandas as pd

from labkit.architectures import parse_expert_tensor
from labkit.errors import OptionError
from labkit.gguf_map import GGUFMap
from labkit.runtime import ggml
from labkit.runtime.capture import TOPK_PREFIX, GraphCapture
from labkit.runtime.router_formula import RouterFormula, read_formula

FORESEEN: tuple[str, ...] = (
    *("afmoe", "arctic", "bailingmoe", "bailingmoe2", "bailingmoe3", "cohere2moe", "dbrx"),
    *("deepseek", "deepseek2", "deepseek2-ocr", "deepseek32", "deepseek4", "dflash", "dots1"),
    *("dots3note", "ernie4_5-moe", "exaone-moe", "glm-dsa", "glm4moe", "glm5-next", "gpt-oss"),
    *("granite", "granite_swa", "granitehybrid", "granitemoe", "grok", "grovemoe", "hunyuan-moe"),
    *("hy_v3", "hy_v4", "jamba", "kimi-k3", "kimi-linear", "laguna", "lfm2moe", "llada-moe"),
    *("llama", "llama4", "maple", "mellum", "mimo2", "minicpm", "minimax-01", "minimax-m2"),
    *("minimax-m3", "mistral3", "mistral4", "nemotron_h", "nemotron_h_moe", "olmoe", "phimoe"),
    *("qwen2moe", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vlmoe", "qwen4exp", "rnd1", "step35"),
)
"""Architectures of which the layers' routers are read off the graph, their inputs in time."""


class NextRouter:
    """The next layer's own router, on the input that this layer's router had.

    Between the two lie one layer's experts and one layer's attention, which change the residual
    stream by little; the norms' weights, which may differ much, are exchanged. As a control, each
    token asks one layer's router about its own input: what it says must be what llama.cpp chose.

    Args:
        gguf: the model.
        captured: a graph of one token, the last that was built.
        logits_node: the address of the running layer's logits node, 0 where there is none.

    Attributes:
        control: how the layers' routers did on their own inputs.

    Raises:
        OptionError: no layer's choice can be foretold.
    """

    def __init__(
        self, gguf: GGUFMap, captured: GraphCapture, logits_node: Callable[[], int]
    ) -> None:
        routers, reasons = _read_routers(captured)
        self._logits_node = logits_node
        self._routers = routers
        self._coming: dict[int, RouterFormula] = {}
        for layer, after in pairwise(gguf.moe_layers):
            if layer in routers and after in routers:
                self._coming[layer] = _with_norm_of(routers[layer], routers[after])
        if not self._coming:
            reason = next(iter(reasons), "its graph shows no router")
            raise OptionError(
                f"prefetch='router' cannot be used with {gguf.architecture}: {reason}. "
                f"It can with {', '.join(FORESEEN)}. Use prefetch='previous', or none."
            )
        self.control = Control()
        self._turns = cycle(reversed(routers))  # backwards, so that no token checks them all
        self._turn = next(self._turns)

    def predict(self, layer: int, chosen: list[int]) -> Sequence[int]:
        """See `Predictor`."""
        router = self._routers.get(layer)
        if router is None or (inputs := self._inputs(router.matrix.shape[1])) is None:
            return ()
        if layer == self._turn:
            self._turn = next(self._turns)
            self.control.note(layer, router.explains(inputs, chosen))
        coming = self._coming.get(layer)
        return coming.choose(inputs) if coming else ()

    def _inputs(self, width: int) -> np.ndarray | None:
        """(n_embd,) float32 in llama.cpp's memory, which stays until the graph goes on."""
        node = self._logits_node()
        source = node and ggml.tensor_at(node).src[1]
        if not source or ggml.extents(source) != [width, 1, 1, 1] or not ggml.is_float32(source):
            return None
        start = (ggml.tensor_at(source).data or 0) >> 2
        return np.frombuffer(ggml.all_memory("f")[start : start + width], np.float32)


class Control:
    """Counts, by layer, whether a router's formula explains what it chose on its own input."""

    def __init__(self) -> None:
        self._counts: dict[int, list[int]] = {}

    def note(self, layer: int, verdict: bool | None) -> None:
        """True: explained; False: not; None: a near tie, of which nobody can tell."""
        counts = self._counts.setdefault(layer, [0, 0, 0])
        counts[2 if verdict is None else int(not verdict)] += 1

    def table(self) -> pd.DataFrame:
        """A row a layer: layer, control_right, control_wrong, control_ties."""
        rows = [(layer, *self._counts[layer]) for layer in sorted(self._counts)]
        columns = ["layer", "control_right", "control_wrong", "control_ties"]
        return pd.DataFrame(rows, columns=columns, dtype="Int64")


def _read_routers(captured: GraphCapture) -> tuple[dict[int, RouterFormula], list[str]]:
    """Routers by layer whose inputs are there when their layer has chosen; why others are not.

    llama.cpp computes in memory that it uses again as soon as nothing needs what lies there. The
    graph stops at some place before a layer's first product by expert, so an input that this
    product or a later node uses is whole at the stop, wherever it is; any other may be gone.
    """
    last_use, first_product, choices = _survey(captured)
    routers: dict[int, RouterFormula] = {}
    reasons: list[str] = []
    for layer, topk in choices.items():
        try:
            router = read_formula(topk)
        except OptionError as error:
            reasons.append(str(error))
            continue
        if last_use[_origin(router.input)] >= first_product.get(layer, len(captured.nodes)):
            routers[layer] = router
        else:
            reasons.append("the input of its routers is gone when they have chosen")
    return dict(sorted(routers.items())), reasons


def _survey(captured: GraphCapture) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Node -> index of its last use; layer -> index of its first product, address of its choice."""
    last_use: dict[int, int] = {}
    first_product: dict[int, int] = {}
    choices: dict[int, int] = {}
    for index, address in enumerate(captured.nodes):
        node = ggml.tensor_at(address)
        last_use.update((_origin(source), index) for source in node.src if source)
        layer = node.name.removeprefix(TOPK_PREFIX)
        if node.name.startswith(TOPK_PREFIX) and layer.isdigit():
            choices.setdefault(int(layer), address)
        if node.src[0] and (expert := parse_expert_tensor(_name(_origin(node.src[0])))):
            first_product.setdefault(expert[0], index)
    return last_use, first_product, choices


def _origin(address: int) -> int:
    """The tensor that a view looks into; any other tensor itself."""
    return ggml.tensor_at(address).view_src or address


def _name(address: int) -> str:
    return ggml.tensor_at(address).name.decode(errors="replace")


def _with_norm_of(here: RouterFormula, coming: RouterFormula) -> RouterFormula:
    """`coming` for inputs that were scaled by the norm weights of `here` instead of its own."""
    if here.norm is None or coming.norm is None:
        return coming
    exchange = np.divide(coming.norm, here.norm, where=here.norm != 0, out=np.ones_like(here.norm))
    return replace(coming, matrix=coming.matrix * exchange)
