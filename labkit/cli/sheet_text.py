"""What `labkit sheet` prints for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from labkit.cli.inspect_text import size, spans
from labkit.sheet import MemoryLedger, ModelSheet, latency_floor
from labkit.sheet.ledger import RESIDENT, STREAMED, usable_mib
from labkit.sheet.report import contexts, ridge_of, session_kv_bytes
from labkit.sheet.weights import PARTS, ROUTED

if TYPE_CHECKING:
    from labkit.device import DeviceProfile


def count(params: float) -> str:
    """Parameters as people say them: 30532122624 -> "30.5 B"."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if params >= scale:
            return f"{params / scale:.3g} {unit}"
    return f"{params:.0f}"


def describe(
    model: ModelSheet,
    ledger: MemoryLedger,
    n_ctx: int,
    ubatch: int,
    device: DeviceProfile | None,
    why_not_asked: str,
) -> Iterator[RenderableType]:
    """The ledger of one model, from its weights to what to do next."""
    yield _facts(model)
    yield _parts(model)
    yield _memory(model, ledger, n_ctx, ubatch)
    if why_not_asked:
        yield f"[dim]llama.cpp could not be asked for them: {escape(why_not_asked)}[/]"
    if model.cache is not None:
        yield _kv(model, ubatch)
    yield _token(model, n_ctx)
    if device is not None:
        yield _device(model, ledger, device, n_ctx)
    for note in (*model.notes, model.cache_note):
        if note:
            yield f"[yellow]note:[/] {escape(note)}"
    for source in model.sources:
        yield f"[dim]source: {escape(source)}[/]"
    yield _next(model, device)


