"""The process that asks llama.cpp what a model would allocate, because llama.cpp may abort there.

`python -m labkit.sheet.ask_worker JOB` with a JSON object: path, n_ctx, n_ubatch, type_k, type_v
(numbers of ggml types), swa_full. It prints one JSON object: weights, kv, compute (bytes), or
"refused" with llama.cpp's reason, or "unknown" when this build cannot tell.

Nothing is allocated and no tensor is read: llama.cpp counts what it would allocate. Its count is a
C++ map, returned by `llama_get_memory_breakdown`, the one function whose answer no C function
gives. It is called as x86-64 returns an object, the map is read as libstdc++ lays it out, and its
sum is checked against the model's own size before it is believed.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

SYMBOL = "_Z26llama_get_memory_breakdownPK13llama_context"
_MAX_ENTRIES = 64
_ERROR = 4  # GGML_LOG_LEVEL_ERROR


def main() -> None:
    """Answer the one job on the command line."""
    job = json.loads(sys.argv[1])
    answer = _answer(job)
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # nothing was allocated that would need freeing


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    import llama_cpp.llama_cpp as llama

    errors: list[str] = []

    @llama.llama_log_callback
    def note(level: int, text: bytes | None, _: object) -> None:
        if level == _ERROR and text:
            errors.append(text.decode("utf-8", "replace").strip())

    llama.llama_log_set(note, ctypes.c_void_p())
    params = llama.llama_model_default_params()
    params.n_gpu_layers, params.load_mode = 0, 0
    params.use_extra_bufts, params.no_alloc = False, True
    model = llama.llama_model_load_from_file(os.fsencode(job["path"]), params)
    if not model:
        return {"refused": "; ".join(errors) or "no reason given"}
    options = llama.llama_context_default_params()
    options.n_ctx = job["n_ctx"]
    options.n_batch = options.n_ubatch = job["n_ubatch"]
    options.type_k, options.type_v = job["type_k"], job["type_v"]
    options.swa_full = job["swa_full"]
    options.op_offload = options.offload_kqv = False
    context = llama.llama_init_from_model(model, options)
    if not context:
        return {"refused": "; ".join(errors) or "no reason given"}
    counts = memory_breakdown(llama._lib, context)
    size = llama.llama_model_size(model)
    if counts is None or not size <= counts["weights"] <= size + size // 8 + (1 << 26):
        return {"unknown": f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"}
    return counts | {"weights": size}


def memory_breakdown(library: ctypes.CDLL, context: int) -> dict[str, int] | None:
    """llama.cpp's own count of bytes by use: weights, kv, compute. None if it cannot be read."""
    function = getattr(library, SYMBOL, None)
    if function is None or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return None
    # An object of a class type is returned through a pointer that the caller passes first.
    function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p]
    tree = (ctypes.c_uint64 * 6)()  # comparison, colour, root, leftmost, rightmost, count
    function(ctypes.addressof(tree), context)
    if not 0 < tree[5] <= _MAX_ENTRIES:
        return None
    entries = list(_in_order(tree[2]))
    if len(entries) != tree[5]:
        return None
    sums = [sum(entry[i] for entry in entries) for i in range(3)]
    return dict(zip(("weights", "kv", "compute"), sums, strict=True))


def _in_order(node: int) -> Iterator[tuple[int, ...]]:
    """(model, context, compute) of each node; a node is colour, parent, left, right, key, value."""
    if not node:
        return
    words = (ctypes.c_uint64 * 8).from_address(node)
    yield from _in_order(words[2])
    yield tuple(words[5:8])
    yield from _in_order(words[3])


if __name__ == "__main__":
    main()
