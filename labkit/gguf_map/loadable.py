"""Metadata on which llama.cpp ends the process instead of reporting an error.

Each rule stands for an assertion (or a crash) of llama.cpp while it loads a model or builds its
graph: `GGML_ASSERT` in llama-model.cpp and src/models/, the type dispatch of ggml-cpu. They were
found by changing every key and tensor of real files and loading each in a process of its own. A
file that breaks one is refused here, in words. The vocabulary has a module of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.architectures import NORM
from labkit.gguf_map.vocabulary import vocabulary_problems

if TYPE_CHECKING:
    from labkit.gguf_map.model import GGUFMap

MAX_LAYERS = 512
MAX_EXPERTS = 1024
ROPE_SCALING_TYPES = ("none", "linear", "yarn", "longrope")

_F32 = 0
_NO_WEIGHT_TYPES = {9, 15, 24, 25, 26, 27, 28}
"""Q8_1 and Q8_K hold activations; I8 to I64 and F64 are no weights either."""
_INDEX_TENSORS = ("tid2eid", "ordering", "d2t")
"""Tensors that hold ids, so that integers are right for them."""


def load_problems(gguf: GGUFMap) -> list[str]:
    """Return every rule that the model breaks; empty when llama.cpp can be called."""
    return [
        *_counts(gguf),
        *_values(gguf),
        *_tensor_types(gguf),
        *vocabulary_problems(gguf.metadata),
    ]


def _counts(gguf: GGUFMap) -> Iterator[str]:
    arch = gguf.architecture
    layers, experts, used = gguf.n_layers, gguf.count("expert_count"), gguf.n_expert_used
    groups, groups_used = gguf.count("expert_group_count"), gguf.count("expert_group_used_count")
    if not 0 < layers <= MAX_LAYERS:
        yield f"{arch}.block_count is {layers}; llama.cpp takes 1 to {MAX_LAYERS} layers"
    extra = gguf.count("nextn_predict_layers")
    if extra > layers:
        yield f"{arch}.nextn_predict_layers is {extra}, more than the {layers} layers"
    if experts > MAX_EXPERTS:
        yield f"{arch}.expert_count is {experts}; llama.cpp takes up to {MAX_EXPERTS}"
    if used > experts:
        yield f"{arch}.expert_used_count is {used}, more than the {experts} experts (expert_count)"
    if experts and not used:
        yield f"{arch}.expert_used_count is missing or 0 in a model of {experts} experts"
    if groups >= max(experts, 1):
        yield f"{arch}.expert_group_count is {groups}, too many for {experts} experts"
    elif groups > 1 and (experts % groups or not 0 < groups_used < groups):
        yield (
            f"{arch}.expert_group_count is {groups} and expert_group_used_count {groups_used}:"
            f" the {experts} experts must divide evenly and some but not all groups be used"
        )


def _values(gguf: GGUFMap) -> Iterator[str]:
    arch = gguf.architecture
    for key, value in gguf.metadata.items():
        epsilon = key.startswith(f"{arch}.") and key.endswith("epsilon")
        if epsilon and isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            yield f"{key} is {value}; it must be a small number that is not negative"
    scaling = gguf.metadata.get(f"{arch}.rope.scaling.type", "linear")
    if isinstance(scaling, str) and scaling not in ROPE_SCALING_TYPES:
        yield f"{arch}.rope.scaling.type is '{scaling}'; known: {', '.join(ROPE_SCALING_TYPES)}"


def _tensor_types(gguf: GGUFMap) -> Iterator[str]:
    for t in gguf.tensors:
        index = any(word in t.name for word in _INDEX_TENSORS)
        vector = t.role == NORM or (len(t.shape) <= 1 and t.name.endswith((".weight", ".bias")))
        if t.type_id in _NO_WEIGHT_TYPES and not index:
            yield f"tensor '{t.name}' has type {t.type_name}, which no weight can have"
        elif vector and t.type_known and t.type_id != _F32 and not index:
            yield f"tensor '{t.name}' has type {t.type_name}; norms and other vectors must be F32"
