"""What `labkit sheet` prints of all published models: their sheets side by side, and which fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from labkit.cli.inspect_text import size
from labkit.cli.sheet_text import count
from labkit.sheet import ModelSheet
from labkit.sheet.ledger import RESIDENT, STREAMED, usable_mib

if TYPE_CHECKING:
    import pandas as pd

    from labkit.device import DeviceProfile


def describe_all(
    models: Mapping[str, ModelSheet],
    table: pd.DataFrame,
    devices: Sequence[DeviceProfile],
    n_ctx: int,
) -> Iterator[RenderableType]:
    """Published models side by side, and which fits where."""
    yield _published(models, n_ctx)
    yield (
        "active: what one token reads, of an embedding one row (publishers count embeddings in"
        " ways of their own). cycle: the routed experts among it."
    )
    yield _fits(models, table, devices, n_ctx)
    by_memory = _by_memory(devices)
    for memory, names in by_memory.items():
        yield f"[dim]{size(memory)}: {escape(', '.join(names))}[/]"
    yield (
        "N bits: the widest weights with which everything fits (weights, KV, the least compute"
        " buffers). streamed: at no width, but all without the routed experts does. -: nor that."
    )
    yield "One of them in full: labkit sheet NAME. Its speed: labkit plan NAME --device PROFILE"


def _published(models: Mapping[str, ModelSheet], n_ctx: int) -> Table:
    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        title="Published models at 4 bits a weight",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("name", no_wrap=True)
    for name in ("total", "active", "experts", "weights", "a token", "cycle", f"KV {n_ctx}"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, model in models.items():
        context = min(n_ctx, model.context_length or n_ctx)
        table.add_row(
            name,
            count(model.total_params),
            count(model.active_params),
            f"{model.n_expert_used}/{model.n_expert}",
            size(model.total_bytes),
            size(model.token_bytes),
            size(model.token_cycle_bytes),
            size(model.kv_bytes(context)),
        )
    return table


def _by_memory(devices: Sequence[DeviceProfile]) -> dict[float, list[str]]:
    """Usable bytes -> names of the devices, from small to large."""
    found: dict[float, list[str]] = {}
    for device in sorted(devices, key=usable_mib):
        found.setdefault(usable_mib(device) * 2**20, []).append(device.name)
    return found


def _fits(
    models: Mapping[str, ModelSheet],
    table: pd.DataFrame,
    devices: Sequence[DeviceProfile],
    n_ctx: int,
) -> Table:
    shown = Table(
        box=None,
        padding=(0, 3, 0, 0),
        title=f"What fits into usable memory with {n_ctx} tokens of context",
        title_justify="left",
        title_style="bold",
    )
    shown.add_column("name", no_wrap=True)
    by_memory = _by_memory(devices)
    for memory in by_memory:
        shown.add_column(size(memory), no_wrap=True)
    for name, model in models.items():
        cells = []
        for memory in by_memory:
            here = (table["model"] == model.name) & (table["usable_mib"] == memory / 2**20)
            cells.append(_fit_cell(table[here]))
        shown.add_row(name, *cells)
    return shown


def _fit_cell(rows: pd.DataFrame) -> str:
    resident = rows.loc[rows["verdict"] == RESIDENT, "bits"]
    if len(resident):
        widest = list(resident)[-1]
        return (
            f"[green]{widest:g} bits[/]" if not isinstance(widest, str) else f"[green]{widest}[/]"
        )
    return "[yellow]streamed[/]" if (rows["verdict"] == STREAMED).any() else "-"
