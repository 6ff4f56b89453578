"""What the context does to routing: the same tokens, after different texts.

Naming a domain from which experts it uses proves little, because different domains have different
tokens, and a router that looked at nothing but the token would tell them apart as well. Here the
tokens are the same and only what comes before them differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from labkit.errors import SessionError

if TYPE_CHECKING:
    from labkit.runtime import Session


def same_tokens(
    session: Session, contexts: Mapping[str, str], text: str
) -> dict[str, pd.DataFrame]:
    """Return a routing table for the tokens of `text` after each of the named `contexts`.

    The session starts anew for each and prefills context and text in one prompt, with the last MoE
    layer routing every token. Columns are those of `RouteTrace.table`. All tables hold the same
    tokens: one that the tokenizer joins with a context is left out everywhere; a `text` that starts
    with a line break is safe. The session ends up after the last context.

    Raises `SessionError` if no token is the same everywhere.
    """
    prompts = {name: session.tokenize(context + text) for name, context in contexts.items()}
    own = [
        len(prompts[name]) - _common(prompts[name], session.tokenize(context))
        for name, context in contexts.items()
    ]
    backwards = [tokens[::-1] for tokens in prompts.values()]
    count = min([*own, *(_common(backwards[0], other) for other in backwards)])
    if count == 0:
        raise SessionError(
            f"No token of {text!r} stays the same after all contexts. Start it with a line break."
        )
    return {name: _route_end(session, tokens, count) for name, tokens in prompts.items()}


def _route_end(session: Session, tokens: list[int], count: int) -> pd.DataFrame:
    """Prefill `tokens` from the start and return the routing of the last `count`."""
    all_logits, session.all_logits = session.all_logits, True
    try:
        session.reset()
        for _ in session.stream(tokens, 1):
            pass
    finally:
        session.all_logits = all_logits
    table = session.trace.table
    start = len(tokens) - count
    return table[(table["phase"] == "prefill") & (table["step"] >= start)].reset_index(drop=True)


def _common(one: list[int], other: list[int]) -> int:
    """Return the length of the common beginning of two lists."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
