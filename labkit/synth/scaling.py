"""The tensors of a model of any size, learnt from small models of the same architecture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from labkit.synth.llama import LlamaWorker
from labkit.synth.metadata import ON_DEMAND, Shape
from labkit.synth.models import plan
from labkit.synth.quirks import default_shape, describe

Tensors = dict[str, tuple[int, ...]]


class LargePlanner:
    """Gives what `labkit.synth.models.plan` gives, without a model of that size in memory.

    llama.cpp reserves memory for all of a model in F32 before it tells the tensors. So three small
    models are asked about: a thin one has all layers and experts but is narrow, a short one has the
    true widths but few layers and experts, and a tiny one is both. A dimension in which the thin
    one differs from the tiny one counts layers or experts; any other is a width.
    """

    def __init__(self, arch: str, worker: LlamaWorker) -> None:
        self.arch = arch
        self._worker = worker
        self._plans: dict[Shape, tuple[dict[str, Any], Tensors]] = {}

    def plan(self, shape: Shape) -> tuple[dict[str, Any], Tensors]:
        """Metadata and tensor shapes (ggml order) of a model.

        Raises:
            LlamaError: llama.cpp builds no such model.
        """
        narrow = {key: getattr(Shape(), key) for key in ("d_model", "d_ff", "heads", "kv_heads")}
        few_layers = min(shape.layers, default_shape(self.arch).layers)
        few_experts = min(shape.experts, -(-2 * shape.top_k // 4) * 4)
        short_shape = replace(shape, layers=few_layers, experts=few_experts)
        header, thin = self._ask(replace(shape, d_head=None, **narrow))
        _, tiny = self._ask(replace(short_shape, d_head=None, **narrow))
        _, short = self._ask(short_shape)

        kinds = _layer_kinds(thin)
        like = {kinds[layer]: layer for layer in reversed(range(few_layers))}
        tensors = {}
        for name, sizes in thin.items():
            model = name
            if name.startswith("blk."):
                _, layer, leaf = name.split(".", 2)
                model = f"blk.{like[kinds[int(layer)]]}.{leaf}"
            tensors[name] = tuple(
                size if size != small else width
                for size, small, width in zip(sizes, tiny[model], short[model], strict=True)
            )
        return self._widened(header, shape), tensors

    def _ask(self, shape: Shape) -> tuple[dict[str, Any], Tensors]:
        if shape not in self._plans:
            self._plans[shape] = plan(self.arch, shape, self._worker)
        return self._plans[shape]

    def _widened(self, header: dict[str, Any], shape: Shape) -> dict[str, Any]:
        """The thin model's metadata with the values of the true shape."""
        short_names = {key: key.removeprefix(f"{self.arch}.") for key in header}
        demanded = {
            key: ON_DEMAND[name](shape) for key, name in short_names.items() if name in ON_DEMAND
        }
        return header | demanded | describe(self.arch, shape)


def _layer_kinds(tensors: Tensors) -> dict[int, frozenset]:
    """For each layer the names and shapes of its tensors; layers alike have equal ones."""
    kinds: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for name, sizes in tensors.items():
        if name.startswith("blk."):
            _, layer, leaf = name.split(".", 2)
            kinds.setdefault(int(layer), []).append((leaf, sizes))
    return {layer: frozenset(leaves) for layer, leaves in kinds.items()}
