"""`labkit replay`: what hit rate each cache policy would have had on a recorded trace."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.cli.outputs import file_to_write

if TYPE_CHECKING:
    import pandas as pd

    from labkit.replay import Demand


def command(
    trace: Annotated[
        Path, typer.Argument(help="A routing trace: route_trace v1 CSV, layer,expert CSV, Parquet.")
    ],
    budgets: Annotated[
        str | None,
        typer.Option(
            metavar="100,200,...",
            help="Budgets in MiB; without it ten that span what the trace uses.",
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="lru,lfu,...",
            help="Some of lru, lfu, lrfu, slru, s3-fifo, layer-lru, layer-lfu, echo, random, and "
            "belady, the optimum; without it all.",
        ),
    ] = None,
    entry_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Bytes of one expert, for a trace that does not say."),
    ] = None,
    n_expert_used: Annotated[
        int | None,
        typer.Option(min=1, help="Experts per token in a layer, for a layer,expert CSV."),
    ] = None,
    ubatch: Annotated[
        int | None,
        typer.Option(min=1, help="Prompt tokens of one batch; without it the whole prompt."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the policy 'random'.")] = 0,
    csv: Annotated[
        Path | None, typer.Option(callback=file_to_write, help="Write the table to this file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Plain JSON on stdout.")] = False,
) -> None:
    """Replay a trace under cache policies at several budgets: the hit rate that each would have."""
    wanted = None if budgets is None else _numbers(budgets)
    names = _names(policies)
    from labkit.cli.console import emit_json, stderr, stdout
    from labkit.errors import TraceError
    from labkit.replay import budget_grid, demand, replay
    from labkit.trace import RouteTrace

    asked = demand(
        RouteTrace.open(trace, n_expert_used=n_expert_used), entry_bytes=entry_bytes, ubatch=ubatch
    )
    if not len(asked.counts):
        raise TraceError(f"{trace}: no token is in this trace, so there is nothing to replay.")
    table = replay(asked, wanted or budget_grid(asked, 10), names, seed=seed)
    if csv:
        try:
            table.to_csv(csv, index=False, lineterminator="\n", float_format="%.3f")
        except OSError as error:
            raise TraceError(f"{csv}: the table cannot be written: {error.strerror}") from error
        stderr().print(f"{len(table)} rows written to {csv}")
    if json:
        emit_json(table.astype(object).where(table.notna(), None).to_dict("records"))
    elif not csv:
        stdout().print(_text(table))
        stdout().print(_sizes(asked))


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.inf]
    if math.inf in numbers:
        raise typer.BadParameter(
            f"'{text}' is not a list of MiB such as 100,200", param_hint="--budgets"
        )
    return numbers


def _names(text: str | None) -> list[str]:
    from labkit.policy import POLICIES

    names = list(POLICIES) if text is None else [part.strip() for part in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise typer.BadParameter(
                f"there is no policy '{name}'; there are {', '.join(POLICIES)}",
                param_hint="--policies",
            )
    return names


def _sizes(asked: Demand) -> str:
    mib = 2**20
    return (
        f"Token cycle {asked.cycle_bytes / mib:,.1f} MiB (below it LRU finds next to nothing), "
        f"largest batch {asked.floor_bytes / mib:,.1f} MiB, "
        f"all entries used {asked.used_bytes / mib:,.1f} MiB."
    )


def _text(table: pd.DataFrame):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    names = list(dict.fromkeys(table["policy"]))
    shown = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title="Hit rate in % of all lookups",
        title_justify="left",
    )
    for name in ("MiB", *names):
        shown.add_column(name.replace("-", "-\n"), justify="right", no_wrap=True)
    for budget, rows in table.groupby("budget_mib", sort=False):
        rates = rows.set_index("policy")["hit_pct"]
        shown.add_row(_budget(float(str(budget))), *(f"{rates[name]:.1f}" for name in names))
    return shown


def _budget(mib: float) -> str:
    """With enough digits that a small budget is not shown as none."""
    return f"{mib:,.1f}" if mib >= 10 or not mib else f"{mib:.2f}" if mib >= 0.1 else f"{mib:.1g}"
