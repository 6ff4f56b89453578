"""Muon: momentum whose update is brought near an orthogonal matrix by Newton-Schulz steps.

Follows K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the
last two axes of a parameter are the matrix, axes before them a stack of matrices.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """The (stack of) matrices with all singular values pushed towards 1."""
    a, b, c = COEFFICIENTS
    tall = update.shape[-2] > update.shape[-1]
    x = (update.mT if tall else update).to(torch.bfloat16).contiguous()
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum; the rate is scaled by sqrt(max(1, rows / columns))."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(parameter)
                mean = state["mean"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(mean, group["momentum"]))
                scale = max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
                parameter.add_(update, alpha=-group["lr"] * scale)
