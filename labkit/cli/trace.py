"""`labkit trace`: run a model and save which experts every token chose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labkit.cli import options
from labkit.cli.outputs import file_to_write


def command(
    ctx: typer.Context,
    model: options.ModelPath,
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            callback=file_to_write,
            help="FILE.csv (route_trace v1) or FILE.parquet.",
        ),
    ],
    prompt: options.Prompt = None,
    tokens: options.TokenIds = None,
    n: options.Count = 64,
    cache_mib: options.CacheMib = None,
    resident: options.Resident = False,
    n_ctx: options.ContextLength = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
) -> None:
    """Save the routing of a run: one row per token, layer and chosen expert."""
    options.refuse_with_resident(ctx)
    wanted = options.parse_prompt(prompt, tokens)
    if out.suffix not in (".csv", ".parquet"):
        raise typer.BadParameter(
            f"'{out}' ends in neither .csv nor .parquet", param_hint="-o / --out"
        )
    from labkit.cli.console import stderr
    from labkit.runtime import Session

    with Session(
        model,
        resident=resident,
        cache_mib=cache_mib,
        n_ctx=n_ctx,
        temperature=temperature,
        seed=seed,
    ) as session:
        session.generate(wanted, n)
        trace = session.trace
    written = trace.to_csv(out) if out.suffix == ".csv" else trace.to_parquet(out)
    stderr().print(f"{len(trace.table)} choices of experts written to {written}")
