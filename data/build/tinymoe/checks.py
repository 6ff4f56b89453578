"""A quick look at a model on held-out text while it trains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from . import corpus
from .model import Routing, TinyMoE
from .settings import DOMAINS

WINDOWS = 8
ANSWER_TOKENS = 20


def route(model: TinyMoE, tokens: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """Logits, and chosen experts as (layers, sequences, length, k)."""
    with torch.no_grad():
        logits, routings = model(tokens)
    return logits, stack(routings, len(tokens))


def stack(routings: list[Routing], sequences: int) -> np.ndarray:
    """Chosen ids of all layers as (layers, sequences, length, k)."""
    return np.stack([r.chosen.unflatten(0, (sequences, -1)).numpy() for r in routings])


def churn(chosen: np.ndarray) -> float:
    """Mean share of a token's experts that the token before it did not use in that layer."""
    now, before = chosen[:, :, 1:, :, None], chosen[:, :, :-1, None, :]
    return float(1 - (now == before).any(-1).mean())


def lru_hits(chosen: np.ndarray, experts: int, share: float = 0.25) -> float:
    """Hit rate of one LRU over all (layer, expert) entries with room for ``share`` of them."""
    layers, sequences, length, _ = chosen.shape
    room = int(share * layers * experts)
    hits = asked = 0
    for sequence in range(sequences):
        held: dict[int, None] = {}
        for position in range(length):
            for layer in range(layers):
                for expert in chosen[layer, sequence, position]:
                    key = layer * experts + int(expert)
                    hits += key in held
                    asked += 1
                    held.pop(key, None)
                    held[key] = None
                    if len(held) > room:
                        del held[next(iter(held))]
    return hits / asked


def exact_answers(model: TinyMoE, work: Path, count: int = 200) -> float:
    """Share of held-out problems whose greedy answer is right, line end included."""
    bpe = corpus.bpe(work)
    lines = "".join(corpus.held_out(work)["arithmetic"].values()).split("\n")[: count + 3]
    shown, lines = lines[:3], lines[3 : count + 3]
    groups: dict[int, list[tuple[list[int], list[int]]]] = {}
    for line in lines:
        question, answer = line.split(":")
        prompt = bpe.encode("\n".join([*shown, question]) + ":").ids
        groups.setdefault(len(prompt), []).append((prompt, bpe.encode(answer + "\n").ids))
    right = 0
    for group in groups.values():
        tokens = torch.tensor([prompt for prompt, _ in group])
        for _ in range(ANSWER_TOKENS):
            with torch.no_grad():
                tokens = torch.cat((tokens, model(tokens)[0][:, -1:].argmax(-1)), 1)
        for row, (prompt, answer) in zip(tokens.tolist(), group, strict=True):
            right += row[len(prompt) : len(prompt) + len(answer)] == answer
    return right / len(lines)


def quick(model: TinyMoE, work: Path) -> dict[str, object]:
    """Perplexity, routing figures and exact answers on a small fixed part of held-out text."""
    windows = corpus.held_out_windows(work, 256, WINDOWS)
    experts = model.shape.experts
    result: dict[str, object] = {}
    rates, churns, hits = [], [], []
    for domain in DOMAINS:
        tokens = torch.from_numpy(windows[domain])
        logits, chosen = route(model, tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        result[domain] = round(float(loss.exp()), 2)
        counts = np.stack([np.bincount(c.ravel(), minlength=experts) for c in chosen])
        rates.append(counts / counts.sum(1, keepdims=True))
        churns.append(round(churn(chosen), 3))
        hits.append(round(lru_hits(chosen[:, :2], experts), 3))
    table = np.stack(rates)
    total = table.sum(0)
    result["purity"] = float((table.max(0) / np.maximum(total, 1e-12)).mean())
    result["churn"], result["lru"] = churns, hits
    result["largest_load"] = float(table.mean(0).max() * experts)
    result["smallest_load"] = float(table.mean(0).min() * experts)
    result["answers"] = exact_answers(model, work)
    return result
