"""What the context does to routing: the same tokens, after different texts.

Naming a domain from which experts it uses proves little, because different domains have different
tokens, and a router that looked at nothing but the token would tell them apart as well. Here the
tokens are the same and only what comes before them differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from labkit.errors import SessionError

if TYPE_CHECKING:
    from labkit.runtime import Session


def route_after(session: Session, context: str, text: str) -> pd.DataFrame:
    """Return the routing table of the tokens of `text` when they follow `context`.

    The session starts anew and prefills both in one prompt, with the last MoE layer routing every
    token. Columns are those of `RouteTrace.table`. Use a `text` that starts with a line break, so
    that its tokens do not join the context's; the length of the table tells whether they did.

    Raises `SessionError` if `text` has no tokens of its own there.
    """
    whole = session.tokenize(context + text)
    before = session.tokenize(context)
    start = _common(whole, before)
    if start == len(whole):
        raise SessionError(f"The text {text!r} adds no token to its context.")
    all_logits, session.all_logits = session.all_logits, True
    try:
        session.reset()
        for _ in session.stream(whole, 1):
            pass
    finally:
        session.all_logits = all_logits
    table = session.trace.table
    return table[(table["phase"] == "prefill") & (table["step"] >= start)].reset_index(drop=True)


def _common(one: list[int], other: list[int]) -> int:
    """Return the length of the common beginning of two lists."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
