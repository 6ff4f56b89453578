"""Stock llama.cpp without any callback of labkit: the reference that streaming must equal."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np

from labkit.runtime import ggml


def logits(
    path: Path, prompt: list[int], steps: int, *, threads: int = 2, n_ctx: int = 256
) -> np.ndarray:
    """(len(prompt) + steps, n_vocab) float32: every prompt token, then greedy decode steps."""
    llama = ggml.llama()
    params = llama.llama_model_default_params()
    params.use_extra_bufts = False
    params.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    assert model, f"stock llama.cpp does not load {path}"
    options = llama.llama_context_default_params()
    options.n_ctx = n_ctx
    options.n_batch = options.n_ubatch = 256
    options.n_threads = options.n_threads_batch = threads
    options.op_offload = options.offload_kqv = False
    context = llama.llama_init_from_model(model, options)
    assert context, f"stock llama.cpp makes no context for {path}"
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(256, 0, 1)
    rows: list[np.ndarray] = []

    def decode(tokens: list[int], position: int) -> None:
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = True
        assert llama.llama_decode(context, batch) == 0
        for index in range(len(tokens)):
            row = llama.llama_get_logits_ith(context, index)
            rows.append(np.ctypeslib.as_array(row, (n_vocab,)).copy())

    try:
        decode(prompt, 0)
        for step in range(steps):
            decode([int(rows[-1].argmax())], len(prompt) + step)
    finally:
        llama.llama_batch_free(batch)
        llama.llama_free(context)
        llama.llama_model_free(model)
    return np.stack(rows)


def observe(path: Path, prompt: list[int], prefixes: tuple[bytes, ...]) -> dict[bytes, np.ndarray]:
    """Values of the named nodes of one prefill graph, read as rows: name -> (rows, ne[0]).

    I32 nodes are read by their strides; `name + b" flat"` holds as many values without them.
    """
    llama = ggml.llama()
    found: dict[bytes, np.ndarray] = {}
    prototype = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_size_t, ctypes.c_bool, ctypes.c_size_t)

    def on_node(address: int, ask: bool, _: int) -> bool:
        node = ggml.tensor_at(address)
        if not node.name.startswith(prefixes):
            return False
        if not ask:
            columns, rows = node.ne[0], node.ne[1]
            kind = ctypes.c_int32 if node.type == 26 else ctypes.c_float
            read = [
                kind.from_address(node.data + row * node.nb[1] + column * node.nb[0]).value
                for row in range(rows)
                for column in range(columns)
            ]
            found[node.name] = np.array(read).reshape(rows, columns)
            flat = (kind * (rows * columns)).from_address(node.data)
            found[node.name + b" flat"] = np.array(flat).reshape(rows, columns)
        return True

    callback = prototype(on_node)
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    options = llama.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 256
    options.cb_eval = ctypes.cast(callback, llama.ggml_backend_sched_eval_callback)
    context = llama.llama_init_from_model(model, options)
    tokens = (ctypes.c_int32 * len(prompt))(*prompt)
    assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(prompt))) == 0
    llama.llama_free(context)
    llama.llama_model_free(model)
    return found
