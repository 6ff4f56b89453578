"""`labkit prefill`: every way in which this machine can take a prompt, measured in turns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.cli.options import CacheMib, Lanes, ModelPath, Threads
from labkit.cli.outputs import directory_to_write

if TYPE_CHECKING:
    from labkit.prefill_lab.result import PrefillResult

_WIDTH = 66  # of tables, so that their titles need no second line


def command(
    model: ModelPath,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N or N,N,...",
            help="The longest prompt, with shorter ones down to 8 tokens; or the lengths "
            "themselves. Without it up to 2048, as far as the model's context allows.",
        ),
    ] = None,
    paths: Annotated[
        str | None,
        typer.Option(
            metavar="mmap,layers,...",
            help="mmap, mmap-random, resident, repack (stock llama.cpp), experts, layers "
            "(streamed), device:NAME, devices (those beside the CPU). Default: not mmap-random.",
        ),
    ] = None,
    outputs: Annotated[
        str, typer.Option(metavar="N,N,...", help="Answer lengths of the whole request.")
    ] = "1,16,64",
    rounds: Annotated[int, typer.Option(min=1, help="How often each path runs.")] = 3,
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens of one graph.")] = 512,
    cache_mib: CacheMib = None,
    memory_limit_mib: Annotated[
        float | None,
        typer.Option(min=16, help="Memory limit (cgroup) for paths that need not hold the model."),
    ] = None,
    lanes: Lanes = 4,
    threads: Threads = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A text to take the prompts from.", dir_okay=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order of paths.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", callback=directory_to_write, help="A directory for tables and a chart."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Plain JSON on stdout.")] = False,
) -> None:
    """Measure prefill on every path: rate by prompt length, time to first token, whole requests.

    Each path runs in a process of its own, in turns over several rounds, from a cold file. What
    llama.cpp reports as devices takes part under its name: `--paths mmap,device:HTP0`.
    """
    lengths = None if tokens is None else parse_counts(tokens, "--tokens")
    answers = parse_counts(outputs, "--outputs")
    from labkit.cli.console import emit_json, stderr, stdout
    from labkit.errors import BenchError
    from labkit.prefill_lab.lab import (
        DEFAULT_PATHS,
        PrefillPlan,
        default_lengths,
        ladder,
        run_prefill,
    )

    if lengths is None:
        lengths = default_lengths(model, max(answers))
    elif len(lengths) == 1:
        lengths = ladder(lengths[0])
    plan = PrefillPlan(
        model=model,
        paths=DEFAULT_PATHS if paths is None else [name.strip() for name in paths.split(",")],
        lengths=lengths,
        outputs=answers,
        rounds=rounds,
        chunk=chunk,
        cache_mib=cache_mib,
        lanes=lanes,
        threads=threads,
        memory_limit_mib=memory_limit_mib,
        prompt=None if prompt_file is None else _text(prompt_file),
        seed=seed,
    )
    with stderr().status("opening the model") as status:
        result = run_prefill(plan, lambda run: status.update(_progress(run, rounds)))
    if not result.paths:
        raise BenchError(f"No path could be measured. {' '.join(_failures(result))}")
    if out is not None:
        result.save(out)
        _save_chart(result, out)
        stderr().print(f"Tables and chart written to {out}")
    if json:
        emit_json(result.to_json())
        return
    for part in _report(result):
        stdout().print(part)


def parse_counts(text: str, option: str) -> list[int]:
    """Numbers of tokens from `8` or `8,128`, sorted; wrong use is an error of `option`."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise typer.BadParameter(
            f"'{text}' is not a number of tokens, or a list such as 8,128,512", param_hint=option
        )
    return found


def _text(path: Path) -> str:
    from labkit.errors import OptionError

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: the prompt cannot be read as a text: {error}") from error


def _progress(run: dict[str, Any], rounds: int) -> str:
    return f"round {run['round']} of {rounds}, {run['path']}: {run['status']}"


def _save_chart(result: PrefillResult, out: Path) -> None:
    from labkit import charts
    from labkit.charts.prefill import rates_by_length

    picture = charts.png(rates_by_length(result.rates()).to_dict())
    (out / "prefill.png").write_bytes(picture)


