"""The bookkeeping of LRU on cases worked by hand, and its budget under random requests."""

from __future__ import annotations

import random

import pytest

from labkit.policy import LRU


def test_the_oldest_entry_goes_first() -> None:
    cache = LRU(30)
    assert cache.request(0, [1, 2], 10).misses == [(0, 1), (0, 2)]
    assert cache.request(0, [1], 10).hits == [(0, 1)]
    found = cache.request(1, [7, 8], 10)
    assert found.misses == [(1, 7), (1, 8)]
    assert found.evicted == [(0, 2)]
    assert (0, 1) in cache
    assert cache.resident_bytes == 30


def test_one_lookup_per_distinct_expert() -> None:
    cache = LRU(100)
    assert cache.request(0, [3, 3, 5, 3], 10).misses == [(0, 3), (0, 5)]


def test_a_batch_is_never_evicted_by_itself() -> None:
    cache = LRU(20)
    assert cache.request(0, [1, 2, 3], 10).evicted == []
    assert cache.resident_bytes == 30
    # What exceeded the budget goes before the next batch looks, oldest first.
    found = cache.request(0, [1, 3], 10)
    assert found.evicted[0] == (0, 1)
    assert found.hits == [(0, 3)]


def test_without_a_budget_nothing_is_ever_found() -> None:
    cache = LRU(0)
    for _ in range(3):
        assert cache.request(0, [1, 2], 10).hits == []


def test_a_cycle_longer_than_the_cache_hits_nothing_and_a_shorter_one_all() -> None:
    def hits(budget: int) -> int:
        cache = LRU(budget)
        for _ in range(3):
            for layer in range(10):
                cache.request(layer, [0], 10)
        return sum(len(cache.request(layer, [0], 10).hits) for layer in range(10))

    assert hits(90) == 0
    assert hits(100) == 10


def test_a_discarded_entry_is_missed_again() -> None:
    cache = LRU(100)
    cache.request(0, [1], 10)
    cache.discard((0, 1))
    assert cache.resident_bytes == 0
    assert cache.request(0, [1], 10).misses == [(0, 1)]


def test_resident_stays_within_the_budget() -> None:
    rng = random.Random(1)
    sizes = {layer: rng.randint(1, 40) for layer in range(6)}
    for budget in (0, 50, 333, 5000):
        cache = LRU(budget)
        held: dict[tuple[int, int], int] = {}
        for _ in range(2000):
            layer = rng.randrange(6)
            experts = rng.sample(range(16), rng.randint(1, 6))
            found = cache.request(layer, experts, sizes[layer])
            for entry in found.evicted:
                del held[entry]
            assert all(entry in held for entry in found.hits)
            assert not any(entry in held for entry in found.misses)
            held |= dict.fromkeys(found.misses, sizes[layer])
            assert sum(held.values()) == cache.resident_bytes
            assert cache.resident_bytes <= max(budget, len(experts) * sizes[layer])


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        LRU(-1)
