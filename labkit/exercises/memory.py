"""Exercises of `06_memory_ledger`: what is stored, what is read, what fits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from labkit.exercises.check import Verdict, check

if TYPE_CHECKING:
    from labkit.device import DeviceProfile
    from labkit.sheet import ModelSheet

_GIB = 2**30
#: llama.cpp rounds a context up to 256 tokens; a length is the longest if two steps more are not.
_STEP = 512


def stored_and_read(answer: Any) -> Verdict:
    """MB stored, and MB that a token reads, of a model with 1.3 and 0.3 billion 4-bit weights."""
    return check(
        answer,
        (650, 150),
        tolerance=0.5,
        hint="A parameter of 4 bits is half a byte.",
        because="The first figure is memory, the second is work. Both are needed.",
    )


def time_of_a_token(answer: Any) -> Verdict:
    """Milliseconds at least of a token of that model, at 60 GB/s."""
    return check(
        answer,
        2.5,
        tolerance=0.05,
        hint="Bytes that a token reads over bytes a second.",
        because="0.15 GB / 60 GB/s. With 1.0 billion active parameters it would be 8.3 ms.",
    )


def models_that_fit(answer: Any, published: Iterable[ModelSheet], device: DeviceProfile) -> Verdict:
    """Names of the published models that fit whole on `device` at 4 bits."""
    from labkit.sheet import fit_table

    table = fit_table(published, [device], bits=(4,))
    return check(
        answer,
        set(table.loc[table["verdict"] == "resident", "model"]),
        hint="The column of your device in the picture: below 100 % of usable memory.",
    )


def longest_context(answer: Any, sheet: ModelSheet) -> Verdict:
    """The most tokens of context whose cache stays within 1 GiB."""

    def just_fits(tokens: int) -> bool:
        more = min(tokens + _STEP, sheet.context_length or tokens + _STEP)
        return sheet.kv_bytes(tokens) <= _GIB and (more <= tokens or sheet.kv_bytes(more) > _GIB)

    return check(
        answer,
        just_fits,
        hint="Try a few lengths; llama.cpp rounds them up to 256. If the whole context of the "
        "model fits, that is the answer.",
    )
