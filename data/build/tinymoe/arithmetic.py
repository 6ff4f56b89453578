"""Generated arithmetic, each answer computed.

Sums and differences of numbers from 0 to 99 (differences are not negative) and the products of
the times table up to 12. One digit is one token (the ``qwen2`` pre-tokenizer splits them). A
tenth of the sums and differences never appears in training, and neither does the same sum with
its terms swapped. The times table can only be learned by heart, so it has no held-out part.

Sums come plain, ``27+15=42``, or worked, ``27+15:7+5=12,2+1+1=4=42``: ones, tens with the carry,
result; ``42-15:12-5=7,4-1-1=2=27`` borrows. A model of this size did not learn plain sums in the
time it had; worked ones need only single digits at a time.
"""

from __future__ import annotations

import hashlib
import random

HELD_OUT_PER_MILLE = 100


def _held_out(a: int, operator: str, b: int) -> bool:
    key = f"{min(a, b)}+{max(a, b)}" if operator == "+" else f"{a}{operator}{b}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 1000 < (
        HELD_OUT_PER_MILLE
    )


def problems() -> tuple[list[str], list[str], list[str]]:
    """All lines without the line end: (training sums and differences, held-out ones, products)."""
    train, held = [], []
    for a in range(100):
        for b in range(100):
            (held if _held_out(a, "+", b) else train).append(f"{a}+{b}={a + b}")
            if a >= b:
                (held if _held_out(a, "-", b) else train).append(f"{a}-{b}={a - b}")
    products = [f"{a}*{b}={a * b}" for a in range(13) for b in range(13)]
    return train, held, products


def sheet(pool: list[str], products: list[str], lines: int, rng: random.Random) -> str:
    """A page of problems in random order, one in eight a product."""
    return "".join(
        rng.choice(products if products and rng.random() < 0.125 else pool) + "\n"
        for _ in range(lines)
    )


def small(pool: list[str]) -> list[str]:
    """The problems of a pool with a term below 10, those with two such terms five times."""
    chosen = []
    for line in pool:
        terms = [int(term) for term in line.split("=")[0].replace("-", "+").split("+")]
        chosen += [line] * (5 if max(terms) < 10 else 1 if min(terms) < 10 else 0)
    return chosen


def worked(line: str) -> str:
    """A plain sum or difference with its working."""
    question, answer = line.split("=")
    operator = "+" if "+" in question else "-"
    a, b = (int(term) for term in question.split(operator))
    (a_tens, a_ones), (b_tens, b_ones) = divmod(a, 10), divmod(b, 10)
    if operator == "+":
        ones = a_ones + b_ones
        carry = ones // 10
        tens = a_tens + b_tens + carry
    else:
        carry = int(a_ones < b_ones)
        a_ones += 10 * carry
        ones = a_ones - b_ones
        tens = a_tens - b_tens - carry
    first = f"{a_ones}{operator}{b_ones}={ones}"
    second = f"{a_tens}{operator}{b_tens}{operator}{carry}={tens}"
    return f"{question}:{first},{second}={answer}"
