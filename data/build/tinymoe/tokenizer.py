"""A byte-level BPE tokenizer whose splitting rule llama.cpp knows as ``qwen2``."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHARACTERS = {"english": 1_500_000, "python": 1_800_000, "chinese": 400_000}


def train(works: dict[str, dict[str, str]], vocab: int, seed: int, path: Path) -> Tokenizer:
    """Learns ``vocab`` tokens from a fixed number of characters of each domain and saves them.

    Chinese verse has no spaces, so every line is fed character by character: its tokens are
    characters, not chance pairs of them.
    """
    rng = random.Random(seed)
    lines: list[str] = []
    for domain, limit in CHARACTERS.items():
        names = sorted(works[domain])
        rng.shuffle(names)
        taken = 0
        for name in names:
            text = works[domain][name]
            if taken > limit:
                break
            taken += len(text)
            lines += list(text) if domain == "chinese" else [text]
    lines.append("0123456789+-*=\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(path))
    return tokenizer
