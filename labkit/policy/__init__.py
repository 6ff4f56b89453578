"""Cache policies: which expert entries stay when a layer asks for more than the budget holds.

A policy does the bookkeeping only, in bytes, and knows no file and no memory. So one
implementation serves the live `ExpertStreamSource` and the replay of a trace alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from labkit.errors import OptionError
from labkit.policy.base import Cache, CachePolicy, Entry, Lookup, Ranking
from labkit.policy.echo import Echo
from labkit.policy.forecast import Forecast
from labkit.policy.frequency import LFU, LRFU, Belady, FadingUses, Future, Uses, next_uses
from labkit.policy.partition import Partition
from labkit.policy.queues import S3FIFO, Random
from labkit.policy.recency import LRU, SegmentedLRU

__all__ = [
    "LFU",
    "LRFU",
    "LRU",
    "ONLINE",
    "POLICIES",
    "S3FIFO",
    "Belady",
    "Cache",
    "CachePolicy",
    "Echo",
    "Entry",
    "FadingUses",
    "Forecast",
    "Future",
    "Lookup",
    "Partition",
    "Random",
    "Ranking",
    "SegmentedLRU",
    "Uses",
    "make_policy",
    "make_ranking",
    "next_uses",
]

ONLINE: tuple[str, ...] = (
    "lru", "lfu", "lrfu", "slru", "s3-fifo", "layer-lru", "layer-lfu", "echo", "random",
)  # fmt: skip
"""Names of the policies that a live session can use."""

POLICIES: tuple[str, ...] = (*ONLINE, "belady")
"""Names of all policies, with the optimum, which needs to know the future."""


def make_policy(
    name: str,
    budget_bytes: int,
    entry_bytes: Mapping[int, int],
    *,
    seed: int = 0,
    ranking: Any = None,
) -> CachePolicy:
    """Make the policy called `name`.

    Args:
        entry_bytes: bytes of an expert entry, by MoE layer.
        seed: of "random".
        ranking: from `make_ranking` for the same name, to share it; None gives the cache its own.

    Raises:
        OptionError: no such policy.
        ValueError: a negative budget.
    """
    if name == "belady" and ranking is None:
        raise OptionError("belady knows the future, so only a replay can use it")
    makers: dict[str, Callable[[int], CachePolicy]] = {
        "lru": LRU,
        "lfu": partial(LFU, uses=ranking),
        "lrfu": partial(LRFU, uses=ranking),
        "slru": SegmentedLRU,
        "s3-fifo": S3FIFO,
        "layer-lru": partial(Partition, entry_bytes=entry_bytes, cache=LRU),
        "layer-lfu": partial(Partition, entry_bytes=entry_bytes, cache=partial(LFU, uses=ranking)),
        "echo": partial(Echo, n_layers=len(entry_bytes), forecast=ranking),
        "random": partial(Random, seed=seed),
        "belady": partial(Belady, future=ranking, shared=True),
    }
    if name not in makers:
        raise OptionError(f"there is no cache policy {name!r}; there are {', '.join(ONLINE)}")
    return makers[name](budget_bytes)


def make_ranking(
    name: str, n_layers: int, future: Iterable[Sequence[int]] | None = None
) -> Ranking | None:
    """What the caches of all budgets under the policy `name` can share; None if they share nothing.

    Args:
        n_layers: MoE layers of the model.
        future: see `Future`; for "belady".
    """
    if name in ("lfu", "layer-lfu"):
        return Uses()
    if name == "lrfu":
        return FadingUses()
    if name == "echo":
        return Forecast(n_layers)
    return Future(future) if name == "belady" and future is not None else None
