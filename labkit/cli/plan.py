"""`labkit plan`: should this model be streamed on this device?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from labkit.device.plan import PathPlan, Plan

OWN_PROFILE = Path("device.json")


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="A GGUF file (its header is enough), the JSON of a shape, or a published shape's "
            "name such as qwen3-30b-a3b."
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            help="A profile's name or JSON file; without it device.json, as "
            "`labkit device --measure` writes it.",
        ),
    ] = None,
    cache_mib: Annotated[
        str,
        typer.Option(metavar="MIB|auto", help="Expert cache; auto is what memory leaves room for."),
    ] = "auto",
    trace: Annotated[
        Path | None, typer.Option(help="Routing of this model, for the cache's hit rate.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Cache policy that the trace is replayed with.")] = (
        "lru"
    ),
    bits: Annotated[
        str | None,
        typer.Option(
            metavar="BITS|TYPE",
            help="Width of the weights, such as 4.85 or Q4_0; a shape has 4 without it.",
        ),
    ] = None,
    n_ctx: Annotated[
        int | None,
        typer.Option("--n-ctx", min=1, help="Tokens of context; else the model's, at most 4096."),
    ] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="Tokens of the prompt; else 512.")] = (
        None
    ),
    output: Annotated[int | None, typer.Option(min=0, help="Tokens of the answer; else 128.")] = (
        None
    ),
    lanes: Annotated[int, typer.Option(min=1, max=64, help="Reads under way at once.")] = 4,
    json: Annotated[bool, typer.Option("--json", help="Plain JSON on stdout.")] = False,
) -> None:
    """Predict a model on a device: what fits, how fast each way would be, and which to choose."""
    budget = _budget(cache_mib)
    width = _bits(bits)
    from dataclasses import replace

    from labkit.cli.console import emit_json, stdout
    from labkit.device import load_profile
    from labkit.device.planner import default_request, plan
    from labkit.policy import POLICIES
    from labkit.sheet import sheet
    from labkit.trace import RouteTrace

    if policy not in POLICIES:
        raise typer.BadParameter(
            f"there is no policy '{policy}'; there are {', '.join(POLICIES)}",
            param_hint="--policy",
        )
    profile = load_profile(_device(device))
    ledger = sheet(model, bits=width)
    asked = {"n_ctx": n_ctx, "prompt_tokens": prompt, "output_tokens": output, "lanes": lanes}
    given = {name: value for name, value in asked.items() if value is not None}
    made = plan(
        ledger,
        profile,
        cache_mib=budget,
        trace=RouteTrace.open(trace) if trace else None,
        policy=policy,
        request=replace(default_request(ledger), **given),
    )
    if json:
        emit_json(made.to_json())
        return
    for part in _text(made):
        stdout().print(part)


def _budget(text: str) -> float | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise typer.BadParameter(
            f"'{text}' is no number of MiB and not 'auto'", param_hint="--cache-mib"
        )
    return value


def _bits(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text  # the name of a type, which the sheet knows


def _device(name: str | None) -> str:
    if name is not None:
        return name
    if OWN_PROFILE.exists():
        return str(OWN_PROFILE)
    from labkit.device import profile_names

    raise typer.BadParameter(
        f"which device? Give one of {', '.join(profile_names())}, or a profile's file. "
        "`labkit device --measure` measures this machine.",
        param_hint="--device",
    )


def _text(made: Plan) -> Iterator[RenderableType]:
    from rich.markup import escape

    request = made.request
    yield f"[bold]{escape(made.model)}[/] on [bold]{escape(made.device)}[/]"
    yield (
        f"Weights {made.model_mib:,.0f} MiB, token cycle {made.cycle_mib:,.0f} MiB; "
        f"{made.usable_mib:,.0f} MiB usable; expert cache {made.cache_mib:,.0f} MiB. "
        f"Prompt {request.prompt_tokens}, answer {request.output_tokens} tokens."
    )
    yield _speed_table(made)
    yield _memory_table(made)
    color = "green" if made.recommended else "yellow"
    yield f"[bold {color}]{made.recommended or 'Nothing fits'}:[/] {escape(made.reason)}"
    for row in made.paths:
        if row.remark:
            yield f"[dim]{row.path}: {escape(row.remark)}.[/]"
    for text in made.assumptions:
        yield f"[dim]{escape(text)}[/]"


def _speed_table(made: Plan):
    table = _table("Predicted", ("hits\n%", "read\nMiB/tok", "decode\ntok/s", "band\ntok/s"))
    for name in ("prompt\ns", "request\ns"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in made.paths:
        style = "bold" if row.path == made.recommended else None
        table.add_row(row.path, *_speed_cells(made, row), style=style)
    return table


def _speed_cells(made: Plan, row: PathPlan) -> tuple[str, ...]:
    if math.isnan(row.decode_tok_s):
        return ("", "", "no room" if not row.fits else "?", "", "", "")
    return (
        f"{row.hit.hit_pct:.0f}" if row.hit else "",
        f"{row.read_mib_per_token:,.0f}",
        _rate(row.decode_tok_s),
        f"{_rate(row.low_tok_s)} to {_rate(row.high_tok_s)}",
        _seconds(row.prefill_s),
        _seconds(made.request_s(row)),
    )


def _memory_table(made: Plan):
    names = ("dense\nweights", "experts", "KV", "compute", "sum", "fits")
    table = _table("Memory, MiB", names)
    for row in made.paths:
        memory = row.memory
        parts = (memory.dense_mib, memory.experts_mib, memory.kv_mib, memory.compute_mib)
        cells = ["?" if math.isnan(part) else f"{part:,.0f}" for part in parts]
        table.add_row(
            row.path, *cells, f"{memory.total_mib:,.0f}", "yes" if row.fits else "[yellow]no[/]"
        )
    return table


def _table(title: str, names: tuple[str, ...]):
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.2g}"


def _seconds(value: float) -> str:
    return "?" if math.isnan(value) else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
