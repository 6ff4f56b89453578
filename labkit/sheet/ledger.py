"""The memory ledger: what must be in memory for a context, resident or with streamed experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.errors import SheetError
from labkit.sheet.model_sheet import ModelSheet
from labkit.sheet.weights import PARTS, ROUTED, Bits

if TYPE_CHECKING:
    import pandas as pd

    from labkit.device import DeviceProfile
    from labkit.sheet.ask import LlamaMemory

MIB = 2**20
RESIDENT, STREAMED, TOO_LARGE = "resident", "streamed", "too large"

VERDICTS = (RESIDENT, STREAMED, TOO_LARGE)
"""Whether all of it fits into a device's usable memory, all but the routed experts, or not even
that. "streamed" counts the least expert cache that works, what one token uses in one layer."""


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Bytes that a run needs.

    Attributes:
        part_bytes: weights by part (see `PARTS`).
        kv_bytes: KV cache and recurrent states of the context; None if it is not known.
        compute_bytes: llama.cpp's scratch buffers.
        compute_asked: whether llama.cpp said so; else it is the least, the logits of one batch.
        kv_counted_by: who counted the cache, and whether llama.cpp counts the same.
        cache_floor_bytes: the least expert cache that works, 0 in a dense model.
        token_cycle_bytes: routed experts that one token uses.
        token_bytes: weights that one token reads, "the active parameters".
    """

    part_bytes: dict[str, int]
    kv_bytes: int | None
    compute_bytes: int
    compute_asked: bool
    cache_floor_bytes: int
    token_cycle_bytes: int
    token_bytes: int
    kv_counted_by: str = "labkit"

    @property
    def weights_bytes(self) -> int:
        """All weights."""
        return sum(self.part_bytes.values())

    @property
    def beside_bytes(self) -> int:
        """What is needed whatever becomes of the routed experts: the rest of the weights and the
        buffers. A KV cache that is not known counts nothing."""
        rest = self.weights_bytes - self.part_bytes[ROUTED]
        return rest + (self.kv_bytes or 0) + self.compute_bytes

    @property
    def resident_bytes(self) -> int:
        """All weights in memory."""
        return self.beside_bytes + self.part_bytes[ROUTED]

    @property
    def streamed_bytes(self) -> int:
        """The least with streamed experts."""
        return self.beside_bytes + self.cache_floor_bytes

    @property
    def streamed_cycle_bytes(self) -> int:
        """With an expert cache of one token cycle, below which an LRU cache hits nothing."""
        return self.beside_bytes + self.token_cycle_bytes

    def verdict(self, usable_bytes: float) -> str:
        """One of `VERDICTS` for a device with so much usable memory."""
        if self.resident_bytes <= usable_bytes:
            return RESIDENT
        fits = self.part_bytes[ROUTED] and self.streamed_bytes <= usable_bytes
        return STREAMED if fits else TOO_LARGE

    def table(self) -> pd.DataFrame:
        """One row per item of the bill: item, size_bytes, size_mib, counted_by."""
        import pandas as pd

        rows: list[tuple[str, float, str]] = [
            (part, self.part_bytes[part], "the tensors' shapes and types") for part in PARTS
        ]
        kv = float("nan") if self.kv_bytes is None else self.kv_bytes
        rows.append(("KV cache", kv, self.kv_counted_by))
        by = "llama.cpp" if self.compute_asked else "at least: the logits of one batch"
        rows.append(("compute buffers", self.compute_bytes, by))
        table = pd.DataFrame(rows, columns=["item", "size_bytes", "counted_by"])
        table.insert(2, "size_mib", table["size_bytes"] / MIB)
        return table


