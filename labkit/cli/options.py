"""Options that several commands read the same way."""

from __future__ import annotations

import typer


def parse_prompt(prompt: str | None, tokens: str | None) -> str | list[int]:
    """The text of `-p` or the ids of `--tokens`, exactly one of which must be given."""
    if (prompt is None) == (tokens is None):
        raise typer.BadParameter(
            "give a text with -p or token ids with --tokens, one of the two", param_hint="--prompt"
        )
    if prompt is not None:
        return prompt
    try:
        return [int(part) for part in (tokens or "").split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"'{tokens}' is not a list of token ids such as 1,2,3", param_hint="--tokens"
        ) from None
