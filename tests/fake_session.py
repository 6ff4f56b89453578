"""A session that routes at random: for the protocol of the live view, not for what it shows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from labkit.runtime.steps import TokenStep


class FakeSession:
    """Yields `n` steps of random routing; `pause_s` between them, `error` instead of the sixth."""

    def __init__(
        self,
        layers: int = 7,
        experts: int = 32,
        slots: int = 4,
        pause_s: float = 0.0,
        error: Exception | None = None,
    ) -> None:
        self.map = SimpleNamespace(
            moe_layers=list(range(1, layers + 1)),
            n_expert=experts,
            n_expert_used=slots,
            paths=[Path("fake.gguf")],
            entry_bytes=lambda _layer: 24 * 1024,
        )
        self.cache_bytes = 2 * 2**20
        self.prefill_steps: list[TokenStep] = []
        self.resets = 0
        self._pause_s = pause_s
        self._error = error
        self._interrupted = threading.Event()
        self._rng = np.random.default_rng(0)

    def stream(self, prompt: str, n: int = 64) -> Iterator[TokenStep]:
        """The words of `prompt` as prompt tokens, then `n` numbered words."""
        self._interrupted.clear()
        words = prompt.split(" ")
        rows = len(self.map.moe_layers)
        # as in llama.cpp: the last MoE layer routes only the last token of the prompt
        self.prefill_steps = [
            self._step(i, "prefill", word + " ", rows if i == len(words) - 1 else rows - 1)
            for i, word in enumerate(words)
        ]
        for i in range(n):
            if self._interrupted.wait(self._pause_s) or self._interrupted.is_set():
                raise KeyboardInterrupt
            if self._error is not None and i == 5:
                raise self._error
            yield self._step(len(words) + i, "decode", f"w{i} ", rows)

    def interrupt(self) -> None:
        """End the stream that runs."""
        self._interrupted.set()

    def reset(self) -> None:
        """Count how often a run started anew."""
        self.resets += 1

    def _step(self, index: int, phase: str, text: str, rows: int) -> TokenStep:
        shape = (rows, self.map.n_expert_used)
        order = self._rng.random((rows, self.map.n_expert)).argsort(axis=1)
        hit = self._rng.random(shape) < 0.7
        return TokenStep(
            index=index,
            phase=phase,
            token=index,
            text=text,
            layers=np.array(self.map.moe_layers[:rows]),
            experts=order[:, : shape[1]].astype(np.int32),
            weights=self._rng.dirichlet(np.ones(shape[1]), rows).astype(np.float32),
            hit=hit,
            wall_s=max(self._pause_s, 0.001),
            read_s=0.0,
            manage_s=0.0,
            bytes_read=int((~hit).sum()) * 24 * 1024,
            hits=int(hit.sum()),
            misses=int((~hit).sum()),
        )
