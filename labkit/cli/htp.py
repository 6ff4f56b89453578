"""`labkit htp`: what a phone's tensor processor could take of a model, and what it would bring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.cli import options
from labkit.cli.prefill import parse_counts

if TYPE_CHECKING:
    import pandas as pd

    from labkit.device.pipeline_plan import HtpPlan

_SMALL_BYTES = 256 * 2**20


def command(
    model: options.ModelOrShape,
    device: Annotated[
        str, typer.Option(metavar="PROFILE", help="A profile's name or JSON file.")
    ] = "oneplus-15r",
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the prompt; else 1024, or half the model's context."),
    ] = None,
    chunk: Annotated[
        int, typer.Option(min=1, help="Tokens that go through all layers together.")
    ] = 512,
    outputs: Annotated[
        str, typer.Option(metavar="N,N,...", help="Answer lengths.")
    ] = "1,16,64,256",
    device_gflop_s: Annotated[
        float | None, typer.Option(min=0.001, help="The HTP's rate, instead of the profile's.")
    ] = None,
    flash_gb_s: Annotated[
        float | None, typer.Option(min=0.001, help="The flash's rate, instead of the profile's.")
    ] = None,
    layout_gb_s: Annotated[
        float | None, typer.Option(min=0.001, help="Rate of the layout change; else it is free.")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Slots of one layer each.")] = 2,
    timeline: Annotated[
        int, typer.Option(min=0, metavar="ROWS", help="Show so many rows of who works when.")
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="Plain JSON on stdout.")] = False,
) -> None:
    """Which tensors an HTP takes, what that needs, and the modelled prefill through two slots.

    Nothing is measured and nothing is loaded: a file's types say what goes where, a device's
    profile says how fast. The model of the pipeline is checked by `labkit prefill`.
    """
    answers = parse_counts(outputs, "--outputs")
    from rich.markup import escape

    from labkit.cli.console import emit_json, stdout
    from labkit.device import load_profile
    from labkit.device.pipeline_plan import default_tokens, plan_htp

    changes = {
        "device_gflop_s": device_gflop_s,
        "read_gb_s": flash_gb_s,
        "layout_gb_s": layout_gb_s,
    }
    profile = load_profile(device)
    made = plan_htp(
        model,
        profile,
        tokens=tokens or default_tokens(model),
        chunk=chunk,
        slots=slots,
        changes={name: value for name, value in changes.items() if value is not None},
    )
    if json:
        emit_json(_plain(made, answers, profile.title, timeline))
        return
    names = escape(made.ledger.name), escape(profile.title)
    stdout().print(f"[bold]{names[0]}[/bold] on the HTP of {names[1]}")
    for part in _report(made, answers, timeline):
        stdout().print(part)


def _report(made: HtpPlan, answers: list[int], rows: int):
    if made.placement is not None:
        yield _placement(made.placement)
    else:
        yield "A shape has no types: the HTP is taken to take every tensor."
    yield from _memory(made)
    yield _prefill(made)
    if len(table := made.requests(answers)):
        yield _requests(made, table)
    if rows:
        yield _timeline(made, rows)
    if made.ledger.total_bytes < _SMALL_BYTES:
        yield (
            "[yellow]note:[/yellow] what every layer costs whatever its size is left out of the "
            "model, so that its figures are far too fast for a file this small."
        )


def _placement(table: pd.DataFrame):
    from rich.table import Table

    from labkit.device.htp import by_role, handovers

    shown = Table(title="Where the tensors could go, by their types")
    for name in ("role", "type", "on", "file MiB", "HTP MiB"):
        shown.add_column(name, justify="right" if "MiB" in name else "left")
    shown.add_column("why")
    for row in by_role(table).to_dict("records"):
        sizes = [_mib(row[name]) for name in ("file_mib", "device_mib")]
        shown.add_row(row["role"], row["type"], row["on"], *sizes, row["why"])
    stops = int(handovers(table).sum())
    shown.caption = (
        f"{stops} hand-overs to the CPU in every chunk of a prompt."
        if stops
        else "No layer has to hand over to the CPU."
    )
    return shown


def _mib(size: float) -> str:
    if not size:
        return "-"
    return f"{size:,.1f}" if size >= 1 else f"{size:.2g}"


def _memory(made: HtpPlan):
    from labkit.device.htp import SESSION_MIB, sessions

    need = made.arena
    fits = "fits" if need.need_mib <= made.session_mib else "[red]does not fit[/red]"
    yield (
        f"Two slots of {need.slot_mib:,.0f} MiB and {need.fixed_mib:,.0f} MiB that stay: "
        f"{need.need_mib:,.0f} MiB, which {fits} in this device's session of "
        f"{made.session_mib:,.0f} MiB (KV cache and compute buffers come on top)."
    )
    if made.placement is None:
        return
    for limit in SESSION_MIB:
        spread = sessions(made.placement, limit)
        if spread.count is None:
            words = f"layer {spread.too_large[0]} alone is larger than a session"
        else:
            words = f"{spread.count} session{'s' if spread.count > 1 else ''}"
        yield f"All of the HTP's part at once, sessions of {limit:,} MiB: {words}."


def _prefill(made: HtpPlan) -> str:
    prefill, times = made.prefill, made.prefill.timeline
    hidden = times.hidden_pct
    text = (
        f"[bold]Modelled, not measured:[/bold] {prefill.tokens} tokens in chunks of "
        f"{prefill.chunk} take {prefill.prefill_s:.3g} s, {prefill.tok_s:,.0f} tok/s. Preparation "
        f"{times.prepare_s:.3g} s, compute {times.compute_s:.3g} s, waiting {times.wait_s:.3g} s"
    )
    text += "." if hidden != hidden else f" ({hidden:.0f} % of the preparation is hidden)."
    if times.sync_s or times.fallback_s:
        text += f" Hand-overs and CPU products: {times.sync_s + times.fallback_s:.3g} s."
    if prefill.tail:
        text += f" The last {prefill.tail} tokens go through the CPU: {times.tail_s:.3g} s."
    if hidden == hidden:
        text += (
            f" Chunks of {made.hiding} tokens and more hide the reads."
            if made.hiding
            else " No chunk is long enough to hide the reads."
        )
    if made.cpu_prefill_s:
        gain = made.cpu_prefill_s / prefill.prefill_s
        text += (
            f" On the CPU alone the planner expects {made.cpu_prefill_s:.3g} s: {gain:.1f} times."
        )
    return text


def _requests(made: HtpPlan, table: Any):
    from rich.table import Table

    shown = Table(
        min_width=60,
        title="Modelled requests",
        caption=f"Decode on the CPU at {made.decode_tok_s:.2f} tok/s, as the planner expects.",
    )
    for name in ("answer tokens", "TTFT s", "request s", "prompt's part"):
        shown.add_column(name, justify="right")
    for row in table.to_dict("records"):
        shown.add_row(
            f"{row['outputs']}",
            f"{row['ttft_s']:.3g}",
            f"{row['request_s']:.3g}",
            f"{row['prefill_pct']:.0f} %",
        )
    return shown


def _timeline(made: HtpPlan, rows: int):
    from rich.table import Table

    shown = Table(title="Modelled: who works when")
    for name in ("from ms", "to ms", "who", "what", "chunk", "layer", "slot"):
        shown.add_column(name, justify="left" if name in ("who", "what") else "right")
    table = made.prefill.timeline.table.sort_values(["start_s", "worker"], kind="stable")
    for row in table.head(rows).to_dict("records"):
        slot = "" if row["slot"] != row["slot"] else f"{row['slot']:.0f}"
        shown.add_row(
            f"{1e3 * row['start_s']:,.1f}",
            f"{1e3 * row['end_s']:,.1f}",
            row["worker"],
            row["work"],
            str(row["chunk"]),
            str(row["layer"]),
            slot,
        )
    return shown


def _plain(made: HtpPlan, answers: list[int], device: str, rows: int) -> dict[str, Any]:
    """Plain values; `modelled` marks what was neither measured nor read from the file."""
    from dataclasses import asdict

    from labkit.device.htp import SESSION_MIB, by_role, sessions
    from labkit.prefill_lab.result import records

    times = made.prefill.timeline
    totals = {name: value for name, value in vars(times).items() if name != "table"}
    placed = made.placement
    return {
        "model": made.ledger.name,
        "device": device,
        "placement": None if placed is None else records(by_role(placed)),
        "sessions": None
        if placed is None
        else {str(limit): sessions(placed, limit).count for limit in SESSION_MIB},
        "arena": {**asdict(made.arena), "need_mib": made.arena.need_mib},
        "session_mib": made.session_mib,
        "modelled": {
            "prompt_tokens": made.prefill.tokens,
            "chunk": made.prefill.chunk,
            "tail_tokens": made.prefill.tail,
            "prefill_s": made.prefill.prefill_s,
            "prefill_tok_s": made.prefill.tok_s,
            **totals,
            "hiding_chunk": made.hiding,
            "decode_tok_s": made.decode_tok_s,
            "cpu_prefill_s": made.cpu_prefill_s,
            "requests": records(made.requests(answers)),
            "timeline": records(times.table.head(rows)) if rows else None,
        },
    }
