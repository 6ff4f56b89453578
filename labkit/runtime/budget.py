"""How much memory expert weights get, and what is too little."""

from __future__ import annotations

from labkit.errors import BudgetError
from labkit.gguf_map import GGUFMap
from labkit.host import addresses_left_bytes, usable_memory_bytes

MIB = 2**20
_OTHER_ADDRESSES = 1 << 30  # stacks and heaps of threads, KV cache, compute buffers, libraries


class BudgetWarning(UserWarning):
    """A budget that works but buys nothing."""


def layer_floor_bytes(gguf: GGUFMap) -> int:
    """Bytes that the largest layer uses for one token: its top-k entries."""
    return max(gguf.entry_bytes(layer) * gguf.experts_used(layer) for layer in gguf.moe_layers)


def widest_layer_bytes(gguf: GGUFMap) -> int:
    """Bytes of all experts of the largest layer, which a wide batch of a prompt uses at once."""
    return max(gguf.entry_bytes(layer) * gguf.n_expert for layer in gguf.moe_layers)


def default_cache_bytes(gguf: GGUFMap) -> int:
    """A quarter of the expert weights, at most half of what memory is left beside the dense ones.

    It is at least the floor. A limit of the process's cgroup counts as the memory that there is.
    """
    left = max(0, usable_memory_bytes() - gguf.dense_bytes)
    return max(min(gguf.expert_bytes // 4, left // 2), layer_floor_bytes(gguf))


def largest_cache_bytes(gguf: GGUFMap) -> int:
    """As much as memory allows, at most all experts: what "auto" means.

    Beside the dense weights it leaves an eighth of what can be used, and at least 256 MiB, for the
    KV cache, compute buffers and everything else. It is at least the floor.
    """
    usable = usable_memory_bytes()
    left = usable - gguf.dense_bytes - max(usable // 8, 256 * MIB)
    return max(min(gguf.expert_bytes, left), layer_floor_bytes(gguf))


def check_addresses(gguf: GGUFMap, cache_bytes: int) -> None:
    """Refuse where `ulimit -v` would: llama.cpp ends the process when it gets no memory.

    The file is mapped, each expert has an address of its own, and dense weights are copied.

    Raises:
        BudgetError: with both figures.
    """
    left = addresses_left_bytes()
    wanted = gguf.nbytes + gguf.expert_bytes + gguf.dense_bytes + cache_bytes + _OTHER_ADDRESSES
    if left is not None and left < wanted:
        raise BudgetError(
            f"A limit on addresses (`ulimit -v`) leaves {left / MIB:,.0f} MiB to this process, and "
            f"streaming this model reserves up to {wanted / MIB:,.0f} MiB, most of which takes no "
            "memory. Raise the limit, or limit memory by a cgroup instead."
        )


def budget_warning(gguf: GGUFMap, cache_bytes: int) -> str | None:
    """What to warn of, if the budget is under the token cycle; None if it is not, or is 0.

    A graph's bits depend on how many tokens it takes, so a batch cannot be split for the budget's
    sake: under one whole layer it is exceeded while a prompt is prefilled.

    Raises:
        BudgetError: negative, too small for one layer of one token, or more than there is.
    """
    check_addresses(gguf, max(cache_bytes, 0))
    if cache_bytes < 0:
        raise BudgetError(f"A cache of {cache_bytes / MIB:.2f} MiB makes no sense; 0 turns it off.")
    if cache_bytes == 0:
        return None
    floor = layer_floor_bytes(gguf)
    if cache_bytes < floor:
        raise BudgetError(
            f"A cache of {cache_bytes / MIB:.2f} MiB cannot hold the experts that one layer uses "
            f"for one token, {floor / MIB:.2f} MiB. "
            "Give at least that, or 0 to read every expert anew."
        )
    wanted = min(cache_bytes, gguf.expert_bytes) + gguf.dense_bytes
    if wanted > (usable := usable_memory_bytes()):
        raise BudgetError(
            f"The cache and the dense weights would take {wanted / MIB:.0f} MiB, but only "
            f"{usable / MIB:.0f} MiB of memory can be used here: the system would end the process. "
            "Give a smaller cache_mib."
        )
    cycle = gguf.token_cycle_bytes
    if cache_bytes >= cycle:
        return None
    warning = (
        f"The cache of {cache_bytes / MIB:.2f} MiB is smaller than the token cycle of "
        f"{cycle / MIB:.2f} MiB (all layers x top-k): an entry is evicted before its layer "
        "comes round again, so an LRU cache hits next to nothing."
    )
    layer = widest_layer_bytes(gguf)
    if cache_bytes < layer:
        warning += (
            " A prompt's wide batches use all experts of a layer at once and take up to "
            f"{layer / MIB:.2f} MiB for them, whatever the budget."
        )
    return warning
