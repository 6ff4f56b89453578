"""Metadata on which llama.cpp ends the process instead of reporting an error.

Each rule mirrors an assertion that runs while a model loads (`GGML_ASSERT` in llama-model.cpp and
llama-vocab.cpp of llama.cpp). A file that breaks one is refused here, in words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.gguf_map.model import GGUFMap

MAX_LAYERS = 512
MAX_EXPERTS = 1024


def load_problems(gguf: GGUFMap) -> list[str]:
    """Return every rule that the model breaks; empty when llama.cpp can be called."""
    return [*_counts(gguf)]


def _counts(gguf: GGUFMap):
    arch = gguf.architecture
    if not 0 < gguf.n_layers <= MAX_LAYERS:
        yield f"{arch}.block_count is {gguf.n_layers}; llama.cpp takes 1 to {MAX_LAYERS}"
    n_expert = gguf.count("expert_count")
    if n_expert > MAX_EXPERTS:
        yield f"{arch}.expert_count is {n_expert}; llama.cpp takes up to {MAX_EXPERTS}"
