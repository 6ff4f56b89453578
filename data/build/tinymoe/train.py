"""Trains the model; every random choice comes from the seed and the step number.

Two processes of one thread each take half of every batch and average their gradients. That beats
one process with two threads: small matrices pay less for keeping in step, and a busy machine
holds both halves up once a step, not at every product.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from . import checks, corpus, objective
from .model import TinyMoE
from .muon import Muon
from .settings import DOMAINS, Shape, Stage, Training, as_json

USAGE_MEMORY = 0.95
PROCESSES = 2


@dataclass
class Batch:
    """Windows of one step: tokens (b, w + 1), loss weights (b, w), domain of each token (b*w,)."""

    tokens: Tensor
    weights: Tensor
    domains: Tensor


class Batches:
    """Draws windows from the training streams, a fixed number of each domain a step."""

    def __init__(self, work: Path, training: Training) -> None:
        self.training = training
        self.streams = corpus.streams(work)
        bpe = corpus.bpe(work)
        self.begins = [bpe.token_to_id("="), bpe.token_to_id(":")]
        (self.newline,) = bpe.encode("\n").ids

    def draw(self, step: int, rank: int) -> Batch:
        """One process's half of a step's batch, the same whenever it is asked for."""
        training = self.training
        rng = np.random.default_rng((training.seed, step))
        stage = stage_at(step, training)
        chances = np.array([training.mix.get(domain, stage.sums) for domain in DOMAINS])
        numbers = rng.choice(len(DOMAINS), training.windows, p=chances / chances.sum())
        places = rng.random(training.windows)
        kinds = rng.random(training.windows)
        tokens, weights = [], []
        for index in range(rank, training.windows, PROCESSES):
            name = DOMAINS[numbers[index]]
            sums = name == "arithmetic"
            if sums and kinds[index] < stage.small:
                name = corpus.SMALL
            elif sums and kinds[index] >= 1 - stage.worked:
                name = corpus.WORKED
            elif name == "chinese" and stage.run_on:
                name = corpus.RUNNING
            stream = self.streams[name]
            start = int(places[index] * (len(stream) - training.window - 1))
            row = stream[None, start : start + training.window + 1]
            tokens.append(row)
            inside, outside = (stage.answers, training.question_weight) if sums else (1.0, 1.0)
            marks = (self.begins, self.newline)
            weights.append(objective.answer_weights(row, *marks, inside, outside))
        return Batch(
            torch.from_numpy(np.concatenate(tokens)),
            torch.from_numpy(np.concatenate(weights)),
            torch.from_numpy(np.repeat(numbers[rank::PROCESSES], training.window)),
        )


def optimisers(model: TinyMoE, training: Training) -> list[torch.optim.Optimizer]:
    """Muon for matrices, Adam for the embedding, the norms and the routers."""
    matrices, routers, rest = [], [], []
    for name, parameter in model.named_parameters():
        if name.endswith("router"):
            routers.append(parameter)
        elif parameter.ndim >= 2 and name != "embedding":
            matrices.append(parameter)
        else:
            rest.append(parameter)
    groups = [
        {"params": rest, "lr": training.adam_rate},
        {"params": routers, "lr": training.router_rate},
    ]
    adam = torch.optim.Adam(groups, betas=(0.9, 0.97), eps=1e-9, fused=True)
    return [Muon(matrices, training.muon_rate), adam]


def rate_at(step: int, training: Training) -> float:
    """The factor on every learning rate: warm-up, plateau, then straight down to a fiftieth."""
    start = training.steps * (1 - training.decay_share)
    down = 1 - max(0.0, step - start) / max(1.0, training.steps - start)
    return min((step + 1) / training.warmup_steps, max(down, 0.02))


def stage_at(step: int, training: Training) -> Stage:
    """The stage that a step belongs to."""
    return [stage for stage in training.stages if stage.step <= step][-1]


class Trainer:
    """Model, optimisers and the affinity controller, saved and restored together."""

    def __init__(self, work: Path, name: str, training: Training, shape: Shape) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(training.seed)
        self.work, self.name, self.training = work, name, training
        self.model = TinyMoE(shape)
        self.optimisers = optimisers(self.model, training)
        self.rates = [[g["lr"] for g in o.param_groups] for o in self.optimisers]
        self.batches = Batches(work, training)
        self.step = 0
        self.affinity = self.drift = 0.0
        routed = shape.layers - shape.dense_layers
        self.usage = objective.Usage.even(routed, len(DOMAINS), shape.experts)
        self.log: list[dict[str, object]] = []

    @property
    def path(self) -> Path:
        """Where the checkpoint lies."""
        return self.work / f"{self.name}.pt"

    def save(self, path: Path | None = None) -> None:
        """Writes everything needed to go on from here."""
        state = {
            "model": self.model.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "step": self.step,
            "affinity": self.affinity,
            "drift": self.drift,
            "usage": self.usage,
            "log": self.log,
            "training": as_json(self.training),
        }
        target = path or self.path
        torch.save(state, target.with_suffix(".tmp"))
        target.with_suffix(".tmp").replace(target)

    def restore(self, path: Path, weights_only: bool = False) -> None:
        """Takes up a checkpoint; ``weights_only`` starts a new run from its weights."""
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        if not weights_only:
            for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(saved)
            self.step, self.log = state["step"], state["log"]
            self.affinity, self.drift = state["affinity"], state["drift"]
        self.usage = state["usage"]

    def advance(self) -> dict[str, float]:
        """One step; returns its figures."""
        training = self.training
        factor = rate_at(self.step, training)
        for optimiser, rates in zip(self.optimisers, self.rates, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        batch = self.batches.draw(self.step, dist.get_rank())
        logits, routings = self.model(batch.tokens[:, :-1])
        language = objective.language(logits, batch.tokens[:, 1:], batch.weights)
        usage, sequences = self.usage, len(batch.tokens)
        layers = list(enumerate(routings))
        balance = sum(objective.balance(r, usage.counts[i]) for i, r in layers)
        affinity = sum(objective.affinity(r, usage.mean[i], sequences) for i, r in layers)
        stage = stage_at(self.step, training)
        loss = language + stage.balance * balance - self.affinity * affinity
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        counts = objective.domain_counts(routings, batch.domains, len(DOMAINS))
        mean = torch.stack([r.probabilities.detach().mean(0) for r in routings]) / PROCESSES
        self._average(counts, mean)
        for optimiser in self.optimisers:
            optimiser.step()
        usage.update(counts, mean, USAGE_MEMORY)
        self._steer(stage.purity)
        self.step += 1
        return {
            "loss": language.item(),
            "balance": balance.item() / len(routings),
            "affinity": affinity.item() / len(routings),
        }

    def _average(self, *sums: Tensor) -> None:
        """Gives all processes the mean of their gradients and the sum of what else is passed."""
        gradients = [p.grad for p in self.model.parameters()]
        joined = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(joined)
        joined /= PROCESSES
        pieces = joined.split([g.numel() for g in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
        for tensor in sums:
            dist.all_reduce(tensor)

    def _steer(self, target: float) -> None:
        """Moves the affinity term's weight towards the purity that is wanted."""
        training = self.training
        error = target - self.usage.purity()
        drift = self.drift + training.affinity_drift * error
        self.drift = min(max(drift, training.affinity_min), training.affinity_max)
        wanted = self.drift + training.affinity_gain * error
        self.affinity = min(max(wanted, training.affinity_min), training.affinity_max)

    def run(self, report_every: int = 20, check_every: int = 250) -> None:
        """Trains to the last step, saving and checking on held-out text as it goes."""
        begun = time.monotonic()
        first, figures = self.step, {"loss": 0.0}
        tokens = self.training.windows * self.training.window
        while self.step < self.training.steps:
            figures = self.advance()
            if self.step % report_every == 0:
                speed = (self.step - first) * tokens / (time.monotonic() - begun)
                line = {"step": self.step, **figures, "weight": self.affinity}
                self._note({**line, "purity": self.usage.purity(), "tokens_s": speed})
            if dist.get_rank() != 0:
                continue
            if self.step % check_every == 0 or self.step == self.training.steps:
                self.save()
                self._note({"step": self.step, "held_out": checks.quick(self.model, self.work)})

    def _note(self, entry: dict[str, object]) -> None:
        if dist.get_rank() != 0:
            return
        self.log.append(entry)
        with (self.work / f"{self.name}.log").open("a") as log:
            log.write(json.dumps(entry, default=lambda v: round(float(v), 5)) + "\n")


def _process(rank: int, work: Path, name: str, training: Training, start: str | None) -> None:
    meeting = f"file://{work / f'{name}.meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=PROCESSES)
    trainer = Trainer(work, name, training, Shape())
    if trainer.path.exists():
        trainer.restore(trainer.path)
    elif start is not None:
        trainer.restore(work / f"{start}.pt", weights_only=True)
    trainer.run()
    dist.destroy_process_group()


def train(work: Path, name: str, training: Training, start: str | None = None) -> None:
    """Trains to the end or goes on from ``<name>.pt``; ``start`` names a run to continue from."""
    (work / f"{name}.meeting").unlink(missing_ok=True)
    mp.spawn(_process, (work, name, training, start), nprocs=PROCESSES)
