"""What the build asks of stock llama.cpp: quantise a file, compute logits and expert choices."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np

FILE_TYPES = {"q8_0": 7, "q4_k_m": 15, "q4_0": 2}
_log = logging.getLogger(__name__)


@llama_cpp.llama_log_callback
def _logged(level: int, text: bytes, _data: ctypes.c_void_p) -> None:
    _log.debug("%s", text.decode(errors="replace").rstrip())


def quantise(source: Path, target: Path, kind: str) -> None:
    """Runs llama.cpp's own quantiser, one thread."""
    llama_cpp.llama_log_set(_logged, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[kind]
    params.nthread = 1
    target.unlink(missing_ok=True)
    failed = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(params)
    )
    if failed:
        raise RuntimeError(f"llama.cpp could not quantise {source} to {kind}")


class Model:
    """A GGUF model on the CPU: logits of whole texts and the experts chosen on the way."""

    def __init__(self, path: Path, context: int = 512) -> None:
        llama_cpp.llama_log_set(_logged, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.path = path
        self.chosen: dict[int, np.ndarray] = {}
        self._hook = llama_cpp.ggml_backend_sched_eval_callback(self._see)
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = context
        settings.n_threads = settings.n_threads_batch = 1
        settings.flash_attn_type = 0
        settings.cb_eval = self._hook
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.batch = llama_cpp.llama_batch_init(context, 0, 1)

    def _see(self, tensor: int, ask: bool, _data: object) -> bool:
        """Copies the ids that a router chose: a strided view, so row by row."""
        head = ctypes.string_at(tensor + 256, 64).split(b"\0", 1)[0]
        if not head.startswith(b"ffn_moe_topk-"):
            return not ask
        if not ask:
            sizes = (ctypes.c_int64 * 4).from_address(tensor + 16)
            strides = (ctypes.c_size_t * 4).from_address(tensor + 48)
            data = ctypes.c_void_p.from_address(tensor + 248).value
            rows = [
                np.frombuffer(ctypes.string_at(data + i * strides[1], 4 * sizes[0]), np.int32)
                for i in range(sizes[1])
            ]
            self.chosen[int(head.split(b"-")[1])] = np.stack(rows)
        return True

    def tokenize(self, text: str) -> list[int]:
        """Token ids without a begin token."""
        raw = text.encode()
        ids = (llama_cpp.llama_token * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), ids, len(ids), False, False)
        return list(ids[:count])

    def forward(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Logits (n, vocab) of a fresh text, and chosen experts (layers, n, k)."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, True
        self.chosen = {}
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise RuntimeError(f"llama.cpp could not decode {len(tokens)} tokens of {self.path}")
        first = llama_cpp.llama_get_logits(self.context)
        logits = np.ctypeslib.as_array(first, (len(tokens), self.size)).copy()
        return logits, np.stack([self.chosen[layer] for layer in sorted(self.chosen)])

    def close(self) -> None:
        """Gives everything back."""
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Model]:
    """A model that is closed at the end of the block."""
    model = Model(path)
    try:
        yield model
    finally:
        model.close()
