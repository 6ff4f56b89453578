"""A sheet as plain JSON values and as the tables that text, charts and notebooks share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from labkit.sheet.bounds import ridge_flop_per_byte
from labkit.sheet.cache_rows import CACHE_KINDS, CacheOptions
from labkit.sheet.floors import latency_floor
from labkit.sheet.ledger import MIB, MemoryLedger, memory_ledger, usable_mib
from labkit.sheet.model_sheet import ModelSheet

if TYPE_CHECKING:
    import pandas as pd

    from labkit.device import DeviceProfile

_CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
BATCHES = (1, 4, 16, 64, 256, 512, 2048)


def contexts(model: ModelSheet, most: int | None = None) -> list[int]:
    """Powers of two up to the model's context, and that context itself."""
    top = min(model.context_length or _CONTEXTS[-1], most or _CONTEXTS[-1])
    return [n for n in _CONTEXTS if n < top] + [top]


def kv_kinds_table(
    model: ModelSheet, n_ctxs: list[int], *, n_ubatch: int = 512, swa_full: bool = False
) -> pd.DataFrame:
    """KV by context and kind of row: n_ctx, kind, kv_bytes, kv_mib.

    Raises `SheetError` where the cache is not known, `OptionError` for a context too long.
    """
    import pandas as pd

    rows = [
        (n_ctx, kind, size, size / MIB)
        for n_ctx in n_ctxs
        for kind, size in model.kv_kind_bytes(
            CacheOptions(n_ctx, n_ubatch, swa_full=swa_full)
        ).items()
    ]
    return pd.DataFrame(rows, columns=["n_ctx", "kind", "kv_bytes", "kv_mib"])


def kv_per_token_table(models: Iterable[ModelSheet], n_ctx: int) -> pd.DataFrame:
    """What a context costs, by model: model, kinds, token_kib, kv_mib (at `n_ctx`), fixed_mib.

    `token_kib` is what one more token adds at the end of a long context, `fixed_mib` what windows
    and recurrent states take however long it is. NaN where the cache is not known.
    """
    import pandas as pd

    rows = []
    for model in models:
        if model.cache is None:
            rows.append((model.name, "not known", math.nan, math.nan, math.nan))
            continue
        long = CacheOptions(1 << 20)
        token = sum(r.nbytes(long) for r in model.cache if r.n_rows(long) > (1 << 18)) / (1 << 20)
        fixed = sum(r.nbytes(long) for r in model.cache if r.n_rows(long) <= (1 << 16))
        kinds = ", ".join(k for k in CACHE_KINDS if any(r.kind == k for r in model.cache))
        at = model.kv_bytes(min(n_ctx, model.context_length or n_ctx))
        rows.append((model.name, kinds, token / 1024, at / MIB, fixed / MIB))
    return pd.DataFrame(rows, columns=["model", "kinds", "token_kib", "kv_mib", "fixed_mib"])


def floors_table(model: ModelSheet, devices: Iterable[DeviceProfile], n_ctx: int) -> pd.DataFrame:
    """Lower bounds of one token at the end of a context, by device, in milliseconds.

    Columns: device, verdict, operations_ms, dram_ms, flash_ms (no expert in memory); NaN where a
    profile does not say.
    """
    import pandas as pd

    ledger = memory_ledger(model, n_ctx)
    rows = []
    for device in devices:
        floor = latency_floor(model, device, n_past=n_ctx - 1, hit_rate=0)
        rows.append(
            {
                "device": device.name,
                "verdict": ledger.verdict(usable_mib(device) * MIB),
                "operations_ms": 1e3 * floor.compute_s,
                "dram_ms": 1e3 * floor.dram_s,
                "flash_ms": 1e3 * floor.flash_s,
            }
        )
    return pd.DataFrame(rows)


def intensity_table(model: ModelSheet, device: DeviceProfile | None = None) -> pd.DataFrame:
    """Operations per byte of weights by size of the batch.

    Columns: n_tokens, flop_per_byte, read_mib, ridge_flop_per_byte (NaN without a device that
    states operations and a memory rate).
    """
    import pandas as pd

    rows = [
        (n, model.intensity_flop_per_byte(n), model.batch_bytes(n) / MIB, ridge_of(device))
        for n in BATCHES
    ]
    columns = ["n_tokens", "flop_per_byte", "read_mib", "ridge_flop_per_byte"]
    return pd.DataFrame(rows, columns=columns)