def _rows(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(
        title=title,
        box=None,
        show_header=False,
        title_justify="left",
        title_style="bold",
        padding=(0, 2, 0, 0),
    )
    table.add_column(style="dim")
    table.add_column()
    for label, value in rows:
        table.add_row(label, escape(value))
    return table


def _facts(model: ModelSheet) -> Table:
    share = model.active_params / model.total_params
    rows = [
        ("architecture", model.architecture),
        ("from", model.where + (" (its tensor data is absent)" if model.header_only else "")),
        ("parameters", f"{count(model.total_params)}, all of which must be stored"),
        (
            "used by a token",
            f"{count(model.active_params)} ({share:.1%})"
            + (": compute, not memory" if model.is_moe else ""),
        ),
    ]
    if published := model.published:
        said = [f"{n:g} B" if n else "?" for n in (published.total_b, published.active_b)]
        rows.append(("its publisher says", f"{said[0]}, {said[1]} active ({published.source})"))
    rows.append(
        ("weights", f"{size(model.total_bytes)} at {model.bits_per_weight:.3g} bits a weight")
    )
    rows.append(("layers", str(model.n_layers)))
    if model.is_moe:
        entries = sorted({model.entry_bytes[i] for i in model.moe_layers})
        entry = " to ".join(size(e) for e in dict.fromkeys((entries[0], entries[-1])))
        rows += [
            (
                "MoE layers",
                f"{spans(model.moe_layers)}; {model.leading_dense_layers} leading dense",
            ),
            ("experts", f"{model.n_expert} a layer, {model.n_expert_used} used by a token"),
            ("expert entry", entry),
        ]
    else:
        rows.append(("experts", "none: a dense model, every token uses all of it"))
    if model.context_length:
        rows.append(("context", f"up to {model.context_length} tokens"))
    return _rows(escape(model.name), rows)


def _parts(model: ModelSheet) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("part")
    for name in ("parameters", "size", "read by a token"):
        table.add_column(name, justify="right")
    by_part = {part: [w for w in model.weights if w.part == part] for part in PARTS}
    for part, weights in by_part.items():
        if weights:
            table.add_row(
                part,
                count(sum(w.n_params for w in weights)),
                size(sum(w.nbytes for w in weights)),
                size(sum(w.token_bytes for w in weights)),
            )
    return table


def _memory(model: ModelSheet, ledger: MemoryLedger, n_ctx: int, ubatch: int) -> Table:
    kv = "not known" if ledger.kv_bytes is None else size(ledger.kv_bytes)
    whole = session_kv_bytes(model, n_ctx, ubatch)
    if whole is not None and whole != ledger.kv_bytes:
        kv += f" ({size(whole)} in a labkit session, which keeps whole windows)"
    how = "llama.cpp's own count" if ledger.compute_asked else "at least: logits of one batch"
    rows = [
        ("weights", size(ledger.weights_bytes)),
        ("KV cache", kv),
        ("compute buffers", f"{size(ledger.compute_bytes)} ({how}, {ubatch} tokens a graph)"),
        ("all resident", size(ledger.resident_bytes)),
    ]
    if model.is_moe:
        least, cycle = ledger.streamed_bytes, ledger.streamed_cycle_bytes
        rows += [
            ("experts streamed", f"{size(least)} at least, the experts of one layer cached"),
            ("", f"{size(cycle)} with a cache of one token cycle, {size(model.token_cycle_bytes)}"),
            ("", f"{size(ledger.part_bytes[ROUTED])} of routed experts stay on flash"),
        ]
    return _rows(f"Memory with a context of {n_ctx} tokens", rows)


def _kv(model: ModelSheet, ubatch: int) -> Table:
    steps = contexts(model)
    shown = steps if len(steps) <= 6 else [*steps[1:-1:2][-5:], steps[-1]]
    sizes = [model.kv_bytes(n, n_ubatch=ubatch) for n in shown]
    kinds = sorted({rows.kind for rows in model.known_cache()})
    table = Table(box=box.SIMPLE, title_justify="left", title_style="bold")
    table.title = "KV cache against context"
    table.add_column(", ".join(kinds) if kinds else "none")
    for n_ctx in shown:
        table.add_column(str(n_ctx), justify="right")
    table.add_row("F16", *[size(n) for n in sizes])
    return table


def _token(model: ModelSheet, n_ctx: int) -> Table:
    first, last = model.flops_per_token(), model.flops_per_token(n_ctx - 1)
    intensity = model.intensity_flop_per_byte
    rows = [
        ("reads", f"{size(model.token_bytes)} of weights ({_mb(model.token_bytes)})"),
        ("computes", f"{first / 1e9:.3g} GFLOP, {last / 1e9:.3g} at the end of the context"),
        ("intensity", f"{intensity():.3g} FLOP/byte; in a batch of 512, {intensity(512):.3g}"),
    ]
    if model.is_moe:
        rows.insert(1, ("of them routed", f"{size(model.token_cycle_bytes)}: the token cycle"))
    return _rows("One token", rows)


def _device(model: ModelSheet, ledger: MemoryLedger, device: DeviceProfile, n_ctx: int) -> Table:
    usable = usable_mib(device) * 2**20
    verdict = ledger.verdict(usable)
    said = {
        RESIDENT: f"all of it fits into the usable {size(usable)}",
        STREAMED: f"all of it does not fit into the usable {size(usable)}; with streamed experts"
        " it does",
    }.get(verdict, f"not even without its routed experts does it fit into {size(usable)}")
    resident = latency_floor(model, device, n_past=n_ctx - 1)
    cold = latency_floor(model, device, n_past=n_ctx - 1, hit_rate=0)
    rows = [
        ("fits?", said),
        ("ridge point", _value(ridge_of(device), "FLOP/byte")),
        ("by operations", _value(1e3 * resident.compute_s, "ms")),
        ("by DRAM", _value(1e3 * resident.dram_s, "ms")),
    ]
    if model.is_moe:
        rows.append(("by flash, no cache", _value(1e3 * cold.flash_s, "ms")))
    return _rows(f"Lower bounds of a token on {escape(device.title)}", rows)


def _mb(nbytes: float) -> str:
    """Decimal megabytes, in which memory rates are given."""
    return f"{nbytes / 1e6:,.0f} MB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def _value(value: float, unit: str) -> str:
    return "the profile does not say" if math.isnan(value) else f"{value:.3g} {unit}"


def _next(model: ModelSheet, device: DeviceProfile | None) -> str:
    if not model.is_moe:
        return "[dim]A dense model: there is nothing to stream.[/]"
    target = model.where.removeprefix("published shape '").rstrip("'")
    chosen = device.name if device else "PROFILE"
    return f"Speed on a device: labkit plan {escape(target)} --device {escape(chosen)}"
