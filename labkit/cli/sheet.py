"""`labkit sheet`: what a model weighs, reads and computes, before it is downloaded or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from labkit.device import DeviceProfile

DEFAULT_CTX = 4096


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A GGUF file (its header is enough), a published shape such as qwen3-30b-a3b, or "
            "the JSON of a shape. Without it: all published shapes.",
        ),
    ] = None,
    ctx: Annotated[
        int | None,
        typer.Option(
            "--ctx", "--n-ctx", min=1, help=f"Tokens of context; {DEFAULT_CTX} or the model's own."
        ),
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(
            metavar="BITS|TYPE",
            help="Width of the weights, such as 4.5 or Q4_0; else a file's own, 4 for a shape.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="PROFILE", help="Lower bounds and fit on this device (name or file)."),
    ] = None,
    ubatch: Annotated[int, typer.Option(min=1, help="Prompt tokens of one graph.")] = 512,
    ask: Annotated[
        bool, typer.Option(help="Ask llama.cpp for its compute buffers; nothing is loaded.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Plain JSON on stdout.")] = False,
) -> None:
    """Show a model's ledger: parameters, bytes by part, KV, buffers, and what one token costs."""
    width = _bits(bits)
    from labkit.cli.console import emit_json, stdout
    from labkit.device import load_profile

    profile = load_profile(device) if device else None
    if model is None:
        _all(width, ctx, profile, json)
        return
    from labkit.sheet import CacheOptions, memory_ledger, sheet
    from labkit.sheet.ask import ask_if_possible

    made = sheet(model, bits=width, n_ctx=ctx)
    n_ctx = ctx or min(DEFAULT_CTX, made.context_length or DEFAULT_CTX)
    answer, why_not = None, ""
    if ask:
        answer, why_not = ask_if_possible(model, made.from_shape, CacheOptions(n_ctx, ubatch))
    ledger = memory_ledger(made, n_ctx, n_ubatch=ubatch, asked=answer)
    if json:
        from labkit.sheet.report import sheet_json

        emit_json(sheet_json(made, ledger, n_ctx, ubatch, profile))
        return
    from labkit.cli.sheet_text import describe

    for part in describe(made, ledger, n_ctx, ubatch, profile, why_not):
        stdout().print(part)


def _all(
    width: float | str | None, ctx: int | None, profile: DeviceProfile | None, json: bool
) -> None:
    from labkit.cli.console import emit_json, stdout
    from labkit.device import load_profile, profile_names
    from labkit.errors import SheetError
    from labkit.sheet import fit_table, shape_names, sheet

    if not shape_names():
        raise SheetError(
            "this labkit was installed without its data, so it knows no published shapes. Name a"
            " GGUF file or a shape's JSON, or clone the repository and install it from there."
        )
    widths = (2, 3, 4, 8, 16) if width is None else (width,)
    devices = [profile] if profile else [load_profile(name) for name in profile_names()]
    models = {name: sheet(name) for name in shape_names()}
    table = fit_table(models.values(), devices, bits=widths, n_ctx=ctx or DEFAULT_CTX)
    if json:
        emit_json(table.astype(object).where(table.notna(), None).to_dict("records"))
        return
    from labkit.cli.sheet_all_text import describe_all

    for part in describe_all(models, table, devices, ctx or DEFAULT_CTX):
        stdout().print(part)


def _bits(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text  # the name of a type, which the sheet knows
