"""`Plan`: what each way of running a model on a device would take, and which one to choose."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from labkit.device.hits import HitRate

if TYPE_CHECKING:
    import pandas as pd

MMAP, RESIDENT, SERIAL, OVERLAPPED = "mmap", "resident", "stream-serial", "stream-overlap"
PATHS = (MMAP, RESIDENT, SERIAL, OVERLAPPED)


@dataclass(frozen=True)
class Memory:
    """MiB by part, of which the process needs all; NaN where labkit cannot tell."""

    dense_mib: float
    experts_mib: float
    kv_mib: float
    compute_mib: float

    @property
    def total_mib(self) -> float:
        """The sum of the known parts."""
        return sum(part for part in asdict(self).values() if not math.isnan(part))


@dataclass(frozen=True)
class PathPlan:
    """One way of running the model.

    Attributes:
        path: one of `PATHS`.
        fits: whether the memory that it needs is there.
        memory: by part. Of a mapped file the weights are page cache: all of them are listed, and
            what is not there is read again and again.
        hit: what the cache finds (None where there is no cache).
        read_mib_per_token: expert bytes that a generated token waits for.
        decode_tok_s, low_tok_s, high_tok_s: prediction and its band; NaN where it does not fit.
        load_s: reading what has to be in memory before the first prompt.
        prefill_s: the prompt, which is the time to its first token; NaN where a rate is missing.
        remark: what to know about this row; "" if nothing.
    """

    path: str
    fits: bool
    memory: Memory
    hit: HitRate | None
    read_mib_per_token: float
    decode_tok_s: float
    low_tok_s: float
    high_tok_s: float
    load_s: float
    prefill_s: float
    remark: str = ""


@dataclass(frozen=True)
class Request:
    """What is asked of the model: tokens of context, of the prompt, of the answer."""

    n_ctx: int = 4096
    prompt_tokens: int = 512
    output_tokens: int = 128
    n_ubatch: int = 512
    lanes: int = 4


@dataclass(frozen=True)
class Plan:
    """All ways of running a model on a device, and the recommended one with its reason.

    `cache_mib` is the expert cache of the streamed rows, `cycle_mib` the token cycle below which
    an LRU cache finds nothing, `usable_mib` the memory of the device. `recommended` is one of
    `PATHS`, or None where nothing fits. `assumptions` says what was not measured.
    """

    model: str
    device: str
    request: Request
    usable_mib: float
    model_mib: float
    cycle_mib: float
    cache_mib: float
    paths: tuple[PathPlan, ...]
    recommended: str | None
    reason: str
    assumptions: tuple[str, ...]

    def path(self, name: str) -> PathPlan:
        """The row of one way; `KeyError` for an unknown one."""
        for row in self.paths:
            if row.path == name:
                return row
        raise KeyError(f"there is no path {name!r}; there are {', '.join(PATHS)}")

    def request_s(self, row: PathPlan) -> float:
        """Prompt and answer together, the model being open."""
        return row.prefill_s + self.request.output_tokens / row.decode_tok_s

    def table(self) -> pd.DataFrame:
        """One row per path: fits, memory_mib, hit_pct, read_mib_per_token, decode_tok_s, band.

        Further columns: load_s, prefill_tok_s, ttft_s (of the prompt), request_s, recommended,
        remark. NaN is not known, or does not apply.
        """
        import pandas as pd

        rows = [
            {
                "path": row.path,
                "fits": row.fits,
                "memory_mib": row.memory.total_mib,
                "hit_pct": row.hit.hit_pct if row.hit else math.nan,
                "read_mib_per_token": row.read_mib_per_token,
                "decode_tok_s": row.decode_tok_s,
                "low_tok_s": row.low_tok_s,
                "high_tok_s": row.high_tok_s,
                "load_s": row.load_s,
                "prefill_tok_s": self.request.prompt_tokens / row.prefill_s,
                "ttft_s": row.prefill_s,
                "request_s": self.request_s(row),
                "recommended": row.path == self.recommended,
                "remark": row.remark,
            }
            for row in self.paths
        ]
        return pd.DataFrame(rows)

    def memory_table(self) -> pd.DataFrame:
        """Memory by part: path, dense_mib, experts_mib, kv_mib, compute_mib, total, usable."""
        import pandas as pd

        rows = [
            {"path": row.path, **asdict(row.memory), "total_mib": row.memory.total_mib}
            for row in self.paths
        ]
        return pd.DataFrame(rows).assign(usable_mib=self.usable_mib)

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not known is None."""
        return {
            "model": self.model,
            "device": self.device,
            "request": asdict(self.request),
            "usable_mib": self.usable_mib,
            "model_mib": self.model_mib,
            "token_cycle_mib": self.cycle_mib,
            "cache_mib": self.cache_mib,
            "paths": _records(self.table()),
            "memory": _records(self.memory_table()),
            "hit_rate": next((row.hit.source for row in self.paths if row.hit), None),
            "recommended": self.recommended,
            "reason": self.reason,
            "assumptions": list(self.assumptions),
        }


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in rows]
