"""Entries brought in ahead of their use: what every policy makes of them."""

from __future__ import annotations

import random

import pytest

from labkit.policy import ONLINE, Belady, CachePolicy, Entry, Future, make_policy, next_uses

EVERY = [*ONLINE, "belady"]


def make(name: str, budget: int, sizes: dict[int, int], batches: list[list[Entry]]) -> CachePolicy:
    if name == "belady":
        return Belady(budget, Future(next_uses(batches)))
    return make_policy(name, budget, sizes)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("budget", [0, 30, 120, 400, 5000])
def test_the_books_balance_whatever_is_admitted(name: str, budget: int) -> None:
    rng = random.Random(budget)
    sizes = {layer: rng.randint(1, 20) for layer in range(4)}

    def some(layer: int) -> list[Entry]:
        chosen = dict.fromkeys(rng.choices(range(10), range(1, 11), k=rng.randint(1, 4)))
        return [(layer, expert) for expert in chosen]

    batches = [some(number % 4) for number in range(1200)]
    cache = make(name, budget, sizes, batches)
    held: dict[Entry, int] = {}
    admitted = 0
    for batch in batches:
        layer = batch[0][0]
        found = cache.lookup(batch, sizes[layer])
        for entry in found.evicted:
            del held[entry]
        assert sorted(found.hits) == sorted(entry for entry in batch if entry in held)
        held |= dict.fromkeys(found.misses, sizes[layer])
        assert sum(held.values()) == cache.resident_bytes
        assert cache.resident_bytes <= max(budget, len(batch) * sizes[layer])

        ahead = (layer + rng.randint(0, 2)) % 4
        wanted, before = some(ahead), cache.resident_bytes
        early = cache.admit(wanted, sizes[ahead], batch)
        assert early.hits == [entry for entry in wanted if entry in held]
        new = [entry for entry in wanted if entry not in held]
        assert early.misses == new[: len(early.misses)]
        assert not set(early.evicted) & {*batch, *wanted}
        for entry in early.evicted:
            del held[entry]
        held |= dict.fromkeys(early.misses, sizes[ahead])
        assert all(entry in cache for entry in held)
        assert sum(held.values()) == cache.resident_bytes <= max(budget, before)
        admitted += len(early.misses)
        if early.misses and rng.random() < 0.1:  # its read failed
            cache.discard(early.misses[0])
            del held[early.misses[0]]
            assert early.misses[0] not in cache
    # The share of a layer holds one of its entries when the budget holds one of each layer.
    least = sum(sizes.values()) if name.startswith("layer") else min(sizes.values())
    assert (admitted > 0) == (budget >= least)


@pytest.mark.parametrize("name", EVERY)
def test_what_awaits_its_layer_is_there_when_the_layer_asks(name: str) -> None:
    batches: list[list[Entry]] = [[(0, 0)], [(0, 1), (0, 2)], [(0, 3), (0, 4)], [(1, 7), (1, 8)]]
    cache = make(name, 80, {0: 10, 1: 10}, batches)
    cache.lookup(batches[0], 10)
    assert cache.admit([(1, 7), (1, 8)], 10, batches[0]).misses == [(1, 7), (1, 8)]
    for batch in batches[1:-1]:  # a full cache drops the others first
        cache.lookup(batch, 10)
    last = cache.lookup(batches[-1], 10)
    assert last.hits == [(1, 7), (1, 8)]
    assert not last.misses


@pytest.mark.parametrize("name", EVERY)
def test_a_request_may_take_even_what_awaits_its_layer(name: str) -> None:
    batches: list[list[Entry]] = [[(0, 0)], [(0, 1), (0, 2), (0, 3)]]
    cache = make(name, 40, {0: 10, 1: 10}, batches)
    cache.lookup(batches[0], 10)
    cache.admit([(1, 7), (1, 8)], 10, batches[0])
    found = cache.lookup(batches[1], 10)
    assert found.misses == batches[1]
    assert cache.resident_bytes <= 40


@pytest.mark.parametrize("name", EVERY)
def test_only_as_many_come_in_as_fit(name: str) -> None:
    batches: list[list[Entry]] = [[(0, 0), (0, 1)]]
    cache = make(name, 60, {0: 10, 1: 10}, batches)
    cache.lookup(batches[0], 10)
    found = cache.admit([(1, expert) for expert in range(9)], 10, batches[0])
    room = 3 if name.startswith("layer") else 4  # a share of 30 bytes for the layer
    assert found.misses == [(1, expert) for expert in range(room)]
    assert (0, 0) in cache
    assert (0, 1) in cache


@pytest.mark.parametrize("name", EVERY)
def test_a_batch_above_the_budget_lets_nothing_in(name: str) -> None:
    batches: list[list[Entry]] = [[(0, 0), (0, 1)]]
    cache = make(name, 15, {0: 10, 1: 10}, batches)
    cache.lookup(batches[0], 10)
    assert cache.admit([(1, 0)], 10, batches[0]) == ([], [], [])
    assert cache.resident_bytes == 20


@pytest.mark.parametrize("name", ["lfu", "lrfu"])
def test_to_be_admitted_is_no_use(name: str) -> None:
    cache = make_policy(name, 30, {0: 10, 1: 10})
    cache.request(0, [1, 2], 10)
    cache.admit([(1, 5)], 10, [])
    cache.request(1, [6], 10)  # layer 1 asked, and not for 5, which was never used
    assert (1, 5) not in cache
    assert (0, 1) in cache


def test_a_first_use_after_admission_does_not_prove_an_entry() -> None:
    for name in ("slru", "s3-fifo"):
        cache = make_policy(name, 30, {0: 10})
        cache.admit([(0, 1)], 10, [])
        cache.request(0, [1], 10)
        for expert in (2, 3, 4):
            cache.request(0, [expert], 10)
        assert (0, 1) not in cache, name
