"""`labkit inspect`: what is in a GGUF model, and where the bytes of one expert are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from labkit.gguf_map import ExpertSlice, GGUFMap


def command(
    model: Annotated[
        Path, typer.Argument(help="A GGUF file, any shard of a split model, or their directory.")
    ],
    json: Annotated[
        bool, typer.Option("--json", help="Plain JSON, with every tensor's place.")
    ] = False,
    expert: Annotated[
        str | None,
        typer.Option(metavar="LAYER:EXPERT", help="Show only where this expert's bytes are."),
    ] = None,
) -> None:
    """Show what a GGUF model holds: layers, experts, sizes, and what one token costs in bytes."""
    wanted = None if expert is None else _parse_expert(expert)
    from labkit.cli.console import emit_json, stdout
    from labkit.gguf_map import open_gguf

    gguf = open_gguf(model, inspect_only=True)
    if wanted is not None:
        slices = _slices(gguf, *wanted)
        if json:
            emit_json([_slice_json(s) for s in slices])
        else:
            stdout().print(_expert_text(gguf, slices))
    elif json:
        from labkit.gguf_map.summary import summary

        emit_json(summary(gguf))
    else:
        from labkit.cli.inspect_text import describe

        for part in describe(gguf):
            stdout().print(part)


def _parse_expert(text: str) -> tuple[int, int]:
    layer, colon, expert = text.partition(":")
    if not (colon and layer.isdecimal() and expert.isdecimal()):
        raise typer.BadParameter(
            f"'{text}' is not LAYER:EXPERT, two numbers such as 3:17", param_hint="--expert"
        )
    return int(layer), int(expert)


def _slices(gguf: GGUFMap, layer: int, expert: int) -> list[ExpertSlice]:
    gguf.require_experts()
    try:
        return gguf.expert(layer, expert)
    except (IndexError, KeyError) as error:
        raise typer.BadParameter(str(error.args[0]), param_hint="--expert") from None


def _slice_json(s: ExpertSlice) -> dict[str, object]:
    return {
        "projection": s.projection,
        "shard": s.shard,
        "offset": s.offset,
        "nbytes": s.nbytes,
        "type": s.type_name,
    }


def _expert_text(gguf: GGUFMap, slices: list[ExpertSlice]):
    from labkit.cli.inspect_text import expert_table

    return expert_table(gguf, slices)
