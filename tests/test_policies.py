"""Every cache policy: the rules that all keep, and what each is for, on cases worked by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from labkit.policy import (
    LFU,
    LRFU,
    ONLINE,
    S3FIFO,
    Belady,
    CachePolicy,
    Entry,
    Future,
    Partition,
    SegmentedLRU,
    make_policy,
    next_uses,
)

Batch = list[Entry]


def random_batches(seed: int, n: int, layers: int = 5, experts: int = 12) -> list[Batch]:
    """Layers in turn, as a model asks, with favourites that change now and then."""
    rng = random.Random(seed)
    weights = [[rng.random() ** 3 for _ in range(experts)] for _ in range(layers)]
    batches = []
    for number in range(n):
        layer = number % layers
        if rng.random() < 0.02:
            rng.shuffle(weights[layer])
        chosen = dict.fromkeys(rng.choices(range(experts), weights[layer], k=rng.randint(1, 4)))
        batches.append([(layer, expert) for expert in chosen])
    return batches


def count_hits(policy: CachePolicy, batches: Sequence[Batch], entry_bytes: int = 10) -> int:
    return sum(len(policy.lookup(batch, entry_bytes).hits) for batch in batches)


def policy_of(name: str, budget: int, sizes: dict[int, int], batches: list[Batch]) -> CachePolicy:
    if name == "belady":
        return Belady(budget, Future(next_uses(batches)))
    return make_policy(name, budget, sizes)


@pytest.mark.parametrize("name", [*ONLINE, "belady"])
@pytest.mark.parametrize("budget", [0, 15, 60, 333, 700, 5000])
def test_every_policy_keeps_to_its_budget_and_to_its_own_record(name: str, budget: int) -> None:
    rng = random.Random(budget)
    sizes = {layer: rng.randint(1, 40) for layer in range(5)}
    batches = random_batches(7, 1500)
    cache = policy_of(name, budget, sizes, batches)
    held: dict[Entry, int] = {}
    for batch in batches:
        size = sizes[batch[0][0]]
        found = cache.lookup(batch, size)
        assert sorted(found.hits + found.misses) == sorted(batch)
        for entry in found.evicted:
            del held[entry]
        assert all(entry in held for entry in found.hits)
        assert not any(entry in held for entry in found.misses)
        held |= dict.fromkeys(found.misses, size)
        assert all(entry in held and entry in cache for entry in batch)
        assert sum(held.values()) == cache.resident_bytes
        assert cache.resident_bytes <= max(budget, len(batch) * size)
        if budget == 0:
            assert not found.hits
        if found.misses and rng.random() < 0.05:
            cache.discard(found.misses[0])
            del held[found.misses[0]]
            assert found.misses[0] not in cache


@pytest.mark.parametrize("seed", range(4))
def test_nothing_hits_more_than_the_optimum(seed: int) -> None:
    batches = random_batches(seed, 2000)
    sizes = dict.fromkeys(range(5), 10)
    for budget in (40, 100, 200, 350, 600):
        best = count_hits(Belady(budget, Future(next_uses(batches))), batches)
        for name in ONLINE:
            assert count_hits(make_policy(name, budget, sizes), batches) <= best, (name, budget)


@pytest.mark.parametrize("name", [*ONLINE, "belady"])
def test_with_room_for_all_each_entry_is_read_once(name: str) -> None:
    batches = random_batches(3, 500)
    # A layer's share must hold the layer too.
    cache = policy_of(name, 5 * 12 * 10, dict.fromkeys(range(5), 10), batches)
    asked = [entry for batch in batches for entry in batch]
    assert count_hits(cache, batches) == len(asked) - len(set(asked))


@pytest.mark.parametrize("name", ONLINE)
def test_request_counts_an_expert_once_and_names_its_layer(name: str) -> None:
    cache = make_policy(name, 100, {3: 10, 4: 10})
    assert cache.request(3, [5, 5, 7, 5], 10).misses == [(3, 5), (3, 7)]
    assert cache.request(3, [7, 5], 10).hits == [(3, 7), (3, 5)]
    assert cache.request(4, [5], 10).misses == [(4, 5)]


@pytest.mark.parametrize("name", ONLINE)
def test_a_negative_budget_is_refused_by_each(name: str) -> None:
    with pytest.raises(ValueError, match="negative"):
        make_policy(name, -1, {0: 10})


def test_an_unknown_policy_is_refused_and_the_optimum_is_not_for_live_use() -> None:
    with pytest.raises(ValueError, match="lru, lfu"):
        make_policy("lrru", 10, {})
    with pytest.raises(ValueError, match="replay"):
        make_policy("belady", 10, {})


def test_lfu_drops_the_rarest_and_among_equals_the_oldest() -> None:
    cache = LFU(30)
    for expert in (1, 1, 2, 3):
        cache.request(0, [expert], 10)
    assert cache.request(0, [4], 10).evicted == [(0, 2)]  # 2 and 3 were used once, 2 longer ago
    # 2 comes back with two uses: 3 and 4 have one each, and 3 is older.
    assert cache.request(0, [2], 10).evicted == [(0, 3)]
    assert cache.request(0, [5], 10).evicted == [(0, 4)]


def test_lrfu_forgets_what_was_used_often_long_ago() -> None:
    cache = LRFU(30, half_life=2)
    for expert in (1, 1, 1, 2, 2, 3):
        cache.request(0, [expert], 10)
    # In halvings of two batches each: 1 is worth 2**0.5 + 2 + 2**1.5 = 6.2, 2 is worth 4 + 2**2.5
    # = 9.7, and 3 is worth 2**3 = 8; plain LFU would drop 3.
    assert cache.request(0, [4], 10).evicted == [(0, 1)]


def test_lrfu_goes_on_for_ever() -> None:
    cache = LRFU(20, half_life=0.01)
    for _ in range(300):  # 30,000 doublings, which no float could hold
        cache.request(0, [1], 10)
        cache.request(0, [2], 10)
    assert cache.request(0, [3], 10).evicted == [(0, 1)]


def test_a_scan_does_not_flush_what_was_used_twice() -> None:
    for cache in (SegmentedLRU(50), S3FIFO(50)):
        for _ in range(3):
            cache.request(0, [1, 2], 10)
        for expert in range(10, 40):
            cache.request(0, [expert], 10)
        assert cache.request(0, [1, 2], 10).hits == [(0, 1), (0, 2)], cache


def test_s3_fifo_remembers_what_it_dropped_a_moment_ago() -> None:
    cache = S3FIFO(30)
    for expert in (1, 2, 3, 4):
        cache.request(0, [expert], 10)
    cache.request(0, [1], 10)  # dropped by 4, back at once: to the main queue
    for expert in (5, 6, 7):
        cache.request(0, [expert], 10)
    assert (0, 1) in cache


def test_layers_with_a_share_each_do_not_push_each_other_out() -> None:
    cache = make_policy("layer-lru", 60, {0: 10, 1: 20})  # shares of 20 and 40 bytes
    cache.request(0, [1, 2], 10)
    for expert in range(6):
        cache.request(1, [expert], 20)
    assert cache.request(0, [1, 2], 10).hits == [(0, 1), (0, 2)]
    assert cache.request(0, [3], 10).evicted == [(0, 1)]


def test_a_share_too_small_for_a_token_borrows_from_the_layer_used_last() -> None:
    cache = make_policy("layer-lru", 60, dict.fromkeys(range(3), 10))  # 20 bytes each
    for layer in range(3):
        cache.request(layer, [1, 2], 10)
    # Layer 0 needs 40 bytes now. Layer 2 was used last, so its turn comes last.
    found = cache.request(0, [1, 2, 3, 4], 10)
    assert found.hits == [(0, 1), (0, 2)]
    assert found.evicted == [(2, 1), (2, 2)]
    assert isinstance(cache, Partition)
    assert len(cache) == 6


def test_the_optimum_drops_what_is_needed_last() -> None:
    batches: list[Batch] = [[(0, e)] for e in (1, 2, 3, 1, 2, 4, 1)]
    cache = Belady(20, Future(next_uses(batches)))
    evicted = [cache.lookup(batch, 10).evicted for batch in batches]
    # 3 must come in: 2 is needed later than 1. At the second 2, 3 is never needed again; at 4,
    # 2 is not either.
    assert evicted == [[], [], [(0, 2)], [], [(0, 3)], [(0, 2)], []]
    with pytest.raises(ValueError, match="not in the future"):
        cache.lookup([(0, 1)], 10)


def test_next_uses_by_hand() -> None:
    batches: list[Batch] = [[(0, 1), (0, 2)], [(1, 1)], [(0, 2)], [(0, 1), (0, 2)]]
    assert next_uses(batches) == [[3, 2], [4], [3], [4, 4]]
