"""Options that several commands share, and how they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

#: `labkit.policy.ONLINE`, without loading it for `--help`.
POLICIES = ["lru", "lfu", "lrfu", "slru", "s3-fifo", "layer-lru", "layer-lfu", "echo", "random"]

#: Options of streaming, which mean nothing to a model that llama.cpp keeps in its memory map.
_OF_STREAMING = (
    "cache_mib", "lanes", "direct_io", "overlap", "prefill", "prefetch", "hot_list", "policy"
)  # fmt: skip

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


def _one_of(*choices: str) -> Callable[[str], str]:
    """A parser of an option's text that takes these words only."""

    def word(text: str) -> str:
        if text not in choices:
            raise typer.BadParameter(f"'{text}' is none of {', '.join(choices)}")
        return text

    return word


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
        parser=_one_of("auto", "serial", "pipeline", "userfaultfd"),
        help="How reads overlap with compute: serial, pipeline, userfaultfd, or auto, which tries "
        "and keeps the fastest.",
    ),
]
Prefill = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        parser=_one_of("auto", "experts", "layers"),
        help="How a prompt's experts come: experts (one by one through the cache), layers (whole "
        "layers through two slots), or auto.",
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        parser=_one_of(*POLICIES),
        help=f"What stays in the cache: {', '.join(POLICIES[:-1])} or {POLICIES[-1]}. "
        "`labkit replay` compares them.",
    ),
]
Prefetch = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        parser=_one_of("router", "previous"),
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


def _given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_with_resident(ctx: typer.Context) -> None:
    """Say so if `--resident` stands beside options that it would ignore."""
    if not ctx.params.get("resident"):
        return
    given = [
        f"--{name.replace('_', '-')}"
        for name in _OF_STREAMING
        if name in ctx.params and _given(ctx, name)
    ]
    if given:
        raise typer.BadParameter(
            f"nothing is streamed with --resident, so {', '.join(given)} would change nothing; "
            "leave out one or the other",
            param_hint="--resident",
        )


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