def memory_ledger(
    model: ModelSheet,
    n_ctx: int,
    *,
    n_ubatch: int = 512,
    swa_full: bool = False,
    asked: LlamaMemory | None = None,
) -> MemoryLedger:
    """The ledger of a model for one context.

    Args:
        n_ctx, n_ubatch, swa_full: see `labkit.sheet.CacheOptions`.
        asked: llama.cpp's answer for this model and these options, for its compute buffers, and
            for a KV cache that labkit does not know.

    Raises:
        OptionError: a context longer than the model's.
    """
    model.check_context(n_ctx)
    theirs = asked.kv_bytes if asked else None
    try:
        kv = model.kv_bytes(n_ctx, n_ubatch=n_ubatch, swa_full=swa_full)
        counted_by = "labkit"
        if theirs is not None:
            counted_by += f"; llama.cpp counts {'the same' if theirs == kv else theirs}"
    except SheetError:
        kv, counted_by = theirs, "not known" if theirs is None else "llama.cpp"
    return MemoryLedger(
        part_bytes=dict(model.part_bytes),
        kv_bytes=kv,
        compute_bytes=asked.compute_bytes if asked else model.compute_floor_bytes(n_ubatch),
        compute_asked=asked is not None,
        cache_floor_bytes=model.floor_bytes,
        token_cycle_bytes=model.token_cycle_bytes,
        token_bytes=model.token_bytes,
        kv_counted_by=counted_by,
    )


def usable_mib(device: DeviceProfile) -> float:
    """Memory of a device that one run can take; all of it where the profile does not say."""
    return device.get("usable_mib") or device.need("ram_mib")


def fit_table(
    models: Iterable[ModelSheet],
    devices: Sequence[DeviceProfile],
    *,
    bits: Sequence[Bits] = (2, 3, 4, 8, 16),
    n_ctx: int = 4096,
) -> pd.DataFrame:
    """Which model fits which device at which width of its weights.

    Columns: model, device, bits, total_b and active_b (1e9 parameters), resident_mib,
    streamed_mib, active_mib (weights that a token reads: what "active parameters" suggests),
    kv_mib, usable_mib, verdict (see `VERDICTS`), tempting (active weights fit, all do not). A model
    with a shorter context than `n_ctx` is counted with its own.
    """
    import pandas as pd

    rows = []
    for model in models:
        context = min(n_ctx, model.context_length or n_ctx)
        for width in bits:
            ledger = memory_ledger(model.at_bits(width), context)
            for device in devices:
                rows.append(_fit_row(model, device, width, ledger))
    return pd.DataFrame(rows)


def _fit_row(
    model: ModelSheet, device: DeviceProfile, width: Bits, ledger: MemoryLedger
) -> dict[str, object]:
    usable = usable_mib(device)
    verdict = ledger.verdict(usable * MIB)
    active = (ledger.token_bytes + (ledger.kv_bytes or 0) + ledger.compute_bytes) / MIB
    return {
        "model": model.name,
        "device": device.name,
        "bits": width if isinstance(width, (int, float, str)) else "mixed",
        "total_b": model.total_params / 1e9,
        "active_b": model.active_params / 1e9,
        "resident_mib": ledger.resident_bytes / MIB,
        "streamed_mib": ledger.streamed_bytes / MIB,
        "active_mib": ledger.token_bytes / MIB,
        "kv_mib": float("nan") if ledger.kv_bytes is None else ledger.kv_bytes / MIB,
        "usable_mib": usable,
        "verdict": verdict,
        "tempting": verdict != RESIDENT and active <= usable,
    }


def sparsity_table(models: Iterable[ModelSheet], *, n_tokens: int = 32) -> pd.DataFrame:
    """What routing saves, and what it does not.

    Columns: model, total_b, active_b, compute_pct (operations of a token against using every
    parameter), read_pct (bytes of weights that one token reads, of all), batch_read_pct (the same
    for a batch of `n_tokens` under even routing), capacity_pct (weights that must be stored: all).
    """
    import pandas as pd

    rows = []
    for model in models:
        every = sum(2 * w.n_params for w in model.weights if w.multiplies)
        rows.append(
            {
                "model": model.name,
                "total_b": model.total_params / 1e9,
                "active_b": model.active_params / 1e9,
                "compute_pct": 100 * model.flops_per_token() / every,
                "read_pct": 100 * model.token_bytes / model.total_bytes,
                "batch_read_pct": 100 * model.batch_bytes(n_tokens) / model.total_bytes,
                "capacity_pct": 100.0,
            }
        )
    return pd.DataFrame(rows)
