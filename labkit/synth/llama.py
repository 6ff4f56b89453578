"""Ask llama.cpp about models from a process of its own, so that its aborts are errors here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.errors import LlamaError
from labkit.synth.gguf_writer import write_gguf


class LlamaWorker:
    """A worker process (`labkit.synth.worker`), started when it is first needed.

    One worker serves any number of jobs, which spares the start of an interpreter for each. If
    llama.cpp aborts it, the job raises `LlamaError` and the next job starts another.

        with LlamaWorker() as worker:
            worker.tensors({"general.architecture": "qwen3moe", ...})
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="labkit-synth-")
        self._stderr = Path(self._folder.name) / "stderr"

    def __enter__(self) -> LlamaWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process. Closing twice does no harm."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.communicate()
            self._process = None
        self._folder.cleanup()

    def tensors(self, metadata: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Names and shapes (ggml order) of all tensors that a model of this metadata can have.

        Raises:
            LlamaError: llama.cpp refuses the metadata or aborts over it, with its reason.
        """
        path = Path(self._folder.name) / "metadata.gguf"
        write_gguf(path, metadata)
        answer = self._ask({"job": "tensors", "metadata": str(path)})
        return {name: _without_ones(shape) for name, shape in answer["tensors"]}

    def decode(self, model: Path, prompt: Sequence[int] = (), steps: int = 4) -> dict[str, Any]:
        """Load a model file, decode a prompt and then `steps` tokens greedily, on one thread.

        Returns:
            tokens (the most likely id after the prompt and after each step), finite (all logits
            are), spread (least standard deviation of one step's logits), sha256 (of all logits).

        Raises:
            LlamaError: the model cannot be loaded or decoded, with llama.cpp's reason.
        """
        prompt = list(prompt) or [1, 5, 9, 2, 7, 3, 8, 4]
        return self._ask({"job": "decode", "model": str(model), "prompt": prompt, "steps": steps})

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            process.communicate()
            self._process = None
            raise LlamaError(f"llama.cpp ended its process: {self._abort_reason()}")
        answer = json.loads(line)
        if not answer["ok"]:
            raise LlamaError(answer["reason"])
        return answer

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            with self._stderr.open("w") as stderr:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "labkit.synth.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=os.environ | {"GGML_NO_BACKTRACE": "1"},  # it would call a debugger
                    encoding="utf-8",
                )
        return self._process

    def _abort_reason(self) -> str:
        """The failed assertion, or what else the process last said."""
        text = self._stderr.read_text(errors="replace")
        told = re.search(
            r"(GGML_ASSERT|\w+Error|what\(\)|[\w.]+:\d+: fatal).*$", text, re.MULTILINE
        )
        return told.group(0).strip() if told else text.strip()[:300] or "no reason given"


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape as GGUF files hold it: no trailing dimensions of 1."""
    n_dims = max((i + 1 for i, size in enumerate(shape) if size != 1), default=1)
    return tuple(shape[:n_dims])
