"""Every number that decides what the bundled model becomes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
DATA = REPO / "data"
DOMAINS = ("english", "python", "chinese", "arithmetic")
SEED = 20240607


@dataclass(frozen=True)
class Shape:
    """The architecture, in llama.cpp's ``deepseek`` family (sizes in elements)."""

    vocab: int = 4096
    width: int = 256
    layers: int = 7
    dense_layers: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dense_ff: int = 512
    experts: int = 32
    top_k: int = 4
    expert_ff: int = 32
    shared_ff: int = 32
    expert_scale: float = 4.0
    context: int = 512
    rope_base: float = 1e4
    eps: float = 1e-6


@dataclass(frozen=True)
class Stage:
    """What holds from a step on.

    ``purity`` is aimed at, ``balance`` weighs the balancing loss, ``answers`` weighs the loss of
    arithmetic answers, ``small`` and ``worked`` are the shares of arithmetic windows with plain
    sums of small numbers and with worked sums; the rest is plain. ``sums`` is the domain's own part
    in the mix of windows. ``run_on`` leaves out the end token between poems.
    """

    step: int
    purity: float
    balance: float
    answers: float
    small: float = 0.0
    worked: float = 0.0
    sums: int = 21
    run_on: bool = False


@dataclass(frozen=True)
class Training:
    """How the weights are found. Rates are per step, weights are factors of a loss term."""

    window: int = 256
    windows: int = 8
    mix: dict[str, int] = field(
        default_factory=lambda: {"english": 33, "python": 33, "chinese": 13}
    )
    steps: int = 4000
    muon_rate: float = 0.02
    adam_rate: float = 0.004
    router_rate: float = 0.001
    warmup_steps: int = 100
    decay_share: float = 0.45
    stages: tuple[Stage, ...] = (
        Stage(0, purity=0.74, balance=0.01, answers=1.0),
        Stage(500, purity=0.80, balance=0.02, answers=1.0),
        Stage(1000, purity=0.82, balance=0.02, answers=4.0, small=0.5),
        Stage(1500, purity=0.82, balance=0.02, answers=2.0, worked=1.0),
        Stage(2250, purity=0.82, balance=0.02, answers=3.0, worked=1.0, sums=33),
    )
    affinity_gain: float = 0.05
    affinity_drift: float = 0.0002
    affinity_min: float = -0.01
    affinity_max: float = 0.05
    question_weight: float = 0.2
    seed: int = SEED


FINISH = Training(
    steps=200,
    muon_rate=0.002,
    adam_rate=0.0004,
    router_rate=0.0002,
    warmup_steps=10,
    decay_share=0.9,
    stages=(Stage(0, 0.82, balance=0.02, answers=3.0, worked=1.0, sums=33, run_on=True),),
    seed=SEED + 2,
)
"""The end of the main model: couplets run on, since verse had learned to stop after a line."""

SHARP = Training(
    steps=360,
    muon_rate=0.006,
    adam_rate=0.0012,
    router_rate=0.001,
    warmup_steps=20,
    decay_share=0.7,
    stages=(Stage(0, 0.94, balance=0.02, answers=3.0, worked=1.0, sums=33, run_on=True),),
    affinity_gain=0.2,
    affinity_drift=0.002,
    affinity_max=0.1,
    seed=SEED + 1,
)
"""The sharper variant goes on from the main model's last weights with a higher aim."""


def as_json(settings: Shape | Training) -> dict[str, object]:
    """A settings object as plain JSON types."""
    return asdict(settings)
