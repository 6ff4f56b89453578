"""`labkit trace`: run a model and save which experts every token chose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.options import parse_prompt


def command(
    model: Annotated[
        Path, typer.Argument(help="A GGUF file, any shard of a split model, or their directory.")
    ],
    out: Annotated[
        Path,
        typer.Option("-o", "--out", help="FILE.csv (route_trace v1) or FILE.parquet."),
    ],
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="The text to go on from.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="Token ids instead of a text.")
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="How many tokens to generate.")] = 64,
    cache_mib: Annotated[
        float | None,
        typer.Option(min=0, help="Budget for expert weights in MiB; 0 reads every expert anew."),
    ] = None,
    resident: Annotated[
        bool, typer.Option("--resident", help="No streaming: every expert counts as resident.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
) -> None:
    """Save the routing of a run: one row per token, layer and chosen expert."""
    wanted = parse_prompt(prompt, tokens)
    if out.suffix not in (".csv", ".parquet"):
        raise typer.BadParameter(
            f"'{out}' ends in neither .csv nor .parquet", param_hint="-o / --out"
        )
    if not out.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="-o / --out")
    from labkit.cli.console import stderr
    from labkit.runtime import Session

    with Session(
        model, resident=resident, cache_mib=cache_mib, seed=seed, temperature=temperature
    ) as session:
        session.generate(wanted, n)
        trace = session.trace
    written = trace.to_csv(out) if out.suffix == ".csv" else trace.to_parquet(out)
    stderr().print(f"{len(trace.table)} choices of experts written to {written}")
