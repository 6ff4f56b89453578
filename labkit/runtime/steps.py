"""What a session tells about each token and about a whole generation."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Path = Literal["cache", "layers", "resident"]


@dataclass(slots=True)
class TokenStep:
    """One token after it went through the model, with the routing that it had.

    Attributes:
        index: the token's position in the context, prompt tokens counted.
        phase: "prefill" or "decode".
        token: its id.
        text: what it adds to the text; "" while a character's bytes are incomplete.
        layers: (L,) MoE layers that routed this token.
        experts: (L, k) chosen experts in slot order; -1 after those of a layer that chooses fewer.
        weights: (L, k) applied routing weights; NaN where the graph shows none.
        hit: (L, k) whether the entry was resident when its layer asked.
        path: where the experts came from: "cache" (an entry at a time, through the expert cache),
            "layers" (whole layers through two slots, past the cache) or "resident" (no streaming).
        wall_s: wall time of the graph (shared by all tokens of a prefill batch, as all below).
        read_s: of it, with at least one read under way.
        wait_s: exposed wait: of it, time that compute stood still for reads. With userfaultfd,
            time in which at least one compute thread slept.
        manage_s: of it, cache bookkeeping and giving memory back.
        cpu_s: processor time of all threads of this process.
        major_faults: page faults that waited for a disk; None where the system does not tell.
        energy_j: joules of the processor packages (RAPL), the whole machine's; None where it
            cannot be read.
        bytes_read: bytes read from the files; prefetch_bytes: of them, ahead of need.
        hits, misses: distinct entries found and not found, a lookup per expert, layer and batch;
            prefetch_hits: of the hits, first uses of entries read ahead. None of them looks up
            anything on the path "layers".
        resident_bytes: the cache's sum after the step; None without one.
    """

    index: int
    phase: str
    token: int
    text: str
    layers: np.ndarray = field(repr=False)
    experts: np.ndarray = field(repr=False)
    weights: np.ndarray = field(repr=False)
    hit: np.ndarray = field(repr=False)
    wall_s: float
    read_s: float
    manage_s: float
    bytes_read: int
    hits: int
    misses: int
    path: Path = "cache"
    wait_s: float = 0.0
    cpu_s: float | None = None
    major_faults: int | None = None
    energy_j: float | None = None
    prefetch_bytes: int = 0
    prefetch_hits: int = 0
    resident_bytes: int | None = None

    @property
    def compute_s(self) -> float:
        """What is left of the wall time: a residual, not a measurement."""
        return self.wall_s - self.wait_s - self.manage_s


@dataclass
class Generation:
    """A finished generation.

    Attributes:
        text, tokens: what was generated.
        prompt_tokens: ids that were prefilled in this call.
        steps: one `TokenStep` per generated token.
        stop: why it ended, "length" or "end of text".
        begin_s: `time.perf_counter` when it was made.
        ttft_s: from the call to the first token sampled; None if none was.
        prefill_s, decode_s: wall time of prefill, and of all decode steps with sampling.
        prefill_read_bytes: bytes read during prefill.
        hits, misses: lookups of prefill and decode together.
        logits_sha256: over the float32 logits that were computed, in order: of the last prompt
            token (of all with `all_logits`) and of every decode step. None unless asked for.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    steps: list[TokenStep] = field(default_factory=list, repr=False)
    stop: str = "length"
    begin_s: float = field(default_factory=time.perf_counter)
    ttft_s: float | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_read_bytes: int = 0
    hits: int = 0
    misses: int = 0
    logits_sha256: str | None = None

    def sum_up(self) -> None:
        """Take from the steps what they tell together; call once, when all are there."""
        self.tokens = [step.token for step in self.steps]
        self.text = "".join(step.text for step in self.steps)
        self.hits += sum(step.hits for step in self.steps)
        self.misses += sum(step.misses for step in self.steps)

    @property
    def bytes_read(self) -> int:
        """Bytes read from the files in prefill and decode."""
        return self.prefill_read_bytes + sum(step.bytes_read for step in self.steps)

    @property
    def hit_rate(self) -> float | None:
        """Hits per lookup over prefill and decode; None if nothing was looked up."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else None

    @property
    def prefill_tok_s(self) -> float | None:
        """Prompt tokens per second; None if there was no prompt."""
        return len(self.prompt_tokens) / self.prefill_s if self.prefill_s else None

    @property
    def decode_tok_s(self) -> float | None:
        """Generated tokens per second; None if there were none."""
        return len(self.tokens) / self.decode_s if self.decode_s else None
