"""Exercises of `05_prefill_htp`: when a faster prefill is felt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from labkit.exercises.check import Verdict, check

if TYPE_CHECKING:
    from labkit.device.pipeline_plan import HtpPlan


def half_of_the_request(answer: Any, ttft_s: float, token_s: float) -> Verdict:
    """Answer tokens that take as long as the prompt."""
    from labkit.device.pipeline_request import break_even_outputs

    outputs = break_even_outputs(ttft_s, token_s)
    return check(
        answer,
        outputs,
        tolerance=0.05 * outputs + 1,
        hint="The first token comes with the prompt; each further one takes token_s.",
        because="There a prefill in no time would make the request twice as fast, and no more.",
    )


def hiding_chunk(answer: Any, made: HtpPlan) -> Verdict:
    """Tokens of the shortest chunk whose compute hides the reads; 0 if none does."""
    hiding = made.hiding or 0
    return check(
        answer,
        hiding,
        tolerance=0.05 * hiding,
        hint="Where do the two lines of the slider chart cross? If they never do: 0.",
        because="Shorter prompts than this cannot be helped by a faster HTP at all.",
    )


def twice_the_flash(answer: Any, made: HtpPlan, *, tokens: int, chunk: int) -> Verdict:
    """How many times as fast `made` is with flash of twice the rate; `tokens` is its prompt."""
    from labkit.device.pipeline_work import model_prefill

    rates = replace(made.rates, read_gb_s=2 * made.rates.read_gb_s)
    faster = model_prefill(made.layers, tokens, rates, chunk=chunk, longest_tail=31)
    gain = made.prefill.prefill_s / faster.prefill_s
    return check(
        answer,
        gain,
        tolerance=0.05 * gain,
        hint="Move the flash slider and compare the rates; reads that hide already gain nothing.",
        because="Where it waits for reads it gains up to two times, where they hide it gains "
        "nothing.",
    )
