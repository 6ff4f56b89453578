"""Which architectures can be made: asked of the installed llama.cpp, not listed here."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import gguf

from labkit.architectures import parse_expert_tensor
from labkit.errors import LlamaError
from labkit.synth.llama import LlamaWorker
from labkit.synth.models import settle
from labkit.synth.quirks import QUIRKS, default_shape, describe

UNAVAILABLE: dict[str, str] = {
    "llama-embed": "an embedding model: llama.cpp computes no logits for it",
    "nomic-bert-moe": "an embedding model: llama.cpp computes no logits for it",
    "refact": "llama.cpp loads routed experts for it, but its graph never computes with them",
}
"""MoE architectures that llama.cpp loads but that cannot generate by their experts, and why."""

_NEWER = (
    *("bailingmoe3", "cohere2moe", "deepseek32", "deepseek4", "dflash", "dots3note", "glm5-next"),
    *("granite_swa", "hy_v3", "hy_v4", "kimi-k3", "laguna", "maple", "mellum", "minimax-01"),
    *("minimax-m3", "qwen4exp"),
)
"""Names that llama.cpp has and the gguf package (0.19) does not list yet."""


def candidates() -> list[str]:
    """Every architecture name that is worth asking llama.cpp about, sorted."""
    return sorted({*gguf.MODEL_ARCH_NAMES.values(), *QUIRKS, *_NEWER})


def probe(names: Iterable[str], worker: LlamaWorker) -> dict[str, str | None]:
    """For each architecture None if `make` can build it, else the reason why not."""
    return {name: UNAVAILABLE.get(name) or _obstacle(name, worker) for name in names}


def _obstacle(arch: str, worker: LlamaWorker) -> str | None:
    try:
        shape = default_shape(arch)
        _, tensors = settle(arch, describe(arch, shape), shape, worker)
    except LlamaError as error:
        return str(error)
    if not any(parse_expert_tensor(name) for name in tensors):
        return "a dense architecture: llama.cpp gives it no routed experts"
    return None


@functools.cache
def architectures() -> list[str]:
    """The MoE architectures that the installed llama.cpp builds and decodes, sorted.

    Takes a few seconds at the first call, in which llama.cpp is asked about every name.
    """
    with LlamaWorker() as worker:
        return [name for name, obstacle in probe(candidates(), worker).items() if obstacle is None]
