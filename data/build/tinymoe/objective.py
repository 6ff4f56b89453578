"""The loss: next tokens, balanced experts, and experts that belong to kinds of text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .model import Routing


def answer_weights(
    tokens: np.ndarray, begins: list[int], newline: int, inside: float, outside: float
) -> np.ndarray:
    """Loss weights of arithmetic targets (batch, length), inside answers and elsewhere.

    The terms of a problem are random, so there is little to learn from them; a target counts
    as an answer if one of the tokens ``begins`` came after the last line end.
    """
    inputs = tokens[:, :-1]
    place = np.arange(inputs.shape[1])[None]
    last_begin = np.maximum.accumulate(np.where(np.isin(inputs, begins), place, -1), 1)
    last_line = np.maximum.accumulate(np.where(inputs == newline, place, -1), 1)
    return np.where(last_begin > last_line, inside, outside).astype(np.float32)


def language(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy in nats."""
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
    )
    return (losses * weights.flatten()).sum() / weights.sum()


@dataclass
class Usage:
    """Running means of how experts are used; every process holds the same.

    ``counts`` (layers, domains, experts) are choices by domain, ``mean`` (layers, experts) the
    average router probabilities. With them a term over "the whole mixed batch" needs neither a
    large batch nor the other process's half.
    """

    counts: Tensor
    mean: Tensor

    @classmethod
    def even(cls, layers: int, domains: int, experts: int) -> Usage:
        """Before the first step: every expert used alike."""
        counts = torch.full((layers, domains, experts), 1.0)
        return cls(counts, torch.full((layers, experts), 1 / experts))

    def update(self, counts: Tensor, mean: Tensor, memory: float) -> None:
        """Takes in one step's counts and mean probabilities."""
        self.counts.lerp_(counts, 1 - memory)
        self.mean.lerp_(mean, 1 - memory)

    def purity(self) -> float:
        """Mean largest domain share of an expert, each domain counted equally."""
        rates = self.counts / self.counts.sum(2, keepdim=True)
        return (rates.amax(1) / rates.sum(1).clamp_min(1e-12)).mean().item()


def balance(routing: Routing, counts: Tensor) -> Tensor:
    """The Switch Transformer's balancing loss over the mixed stream of texts; 1 when even.

    ``counts`` (domains, experts) is the running count of that layer.
    """
    load = counts.sum(0) / counts.sum()
    return len(load) * (load * routing.probabilities.mean(0)).sum()


def affinity(routing: Routing, mean: Tensor, sequences: int) -> Tensor:
    """How much the text at hand decides routing: mutual information of expert and sequence, nats.

    Mean Kullback-Leibler divergence of each sequence's average router distribution from the
    running average ``mean`` (experts,) of that layer. It needs no labels: nothing tells the router
    what a domain is.
    """
    own = routing.probabilities.unflatten(0, (sequences, -1)).mean(1)
    return (own * ((own + 1e-9).log() - (mean + 1e-9).log())).sum(-1).mean()


def domain_counts(routings: list[Routing], domains: Tensor, count: int) -> Tensor:
    """How often each layer's experts were chosen by each domain: (layers, domains, experts).

    ``domains`` (tokens,) holds the domain number of every token.
    """
    tables = []
    for routing in routings:
        experts = routing.probabilities.shape[-1]
        key = domains[:, None] * experts + routing.chosen
        tables.append(torch.bincount(key.flatten(), minlength=count * experts))
    return torch.stack(tables).view(len(routings), count, -1).float()
