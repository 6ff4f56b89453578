"""Exercises of `01_gguf_offsets`: where bytes lie, and what a token costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.exercises.check import Verdict, check

if TYPE_CHECKING:
    from labkit.gguf_map import GGUFMap

#: The expert that the exercises ask about, in the last layer that has experts.
EXPERT = 2


def where_it_begins(answer: Any, gguf: GGUFMap) -> Verdict:
    """Offset in its file of the last projection of expert 2, in bytes."""
    return check(
        answer,
        gguf.expert(gguf.moe_layers[-1], EXPERT)[-1].offset,
        hint="offset_bytes + 2 x (size_bytes / number of experts), of the projection that comes "
        "last in the computation: down.",
    )


def direct_read(answer: Any, gguf: GGUFMap, block_bytes: int) -> Verdict:
    """Bytes that direct I/O reads for that slice."""
    from labkit.gguf_map.layout_tables import expert_table

    table = expert_table(gguf, gguf.moe_layers[-1], EXPERT, block_bytes)
    return check(
        answer,
        int(table["direct_bytes"].iloc[-1]),
        hint="Round the first byte down to a whole block, the end up, and take the difference.",
        because="Both ends were rounded out to whole blocks.",
    )


def cycle_of_twice_as_many(answer: Any, gguf: GGUFMap) -> Verdict:
    """Bytes of the token cycle with twice as many experts per token."""
    return check(
        answer,
        2 * gguf.token_cycle_bytes,
        hint="Bytes of an entry x experts per token, summed over the layers that have experts.",
        because="The cycle grows with the experts per token, not with the experts of a layer.",
    )


def entries_for_each_used(answer: Any, gguf: GGUFMap) -> Verdict:
    """Expert entries of the model for each that a token uses."""
    return check(
        answer,
        gguf.n_expert / gguf.n_expert_used,
        tolerance=0.01,
        hint="Experts of a layer over experts that a token uses: the number of layers cancels.",
        because="The number of layers cancels: it is experts of a layer over experts per token.",
    )
