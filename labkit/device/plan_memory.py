"""What must be in memory on each path, and how large an expert cache can be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from labkit.device.plan import MMAP, OVERLAPPED, RESIDENT, Memory, Request
from labkit.errors import BudgetError, SheetError

if TYPE_CHECKING:
    from labkit.sheet import ModelSheet

MIB = 2**20
_LOGITS = ("output.weight", "token_embd.weight")
SPARE = 0.1
"""Part of the usable memory that an automatic cache leaves free."""


def memory_of(model: ModelSheet, request: Request, path: str, cache_mib: float) -> Memory:
    """The memory of one path; a streamed one holds dense weights and the cache."""
    whole = path in (MMAP, RESIDENT)
    return Memory(
        model.dense_bytes / MIB,
        model.routed_bytes / MIB if whole else min(cache_mib, model.routed_bytes / MIB),
        kv_mib(model, request),
        compute_mib(model, request),
    )


def kv_mib(model: ModelSheet, request: Request) -> float:
    """KV cache and recurrent states as a `labkit.runtime.Session` has llama.cpp allocate them.

    NaN where labkit does not know the architecture's cache.

    Raises `OptionError` for a context longer than the model's.
    """
    model.check_context(request.n_ctx)
    try:
        return model.kv_bytes(request.n_ctx, n_ubatch=request.n_ubatch, swa_full=True) / MIB
    except SheetError:
        return math.nan


def compute_mib(model: ModelSheet, request: Request) -> float:
    """An estimate of llama.cpp's compute buffers: a row of logits for every token of a batch.

    llama.cpp reserves them for the widest graph, of which this is all but a few percent:
    `labkit.sheet.ask_llama` asks it.
    """
    vocabulary = max(
        (w.shape[1] for w in model.weights if w.name in _LOGITS and len(w.shape) > 1), default=0
    )
    return vocabulary * 4 * request.n_ubatch / MIB


def automatic_cache_mib(model: ModelSheet, request: Request, usable_mib: float) -> float:
    """The largest cache that leaves a tenth of the usable memory free.

    0 where it would be below the token cycle, since an LRU cache would then find nothing.
    """
    beside = memory_of(model, request, OVERLAPPED, 0).total_mib
    room = min(usable_mib * (1 - SPARE) - beside, model.routed_bytes / MIB)
    return room if room >= model.token_cycle_bytes / MIB else 0.0


def check_cache(model: ModelSheet, cache_mib: float) -> None:
    """Raise `BudgetError` for a cache that is negative or cannot hold one layer of one token."""
    if not cache_mib >= 0:
        raise BudgetError(f"A cache of {cache_mib} MiB makes no sense; 0 turns it off.")
    floor = model.floor_bytes / MIB
    if 0 < cache_mib < floor:
        raise BudgetError(
            f"A cache of {cache_mib:g} MiB cannot hold the experts that one layer uses for one "
            f"token, {floor:.1f} MiB. Give at least that, or 0 to read every expert anew."
        )
