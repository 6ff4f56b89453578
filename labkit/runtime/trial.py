"""A trial in a process of its own: does llama.cpp survive this file?

llama.cpp checks much of a model with assertions, which end the process. `labkit.gguf_map` refuses
what can be told from rules, but each architecture asserts relations of its own between its keys
(head sizes, rotary dimensions, groups). So before a file is loaded here for the first time, a child
process loads its metadata, builds its graph, and tokenises a text. Weights are neither read nor
allocated (``no_alloc``), so this takes a fraction of a second at any size of model.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from labkit.errors import ModelFileError
from labkit.gguf_map import GGUFMap

_WAIT_S = 120.0
_LAST_WORDS = 400
_passed: set[tuple[tuple[str, int, int], ...]] = set()

_CHILD = r"""
import ctypes, os, sys
import llama_cpp.llama_cpp as llama
path, (n_ctx, n_ubatch, tokenise) = sys.argv[1], map(int, sys.argv[2:])
params = llama.llama_model_default_params()
params.n_gpu_layers, params.load_mode, params.no_alloc = 0, 0, True
params.use_extra_bufts = False
model = llama.llama_model_load_from_file(os.fsencode(path), params)
if model:
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = n_ctx, n_ubatch, n_ubatch
    options.op_offload = options.offload_kqv = False
    llama.llama_init_from_model(model, options)
    if tokenise:
        text = "Ab 1\n\u00e9\u4e2d\U0001f600".encode() + bytes(range(1, 32))
        room = (ctypes.c_int32 * 512)()
        vocab = llama.llama_model_get_vocab(model)
        llama.llama_tokenize(vocab, text, len(text), room, 512, True, True)
os.write(1, b"survived")
os._exit(0)
"""


def trial_load(gguf: GGUFMap, *, n_ctx: int = 64, n_ubatch: int = 64) -> None:
    """Raise `ModelFileError` if llama.cpp ends its process on this model.

    A model that llama.cpp refuses in an orderly way passes: loading it then gives the reason. A
    model that has passed is not tried again by this process, unless its files change. A child that
    cannot be started, or does not answer within two minutes, proves nothing and passes.
    """
    stamp = _stamp(gguf)
    if stamp in _passed:
        return
    arguments = [str(gguf.paths[0]), str(n_ctx), str(n_ubatch), str(int(gguf.has_tokenizer))]
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", _CHILD, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_WAIT_S,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )
    except (subprocess.TimeoutExpired, OSError):  # no answer, or no Python to ask
        return
    if not child.stdout.endswith(b"survived"):
        if child.returncode > 0:  # it never got as far as llama.cpp's assertions
            return
        raise ModelFileError(
            f"{gguf.paths[0]}: llama.cpp would end this process on the model: {_why(child)}."
            " Its metadata contradict each other or do not suit its architecture; convert the model"
            " again, or download another conversion."
        )
    _passed.add(stamp)


def _stamp(gguf: GGUFMap) -> tuple[tuple[str, int, int], ...]:
    def facts(path: Path) -> tuple[str, int, int]:
        status = path.stat()
        return str(path.absolute()), status.st_size, status.st_mtime_ns

    return tuple(facts(path) for path in gguf.paths)


def _why(child: subprocess.CompletedProcess[bytes]) -> str:
    """The assertion or exception that ended the child, without the path of its source file."""
    lines = child.stderr.decode("utf-8", "replace").splitlines()
    for line in reversed(lines):
        if "GGML_ASSERT" in line or "what():" in line or "fatal error" in line:
            return line.rsplit("/", 1)[-1].strip()[:_LAST_WORDS]
    if child.returncode < 0:
        return f"signal {-child.returncode}"
    return (lines[-1] if lines else f"exit code {child.returncode}")[:_LAST_WORDS]