def ridge_of(device: DeviceProfile | None) -> float:
    """Operations per byte at which a device's compute and DRAM balance; NaN if it is not known."""
    tops = device.get("tops") if device else None
    dram = (device.get("dram_gb_s") or device.get("dram_read_gb_s")) if device else None
    return ridge_flop_per_byte(tops * 1e12, dram * 1e9) if tops and dram else math.nan


def sheet_json(
    model: ModelSheet,
    ledger: MemoryLedger,
    n_ctx: int,
    n_ubatch: int,
    device: DeviceProfile | None = None,
) -> dict[str, Any]:
    """Everything of the sheet as plain JSON values; what is not known is null."""
    published = model.published
    return {
        "name": model.name,
        "architecture": model.architecture,
        "where": model.where,
        "header_only": model.header_only,
        "total_params": model.total_params,
        "active_params": model.active_params,
        "published_total_b": published.total_b if published else None,
        "published_active_b": published.active_b if published else None,
        "bits_per_weight": model.bits_per_weight,
        "weights_bytes": model.total_bytes,
        "part_bytes": model.part_bytes,
        "roles": model.roles_table().to_dict("records"),
        "n_layers": model.n_layers,
        "moe_layers": model.moe_layers,
        "leading_dense_layers": model.leading_dense_layers,
        "n_expert": model.n_expert,
        "n_expert_used": model.n_expert_used,
        "entry_bytes": {str(layer): size for layer, size in model.entry_bytes.items()},
        "token_bytes": model.token_bytes,
        "token_cycle_bytes": model.token_cycle_bytes,
        "cache_floor_bytes": model.floor_bytes,
        "flops_per_token": model.flops_per_token(),
        "flops_per_token_at_ctx": model.flops_per_token(n_ctx - 1),
        "intensity_flop_per_byte": model.intensity_flop_per_byte(),
        "context_length": model.context_length,
        "n_ctx": n_ctx,
        "n_ubatch": n_ubatch,
        "kv_bytes": ledger.kv_bytes,
        "kv_kind_bytes": _kinds(model, n_ctx, n_ubatch),
        "session_kv_bytes": session_kv_bytes(model, n_ctx, n_ubatch),
        "compute_bytes": ledger.compute_bytes,
        "compute_asked": ledger.compute_asked,
        "resident_bytes": ledger.resident_bytes,
        "streamed_bytes": ledger.streamed_bytes,
        "streamed_cycle_bytes": ledger.streamed_cycle_bytes,
        "device": None if device is None else device_json(model, ledger, device, n_ctx),
        "notes": [*model.notes, *([model.cache_note] if model.cache_note else [])],
        "sources": list(model.sources),
    }


def device_json(
    model: ModelSheet, ledger: MemoryLedger, device: DeviceProfile, n_ctx: int
) -> dict[str, Any]:
    """The device's part of `sheet_json`: fit, ridge point, and lower bounds of one token."""
    resident = latency_floor(model, device, n_past=n_ctx - 1)
    cold = latency_floor(model, device, n_past=n_ctx - 1, hit_rate=0)
    return {
        "name": device.name,
        "usable_mib": usable_mib(device),
        "verdict": ledger.verdict(usable_mib(device) * MIB),
        "ridge_flop_per_byte": known(ridge_of(device)),
        "compute_floor_ms": known(1e3 * resident.compute_s),
        "dram_floor_ms": known(1e3 * resident.dram_s),
        "flash_floor_ms": known(1e3 * cold.flash_s),
    }


def session_kv_bytes(model: ModelSheet, n_ctx: int, n_ubatch: int) -> int | None:
    """KV of a `labkit.runtime.Session`, which keeps whole windows; None if it is not known."""
    if model.cache is None:
        return None
    return model.kv_bytes(n_ctx, n_ubatch=n_ubatch, swa_full=True)


def known(value: float) -> float | None:
    """The value, or None for NaN: what is not known is null in JSON."""
    return None if math.isnan(value) else value


def _kinds(model: ModelSheet, n_ctx: int, n_ubatch: int) -> dict[str, int] | None:
    return None if model.cache is None else model.kv_kind_bytes(CacheOptions(n_ctx, n_ubatch))
