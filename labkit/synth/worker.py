"""The process in which llama.cpp builds models from metadata, because it may abort there.

`python -m labkit.synth.worker` reads one JSON job a line from its standard input and answers each
with one JSON line on its standard output:

- `{"job": "tensors", "metadata": PATH}` asks which tensors llama.cpp wants for the metadata in
  that GGUF file: `{"ok": true, "tensors": [[name, [ne0, ne1, ne2, ne3]], ...]}`.
- `{"job": "decode", "model": PATH, "prompt": [ids], "steps": N}` loads a model file and decodes the
  prompt and then N tokens, each the most likely one: `{"ok": true, "tokens": [ids],
  "finite": bool, "spread": smallest standard deviation of a step's logits, "sha256": of them all}`.

A refusal is `{"ok": false, "reason": what llama.cpp logged}`. A wrong assumption ends the process;
the parent then finds the reason on standard error (see `labkit.synth.llama`).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
from typing import Any

import numpy as np

from labkit.runtime import ggml, llama_log


class _GGUFInit(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]


def wanted_tensors(metadata_path: str) -> dict[str, list[int]] | None:
    """Names and shapes (ne[0] first) of the tensors that llama.cpp creates for a file's metadata.

    In creation order, optional tensors too; None when llama.cpp refuses.
    """
    llama = ggml.llama()
    read = ggml.function("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _GGUFInit)
    metadata = read(metadata_path.encode(), _GGUFInit(True, None))
    if not metadata:
        return None
    # A dict, since a tensor that several layers share is created more than once.
    tensors: dict[str, list[int]] = {}

    @llama.llama_model_set_tensor_data_t
    def note(address: int, _user_data: object) -> None:
        tensor = ggml.tensor_at(address)
        tensors[tensor.name.decode()] = list(tensor.ne)

    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama.llama_model_init_from_user(metadata, note, None, params)
    ggml.function("gguf_free", None, ctypes.c_void_p)(metadata)
    if model is None:
        return None
    llama.llama_model_free(model)
    return tensors


def decode(model_path: str, prompt: list[int], steps: int) -> dict[str, Any] | None:
    """Load a model and decode (see the module's docstring). None when llama.cpp refuses."""
    llama = ggml.llama()
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(model_path.encode(), params)
    if model is None:
        return None
    context_params = llama.llama_context_default_params()
    context_params.n_ctx = 128
    context_params.n_batch = context_params.n_ubatch = 64
    context_params.n_threads = context_params.n_threads_batch = 1
    context = llama.llama_init_from_model(model, context_params)
    if context is None:
        llama.llama_model_free(model)
        return None
    logits = _greedy(context, llama.llama_model_get_vocab(model), prompt, steps)
    llama.llama_free(context)
    llama.llama_model_free(model)
    if logits is None:
        return None
    return {
        "tokens": logits.argmax(axis=1).tolist(),
        "finite": bool(np.isfinite(logits).all()),
        "spread": float(logits.std(axis=1).min()),
        "sha256": hashlib.sha256(logits.tobytes()).hexdigest(),
    }


def _greedy(context: Any, vocab: Any, prompt: list[int], steps: int) -> np.ndarray | None:
    """Logits (steps + 1, vocabulary) of the last prompt token and of each token after it."""
    llama = ggml.llama()
    n_vocab = llama.llama_vocab_n_tokens(vocab)
    rows: list[np.ndarray] = []
    batch = prompt
    for _ in range(steps + 1):
        ids = (llama.llama_token * len(batch))(*batch)
        if llama.llama_decode(context, llama.llama_batch_get_one(ids, len(batch))) != 0:
            return None
        logits = llama.llama_get_logits_ith(context, -1)
        if not logits:
            return None
        rows.append(np.ctypeslib.as_array(logits, (n_vocab,)).copy())
        batch = [int(rows[-1].argmax())]
    return np.stack(rows)


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    llama_log.forget()
    if job["job"] == "tensors":
        tensors = wanted_tensors(job["metadata"])
        result = None if tensors is None else {"tensors": list(tensors.items())}
    else:
        result = decode(job["model"], job["prompt"], job["steps"])
    if result is None:
        return {"ok": False, "reason": llama_log.reason()}
    return {"ok": True} | result


def main() -> None:
    """Serve jobs until standard input ends."""
    _leave_no_core_file()
    # Anything that a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    ggml.self_check()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _leave_no_core_file() -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
