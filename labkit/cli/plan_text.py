"""What `labkit plan` prints for people."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from labkit.device.plan import OVERLAPPED, RESIDENT, SERIAL, PathPlan, Plan

if TYPE_CHECKING:
    from labkit.sheet import ModelSheet


def plan_text(made: Plan) -> Iterator[RenderableType]:
    """The plan of one budget: speed and memory by path, the recommendation, what was assumed."""
    request = made.request
    yield _title(made)
    yield (
        f"Weights {_mib(made.model_mib)} MiB, token cycle {_mib(made.cycle_mib)} MiB; "
        f"{made.usable_mib:,.0f} MiB usable; expert cache {_mib(made.cache_mib)} MiB. "
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


def budgets_text(plans: Sequence[Plan]) -> Iterator[RenderableType]:
    """Several budgets of the same model on the same device, one row each."""
    first = plans[0]
    yield _title(first)
    yield (
        f"Weights {_mib(first.model_mib)} MiB, token cycle {_mib(first.cycle_mib)} MiB; "
        f"{first.usable_mib:,.0f} MiB usable."
    )
    names = ("memory\nMiB", "hits\n%", "read\nMiB/tok", "serial\ntok/s", "overlap\ntok/s")
    table = _table("By expert cache, MiB", (*names, "band\ntok/s"))
    for made in plans:
        serial, best = made.path(SERIAL), made.path(OVERLAPPED)
        memory = f"{best.memory.total_mib:,.0f}"
        if best.fits:
            table.add_row(
                _mib(made.cache_mib),
                memory,
                f"{best.hit.hit_pct:.0f}" if best.hit else "",
                _mib(best.read_mib_per_token),
                _rate(serial.decode_tok_s),
                _rate(best.decode_tok_s),
                f"{_rate(best.low_tok_s)} to {_rate(best.high_tok_s)}",
            )
        else:
            table.add_row(_mib(made.cache_mib), memory, "", "", "no room", "no room", "")
    yield table
    for text in first.assumptions:
        yield f"[dim]{escape(text)}[/]"


def next_step(made: Plan, model: ModelSheet) -> str | None:
    """The command that does what the plan recommends; None for a model that is not here."""
    path = Path(model.where)
    if made.recommended is None or model.header_only or not path.is_file():
        return None
    if path.suffix.lower() != ".gguf":
        return None
    budget = _mib(made.cache_mib).replace(",", "")
    how = "--resident" if made.recommended == RESIDENT else f"--cache-mib {budget}"
    return f"Next, on that device: labkit generate {escape(shlex.quote(str(path)))} -p TEXT {how}"


def _title(made: Plan) -> str:
    return f"[bold]{escape(made.model)}[/] on [bold]{escape(made.device)}[/]"


def _speed_table(made: Plan):
    table = _table("Predicted", ("hits\n%", "read\nMiB/tok", "decode\ntok/s", "band\ntok/s"))
    for name in ("TTFT\ns", "request\ns"):
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
        _mib(row.read_mib_per_token),
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
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.2g}"


def _seconds(value: float) -> str:
    """With two digits at least: nothing takes 0.0 s."""
    if math.isnan(value):
        return "?"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _mib(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
