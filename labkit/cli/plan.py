"""`labkit plan`: should this model be streamed on this device?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from labkit.cli import options

OWN_PROFILE = Path("device.json")


def command(
    model: options.ModelOrShape,
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
        typer.Option(
            metavar="MIB,...|auto",
            help="Expert cache; auto is what memory leaves room for. Several are compared.",
        ),
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
    budgets: list[float | Literal["auto"]] = [
        _budget(text.strip()) for text in cache_mib.split(",")
    ]
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
    recorded = RouteTrace.open(trace) if trace else None
    request = replace(default_request(ledger), **given)
    plans = [
        plan(ledger, profile, cache_mib=budget, trace=recorded, policy=policy, request=request)
        for budget in budgets
    ]
    if json:
        emit_json(plans[0].to_json() if len(plans) == 1 else [made.to_json() for made in plans])
        return
    from labkit.cli.plan_text import budgets_text, next_step, plan_text

    parts = plan_text(plans[0]) if len(plans) == 1 else budgets_text(plans)
    for part in parts:
        stdout().print(part)
    if len(plans) == 1 and (step := next_step(plans[0], ledger)):
        stdout().print(step, soft_wrap=True)


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
