"""Cache policies: which expert entries stay when a layer asks for more than the budget holds.

A policy does the bookkeeping only, in bytes, and knows no file and no memory. So one
implementation serves the live `ExpertStreamSource` and the replay of a trace alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from labkit.policy.base import Cache, CachePolicy, Entry, Lookup
from labkit.policy.echo import Echo
from labkit.policy.forecast import Forecast
from labkit.policy.frequency import LFU, LRFU, Belady, next_uses
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
    "Forecast",
    "Lookup",
    "Partition",
    "Random",
    "SegmentedLRU",
    "make_policy",
    "next_uses",
]

_PLAIN = {"lru": LRU, "lfu": LFU, "lrfu": LRFU, "slru": SegmentedLRU, "s3-fifo": S3FIFO}
_BY_LAYER = {"layer-lru": LRU, "layer-lfu": LFU}

ONLINE = (*_PLAIN, *_BY_LAYER, "echo", "random")
"""Names of the policies that a live session can use."""

POLICIES = (*ONLINE, "belady")
"""Names of all policies, with the optimum, which needs to know the future."""


def make_policy(
    name: str, budget_bytes: int, entry_bytes: Mapping[int, int], *, seed: int = 0
) -> CachePolicy:
    """Make the online policy called `name`.

    Args:
        entry_bytes: bytes of an expert entry, by MoE layer.
        seed: of "random".

    Raises:
        ValueError: no such policy, or a negative budget.
    """
    if name in _PLAIN:
        return _PLAIN[name](budget_bytes)
    if name in _BY_LAYER:
        return Partition(budget_bytes, entry_bytes, _BY_LAYER[name])
    if name == "echo":
        return Echo(budget_bytes, len(entry_bytes))
    if name == "random":
        return Random(budget_bytes, seed)
    if name == "belady":
        raise ValueError("belady knows the future, so only a replay can use it")
    raise ValueError(f"there is no cache policy {name!r}; there are {', '.join(ONLINE)}")