def _report(result: PrefillResult):
    """The result for people: three tables and what could not be measured."""
    from rich.markup import escape

    yield _rates(result)
    yield _requests(result)
    yield _starts(result)
    if words := _two_slots(result):
        yield words
    yield from map(escape, _failures(result))
    for note in result.facts["notes"]:
        yield f"[yellow]note:[/yellow] {escape(note)}"


def _failures(result: PrefillResult) -> list[str]:
    return [
        f"{row['path']}: {row['reason']}"
        for row in result.starts().to_dict("records")
        if row["failed"]
    ]


def _rates(result: PrefillResult):
    from rich.table import Table

    rates = result.rates()
    lengths = sorted(rates["tokens"].unique()) if len(rates) else []
    base = result.base
    shown = Table(
        min_width=_WIDTH,
        title="Prefill by prompt length, tokens a second",
        caption="Median of the rounds; ± half of what lies between the slowest and the fastest."
        if result.facts["rounds"] > 1
        else "One round: how far the figures spread is not known.",
    )
    shown.add_column("path")
    for length in lengths:
        shown.add_column(f"{length}", justify="right")
    if len(result.paths) > 1:
        shown.add_column(f"times {base}\nat {lengths[-1]}", justify="right")
    for path in result.paths:
        own = rates[rates["path"] == path].set_index("tokens").to_dict("index")
        cells = [_rate(own[n]) for n in lengths]
        if len(result.paths) > 1:
            cells.append(_number(own[lengths[-1]]["speed_ratio"], ".2f"))
        shown.add_row(path, *cells)
    return shown


def _rate(row: dict[Any, Any]) -> str:
    spread = row["spread_pct"]
    around = "" if spread != spread else f" [dim]±{spread / 2:.0f}%[/dim]"
    return f"{row['tok_s']:,.0f}{around}"


def _requests(result: PrefillResult):
    from rich.table import Table

    table = result.request_table()
    outputs = sorted(table["outputs"].unique()) if len(table) else []
    tokens = int(table["tokens"].iloc[0]) if len(table) else 0
    shown = Table(
        min_width=_WIDTH,
        title=f"Whole request in seconds, {tokens} prompt tokens",
        caption="In brackets: the prompt's part of it.",
    )
    shown.add_column("answer tokens")
    for n in outputs:
        shown.add_column(str(n), justify="right")
    for path in result.paths:
        own = table[table["path"] == path].set_index("outputs")
        cells = [
            f"{own['request_s'][n]:.3g} [dim]({own['prefill_pct'][n]:.0f} %)[/dim]"
            if n in own.index
            else "the text ended"
            for n in outputs
        ]
        shown.add_row(path, *cells)
    return shown


def _starts(result: PrefillResult):
    from rich.table import Table

    shown = Table(
        min_width=_WIDTH,
        title="Cold start (file not in memory) and memory",
        caption="Memory: the process's peak, less what it had before the model was opened.",
    )
    for name in ("path", "open s", "first token s", "read MiB", "memory MiB", "runs"):
        shown.add_column(name, justify="left" if name == "path" else "right")
    for row in result.starts().to_dict("records"):
        seconds = [_number(row[name], ",.3g") for name in ("open_s", "first_token_s")]
        sizes = [_number(row[name], ",.0f") for name in ("cold_storage_mib", "grown_mib")]
        runs = f"{row['runs']}, {row['failed']} failed" if row["failed"] else str(row["runs"])
        shown.add_row(row["path"], *seconds, *sizes, runs)

    return shown


def _two_slots(result: PrefillResult) -> str:
    """How well two slots hid the reads, and how well their model knows it."""
    from labkit.prefill_lab.check import own_runs, replay_table

    table = replay_table(own_runs(result))
    if not len(table):
        return ""
    longest = table[table["tokens"] == table["tokens"].max()].median()
    return (
        f"Two slots, {longest['tokens']:.0f} tokens: reads took {_time(longest['read_s'])}, "
        f"compute waited {_time(longest['wait_s'])} for them "
        f"({longest['hidden_pct']:.0f} % hidden). Given each layer's own times, the two-slot model "
        f"predicts this prompt to {longest['error_pct']:+.1f} %, all {len(table)} prompts within "
        f"{table['error_pct'].abs().max():.1f} %."
    )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _number(value: float, form: str) -> str:
    return "-" if value != value else format(value, form)
