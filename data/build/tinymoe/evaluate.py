"""The figures of the model card, from the shipped files through stock llama.cpp."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from . import corpus, export, llama
from .model import TinyMoE
from .settings import DOMAINS, REPO, SEED, Shape

sys.path.insert(0, str(REPO))
from labkit import routing_metrics as metrics

Run = Callable[[list[int]], tuple[np.ndarray, np.ndarray]]
"""A text's token ids to logits (n, vocab) and chosen experts (layers, n, k)."""

WINDOW = 256
COUNT = 12


def from_torch(model: TinyMoE) -> Run:
    """Runs the PyTorch model in float32."""
    model.precision = torch.float32

    def run(tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            logits, routings = model(torch.tensor([tokens]))
        return logits[0].float().numpy(), np.stack([r.chosen.numpy() for r in routings])

    return run


def routing_table(chosen: list[np.ndarray]) -> pd.DataFrame:
    """A routing table of several texts, (layers, n, k) each; the text's number is the turn."""
    parts = []
    for turn, ids in enumerate(chosen):
        layer, step, slot = np.meshgrid(*map(np.arange, ids.shape), indexing="ij")
        columns = {"turn": turn, "step": step.ravel(), "layer": layer.ravel() + 1}
        parts.append(pd.DataFrame({**columns, "slot": slot.ravel(), "expert": ids.ravel()}))
    return pd.concat(parts, ignore_index=True)


def observe(run: Run, windows: dict[str, np.ndarray]) -> dict[str, dict[str, object]]:
    """Perplexity, best tokens and routing table of each domain."""
    seen: dict[str, dict[str, object]] = {}
    for domain in DOMAINS:
        losses, best, chosen = [], [], []
        for row in windows[domain].tolist():
            logits, ids = run(row[:-1])
            logits = logits.astype(np.float64)
            top = logits.max(1, keepdims=True)
            norm = top[:, 0] + np.log(np.exp(logits - top).sum(1))
            losses.append(norm - logits[np.arange(len(logits)), row[1:]])
            best.append(logits.argmax(1))
            chosen.append(ids)
        seen[domain] = {
            "perplexity": float(np.exp(np.concatenate(losses).mean())),
            "best": np.concatenate(best),
            "table": routing_table(chosen),
        }
    return seen


def routing_figures(tables: dict[str, pd.DataFrame], n_expert: int) -> dict[str, float]:
    """The headline figures of a model's routing; texts count alike."""
    together = pd.concat(tables.values())
    load = metrics.expert_load(together, n_expert)["times_fair"]
    distance = metrics.domain_distance(tables, n_expert)["total_variation"]
    figures = {
        "purity": metrics.domain_purity(tables, n_expert)["purity"].mean(),
        "tv_smallest": distance.min(),
        "tv_largest": distance.max(),
        "load_smallest": load.min(),
        "load_largest": load.max(),
        "unused": float((load == 0).sum()),
    }
    for domain, table in tables.items():
        figures[f"churn_{domain}"] = metrics.churn(table)["churn"].mean()
        figures[f"lru25_{domain}"] = lru_of_texts(table, n_expert)
    return {name: float(value) for name, value in figures.items()}


def lru_of_texts(table: pd.DataFrame, n_expert: int, fraction: float = 0.25) -> float:
    """Mean hit rate of texts that each start with an empty cache."""
    rates = [metrics.lru_hit_rate(t, fraction, n_expert) for _, t in table.groupby("turn")]
    return float(np.mean(rates))


def exact_answers(run: Run, work: Path, count: int = 400) -> float:
    """Share of held-out problems answered rightly, greedily, working and line end included.

    Each problem follows three others, as in the test of the shipped file.
    """
    bpe = corpus.bpe(work)
    lines = "".join(corpus.held_out(work)["arithmetic"].values()).split("\n")
    lines = [line for line in lines if line][: count + 3]
    right = 0
    for line in lines[3:]:
        question, answer = line.split(":")
        tokens = bpe.encode("\n".join([*lines[:3], question]) + ":").ids
        wanted = bpe.encode(answer + "\n").ids
        # One pass suffices: every answer token must be the best one after the right ones.
        logits, _ = run([0, *tokens, *wanted[:-1]])
        right += logits[len(tokens) :].argmax(1).tolist() == wanted
    return right / (len(lines) - 3)


def agreement(first: dict, second: dict) -> dict[str, float]:
    """How often two models find the same best token, and the same experts."""
    best = [np.mean(first[d]["best"] == second[d]["best"]) for d in DOMAINS]
    same = [
        metrics.agreement(first[d]["table"], second[d]["table"])["agreement"].mean()
        for d in DOMAINS
    ]
    return {"best_token": float(np.mean(best)), "experts": float(np.mean(same))}


def tokenizer_parity(model: llama.Model, work: Path) -> dict[str, int]:
    """Tokens of all held-out texts by llama.cpp against the tokenizer that trained the model."""
    bpe = corpus.bpe(work)
    total = different = 0
    for works in corpus.held_out(work).values():
        for text in works.values():
            ours, theirs = bpe.encode(text).ids, model.tokenize(text)
            total += len(ours)
            different += ours != theirs
    return {"tokens": total, "texts_that_differ": different}


def uniform(tables: dict[str, pd.DataFrame], n_expert: int) -> dict[str, pd.DataFrame]:
    """Random routing of the same tokens."""
    return {
        domain: metrics.uniform_routing(table, n_expert, seed=number)
        for number, (domain, table) in enumerate(tables.items())
    }


def everything(work: Path, models: Path) -> dict[str, object]:
    """All figures: by file, of the untrained control and of uniform routing."""
    torch.set_num_threads(1)
    windows = corpus.held_out_windows(work, WINDOW, COUNT)
    n_expert = Shape().experts
    torch_seen = observe(from_torch(load(work / "finish.pt")), windows)
    control = work / "control-f16.gguf"
    torch.manual_seed(SEED)
    export.write(TinyMoE(Shape()), work / "tokenizer.json", control, "control", "untrained")
    files = {path.stem.removeprefix("labkit-moe-"): path for path in models.glob("*.gguf")}
    result: dict[str, object] = {}
    reference: dict = {}
    for name in ("f16", "q8_0", "q4_k_m", "q4_0", "sharp-q8_0", "control"):
        path = files.get(name, control)
        with llama.opened(path) as model:
            seen = observe(model.forward, windows)
            entry: dict[str, object] = {
                "bytes": path.stat().st_size,
                "perplexity": {d: seen[d]["perplexity"] for d in DOMAINS},
                "routing": routing_figures({d: seen[d]["table"] for d in DOMAINS}, n_expert),
                "exact_answers": exact_answers(model.forward, work),
            }
            if name == "f16":
                reference = seen
                entry["against_pytorch"] = agreement(torch_seen, seen)
                entry["tokenizer"] = tokenizer_parity(model, work)
            elif name in ("q8_0", "q4_k_m", "q4_0"):
                entry["against_f16"] = agreement(reference, seen)
        result[name] = entry
    random = uniform({d: reference[d]["table"] for d in DOMAINS}, n_expert)
    result["uniform"] = {"routing": routing_figures(random, n_expert)}
    return result


def load(path: Path) -> TinyMoE:
    """The model of a checkpoint."""
    model = TinyMoE(Shape())
    model.load_state_dict(torch.load(path, weights_only=False)["model"])
    return model
