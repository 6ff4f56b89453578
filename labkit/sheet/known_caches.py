"""For which architectures labkit knows how llama.cpp caches, and how well."""

from __future__ import annotations

NO_CACHE = frozenset({"dream", "llada", "llada-moe", "rnd1"})
"""Diffusion models, which keep nothing from step to step."""

_CHECKED = """
afmoe arctic bailingmoe bailingmoe2 bailingmoe3 cohere2moe dbrx deepseek deepseek2 deepseek2-ocr
deepseek32 deepseek4 dflash dots1 dots3note ernie4_5-moe exaone-moe gemma4 glm-dsa glm4moe
glm5-next gpt-oss granite granite_swa granitehybrid granitemoe grok grovemoe hunyuan-moe hy_v3
hy_v4 jamba kimi-k3 kimi-linear laguna lfm2moe llada-moe llama llama4 maple mellum mimo2 minicpm
minimax-01 minimax-m2 minimax-m3 mistral3 mistral4 nemotron_h nemotron_h_moe olmoe phimoe
qwen2moe qwen35moe qwen3moe qwen3next qwen3vlmoe qwen4exp rnd1 smallthinker step35
"""
_PLAIN = """
apertus arcee baichuan bitnet bloom chatglm codeshell command-r exaone falcon gemma glm4 gpt2
gptneox internlm2 jais jais2 maincoder mpt nemotron olmo openelm orion phi2 phi3 plamo plm qwen
qwen2 qwen2vl qwen3 qwen3vl refact seed_oss smollm3 stablelm starcoder starcoder2 xverse
"""

CHECKED = frozenset(_CHECKED.split())
"""Compared with llama.cpp's own count, byte by byte, in the tests."""

PLAIN = frozenset(_PLAIN.split())
"""Dense architectures to which llama.cpp gives keys and values in every layer, nothing else."""


def cache_note(architecture: str) -> tuple[str, bool | None]:
    """(what to say about the cache figures, whether they were checked; None: not known at all)."""
    if architecture in NO_CACHE:
        return (
            "A diffusion model: each step computes the whole text anew, so nothing is cached.",
            True,
        )
    if architecture in CHECKED:
        return "", True
    if architecture in PLAIN:
        return (
            f"The cache of {architecture} is counted as keys and values in every layer, as"
            " llama.cpp makes it; this architecture was not compared with llama.cpp's own count."
        ), False
    return (
        f"how llama.cpp caches the architecture '{architecture}' is not known to labkit, which has"
        " no figure of its own for it."
    ), None
