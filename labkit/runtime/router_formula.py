"""`RouterFormula`: how a layer's router chooses its experts, read off the graph that computes it.

No list of architectures says how a router works: the graph does. From the node of the choice
(`ffn_moe_topk`) one walks back over what the scores went through, each step of which is known here
or makes the router an unknown one, to the product of the router's matrix with its input.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from labkit.errors import OptionError
from labkit.runtime import ggml

Step = Callable[[np.ndarray], np.ndarray]
"""(n_expert,) float32 -> (n_expert,) float32"""

_NO_OP = 0


@dataclass(frozen=True, eq=False)
class RouterFormula:
    """One layer's router.

    Attributes:
        matrix: (n_expert, n_embd) float32, contiguous; a copy.
        steps: what happens to the logits before the highest are taken.
        k: how many experts are chosen.
        input: the graph's node that holds the router's input, (n_embd,) float32 for one token.
        norm: (n_embd,) weights that made the input out of normalised activations; None where it
            comes about in another way.
        tolerance: how far rounding may move a logit, as a part of the largest: the sums here and in
            llama.cpp run in different orders, and llama.cpp rounds the inputs of a quantised
            matrix to 8 bits.
    """

    matrix: np.ndarray
    steps: tuple[Step, ...]
    k: int
    input: int
    norm: np.ndarray | None
    tolerance: float
    _round: Step

    @cached_property
    def _ranking(self) -> tuple[Step, ...]:
        """The steps up to the last that can change which scores are higher."""
        steps = list(self.steps)
        while steps and steps[-1] in _RISING:
            steps.pop()
        return tuple(steps)

    def choose(self, inputs: np.ndarray) -> list[int]:
        """The `k` experts with the highest scores for (n_embd,) float32, the highest first."""
        scores = self._logits(inputs)
        for step in self._ranking:
            scores = step(scores)
        return np.argsort(-scores)[: self.k].tolist()

    def explains(self, inputs: np.ndarray, chosen: list[int]) -> bool | None:
        """Whether `chosen` are the experts with the highest scores.

        Rounding may move each logit. If `chosen` win even when it moves all of them against the
        choice, they are right; if they lose when it moves all in their favour, they are wrong; in
        between a near tie decided, and the answer is None.
        """
        logits = self._logits(inputs)
        inside = np.zeros(len(logits), bool)
        inside[chosen] = True
        slack = np.where(inside, self.tolerance, -self.tolerance) * np.abs(logits).max()
        if self._lead(logits - slack, inside) > 0:
            return True
        return False if self._lead(logits + slack, inside) < 0 else None

    def _lead(self, logits: np.ndarray, inside: np.ndarray) -> float:
        scores = self._scores(logits.astype(np.float32))
        return scores[inside].min() - scores[~inside].max(initial=-np.inf)

    def _logits(self, inputs: np.ndarray) -> np.ndarray:
        return self.matrix @ self._round(inputs)

    def _scores(self, logits: np.ndarray) -> np.ndarray:
        for step in self.steps:
            logits = step(logits)
        return logits


def read_formula(topk: int) -> RouterFormula:
    """The router behind the `ffn_moe_topk` node at address `topk`.

    Raises:
        OptionError: it does something that is not known here; the message says what.
    """
    choice = ggml.tensor_at(topk)
    order = _source(topk)
    if _kind(order) != "ARGSORT":
        raise OptionError(f"its choice comes from {_kind(order)}, not from sorted scores")
    steps: list[Step] = []
    node = _source(order)
    while (kind := _kind(node)) != "MUL_MAT":
        step, node = _step(kind, node)
        if step:
            steps.append(step)
    product = ggml.tensor_at(node)
    weights, inputs = product.src[0], product.src[1]
    if not weights or not inputs or ggml.tensor_at(weights).op != _NO_OP:
        raise OptionError("its logits are no product with a matrix of weights")
    rounded, tolerance = _ROUNDING.get(ggml.tensor_at(weights).type, (_as_it_is, 3e-2))
    return RouterFormula(
        matrix=read_weights(weights),
        steps=tuple(reversed(steps)),
        k=choice.ne[0],
        input=inputs,
        norm=_norm_weights(inputs),
        tolerance=tolerance,
        _round=rounded,
    )


def read_weights(address: int) -> np.ndarray:
    """(rows, columns) float32 copy of a weight; a bias has one row."""
    from gguf import GGMLQuantizationType, quants

    tensor = ggml.tensor_at(address)
    nbytes = ggml.function("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)(address)
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(tensor.data))
    n_rows = tensor.ne[1] * tensor.ne[2] * tensor.ne[3]
    values = quants.dequantize(raw.reshape(n_rows, -1), GGMLQuantizationType(tensor.type))
    return np.array(values, np.float32, order="C")


def _step(kind: str, node: int) -> tuple[Step | None, int]:
    """What a node does to the scores, None for nothing, and the node before it."""
    if kind in ("RESHAPE", "CONT"):
        return None, _source(node)
    if kind == "GET_ROWS" and ggml.extents(node) == ggml.extents(_source(node)):
        return None, _source(node)  # of the one token it takes that token
    if kind in _ACTIVATIONS:
        return _ACTIVATIONS[kind], _source(node)
    if kind == "SOFT_MAX" and not ggml.tensor_at(node).src[1]:
        return _softmax, _source(node)
    if kind == "ADD":
        return _bias(node)
    if kind == "SET_ROWS":
        return _groups(node)
    raise OptionError(f"its scores go through {kind}")


def _bias(node: int) -> tuple[Step, int]:
    scores, bias = ggml.tensor_at(node).src[:2]
    if not scores or not bias or ggml.tensor_at(bias).op != _NO_OP:
        raise OptionError("its scores are added to something that is no weight")
    values = read_weights(bias).ravel()
    return lambda scores: scores + values, scores


def _groups(node: int) -> tuple[Step, int]:
    """Only the best groups of neighbours compete; a group is as good as its two best scores."""
    rows, chosen, fill = ggml.tensor_at(node).src[:3]
    if not rows or not chosen or not fill or _kind(fill) != "FILL" or _kind(rows) != "GET_ROWS":
        raise OptionError("its scores are masked in an unknown way")
    grouped = _source(fill)
    if _source(rows) != grouped:
        raise OptionError("its scores are masked in an unknown way")
    _, n_groups, *_ = ggml.extents(grouped)
    n_used = ggml.extents(chosen)[0]

    def step(scores: np.ndarray) -> np.ndarray:
        groups = scores.reshape(n_groups, -1)
        merit = np.partition(groups, -2, axis=1)[:, -2:].sum(axis=1)
        masked = np.full_like(groups, -np.inf)
        best = np.argsort(-merit)[:n_used]
        masked[best] = groups[best]
        return masked.ravel()

    return step, grouped


def _norm_weights(inputs: int) -> np.ndarray | None:
    node = ggml.tensor_at(inputs)
    if _kind(inputs) != "MUL" or not node.src[0] or not node.src[1]:
        return None
    weights = ggml.tensor_at(node.src[1])
    if _kind(node.src[0]) not in ("RMS_NORM", "NORM") or weights.op != _NO_OP:
        return None
    return read_weights(node.src[1]).ravel()


def _kind(address: int) -> str:
    """What a node computes: "MUL_MAT", "SIGMOID", ..."""
    describe = ggml.function("ggml_op_desc", ctypes.c_char_p, ctypes.c_void_p)
    return describe(address).decode()


def _source(address: int) -> int:
    source = ggml.tensor_at(address).src[0]
    if not source:
        raise OptionError(f"its scores begin at {_kind(address)}, not at a product")
    return source


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def _sigmoid(scores: np.ndarray) -> np.ndarray:
    return 0.5 + 0.5 * np.tanh(0.5 * scores)


def _softplus(scores: np.ndarray) -> np.ndarray:
    return np.logaddexp(np.float32(0), scores)


_ACTIVATIONS: dict[str, Step] = {"SIGMOID": _sigmoid, "SOFTPLUS": _softplus, "SQRT": np.sqrt}
_RISING = (_softmax, *_ACTIVATIONS.values())  # a higher logit is a higher score


def _as_it_is(inputs: np.ndarray) -> np.ndarray:
    return inputs


def _as_f16(inputs: np.ndarray) -> np.ndarray:
    return inputs.astype(np.float16).astype(np.float32)


def _as_bf16(inputs: np.ndarray) -> np.ndarray:
    """Rounded to the nearest of bfloat16, to even in the middle."""
    bits = inputs.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


_ROUNDING: dict[int, tuple[Step, float]] = {
    0: (_as_it_is, 1e-5),  # F32
    1: (_as_f16, 1e-3),  # F16
    30: (_as_bf16, 1e-3),  # BF16
}
"""ggml type of a matrix -> what llama.cpp rounds its inputs to, and the tolerance."""
