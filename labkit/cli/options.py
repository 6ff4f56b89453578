"""Options that several commands share, and how they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

ModelPath = Annotated[
    Path, typer.Argument(help="A GGUF file, any shard of a split model, or their directory.")
]
ModelOrShape = Annotated[
    str,
    typer.Argument(
        help="A GGUF file (its header is enough), the JSON of a shape, or a published shape's "
        "name such as qwen3-30b-a3b."
    ),
]
Prompt = Annotated[str | None, typer.Option("-p", "--prompt", help="The text to go on from.")]
TokenIds = Annotated[
    str | None, typer.Option("--tokens", metavar="1,2,3", help="Token ids instead of a text.")
]
Count = Annotated[int, typer.Option("-n", min=1, help="How many tokens to generate.")]


def _cache_mib(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise typer.BadParameter(f"'{text}' is neither a number of MiB from 0 on nor auto")
    return value


CacheMib = Annotated[
    Any,
    typer.Option(
        parser=_cache_mib,
        metavar="MIB|auto",
        help="Budget for expert weights in MiB; 0 reads every expert anew, auto takes what memory "
        "allows. Without it a quarter of the experts.",
    ),
]
Overlap = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="How reads overlap with compute: serial, pipeline, userfaultfd, or auto, which tries "
        "and keeps the fastest.",
    ),
]
Prefill = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="How a prompt's experts come: experts (one by one through the cache), layers (whole "
        "layers through two slots), or auto.",
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What stays in the cache: lru, lfu, lrfu, slru, s3-fifo, layer-lru, layer-lfu, echo "
        "or random. `labkit replay` compares them.",
    ),
]
Prefetch = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="Read ahead what the next layer may choose: router (what its router makes of this "
        "layer's input) or previous (what it chose for the token before). By default nothing.",
    ),
]
HotList = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Keep there which experts are used most; begin with those of earlier runs.",
    ),
]
Resident = Annotated[
    bool, typer.Option("--resident", help="No streaming: llama.cpp's own memory map.")
]
Lanes = Annotated[int, typer.Option(min=1, max=64, help="Reads under way at once.")]
DirectIO = Annotated[
    bool | None, typer.Option(help="Past the page cache; by default where it can be.")
]
Threads = Annotated[int | None, typer.Option(min=1, max=512, help="Compute threads.")]
ContextLength = Annotated[int | None, typer.Option(min=1, help="Tokens of context.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the sampling.")]


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
