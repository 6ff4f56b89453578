"""`labkit bench`: a model in several ways of running it, in turns, and what that shows."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.cli import options
from labkit.cli.outputs import directory_to_write

if TYPE_CHECKING:
    import pandas as pd

    from labkit.bench.result import BenchResult
    from labkit.bench.run import Event, Plan


def command(
    model: options.ModelPath,
    cases: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="What takes turns: resident, mmap, mmap-random, repack, traced, stream, "
            "stream-serial, stream-pipeline, stream-userfaultfd; a streamed one also with options "
            "of a session, lanes, policy, dense, prefill, prefetch, cache_mib: stream:lanes=8 or "
            "stream:prefetch=router. Without it all that make sense here.",
        ),
    ] = None,
    cache_mib: Annotated[
        str | None,
        typer.Option(
            metavar="100,200,...",
            help="Budgets for expert weights in MiB, each streamed case once for each; 0 is no "
            "cache, auto as much as fits. Without it auto under a memory limit, else a quarter of "
            "the experts.",
        ),
    ] = None,
    memory_limit_mib: Annotated[
        float | None,
        typer.Option(min=1, help="Run each case in a memory cgroup of this size."),
    ] = None,
    memory_limit_pct: Annotated[
        float | None,
        typer.Option(min=0.1, max=1000, help="The same, in percent of the model."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each case runs.")] = 5,
    n: Annotated[int, typer.Option("-n", min=1, help="Tokens measured in a run.")] = 32,
    warmup: Annotated[int, typer.Option(min=0, help="Tokens before them, not measured.")] = 8,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="At most this long for the tokens of one run.")
    ] = 60.0,
    prompt: options.Prompt = None,
    tokens: options.TokenIds = None,
    baseline: Annotated[
        str | None, typer.Option(help="The case that the others are compared with; else mmap.")
    ] = None,
    threads: options.Threads = None,
    temperature: options.Temperature = 0.8,
    seed: options.Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            callback=directory_to_write, help="Where the tables go; else runs/bench-<date>."
        ),
    ] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Add rounds to the benchmark in --out.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Plain JSON on stdout.")] = False,
) -> None:
    """Measure a model in several ways of running it: stock llama.cpp and labkit's streaming.

    Each case runs in a process of its own, with the model dropped from the page cache before, and
    the cases take turns. Tables go to a directory that notebook 04 reads.
    """
    if memory_limit_mib is not None and memory_limit_pct is not None:
        raise typer.BadParameter("give MiB or percent, one of the two", param_hint="--memory-limit")
    if append and out is None:
        raise typer.BadParameter("say which benchmark with --out", param_hint="--append")
    given = None if prompt is tokens is None else options.parse_prompt(prompt, tokens)
    from labkit.bench.cases import CacheMib, default_cases, parse_budget, parse_cases
    from labkit.bench.result import BenchResult
    from labkit.bench.run import Plan, limit_from_pct, run_bench
    from labkit.cli.console import dated_directory, emit_json, stderr, stdout

    limit = memory_limit_mib
    if memory_limit_pct is not None:
        limit = limit_from_pct(model, memory_limit_pct)
    names = cases.split(",") if cases else default_cases(limited=limit is not None)
    default: CacheMib = None if limit is None else "auto"
    budgets: list[CacheMib] = [default]
    if cache_mib:
        budgets = [parse_budget(b) for b in cache_mib.split(",")]
    plan = Plan(
        model, tuple(parse_cases(names, budgets)), rounds=rounds, n=n, warmup=warmup,
        seconds=seconds, prompt=given, memory_limit_mib=limit, threads=threads,
        temperature=temperature, seed=seed, baseline=baseline,
    )  # fmt: skip
    directory = out or dated_directory("bench-")
    earlier = BenchResult.load(directory) if append else None
    _announce(plan, directory)
    with _terminated_like_ctrl_c(), stderr().status("first round") as status:

        def show(event: Event) -> None:
            stderr().print(_line(event), markup=False, soft_wrap=True)
            status.update(f"round {event.round} of {event.rounds}, {event.case} done")

        def keep(so_far: BenchResult) -> None:
            _save(so_far, directory)

        result = run_bench(plan, show, keep, earlier=earlier)
    table = _save(result, directory)
    nothing_ran = not (result.runs["status"] == "ok").any()
    if json:
        emit_json(_plain(result, table, directory))
        raise typer.Exit(nothing_ran)
    _show(result, table, stdout())
    if nothing_ran:
        raise typer.Exit(1)
    stdout().print(
        f"\nTables: {directory}. To see where the time goes:\n"
        f"  labkit run 4 -p bench_dir {directory.resolve()}",
        style="dim", markup=False, soft_wrap=True,
    )  # fmt: skip


def _announce(plan: Plan, directory: Path) -> None:
    from labkit.cli.console import stderr

    limit = plan.memory_limit_mib
    about = "no memory limit" if limit is None else f"memory limit {limit:,.0f} MiB"
    stderr().print(
        f"Cases: {len(plan.cases)}, rounds: {plan.rounds}, {plan.warmup} + {plan.n} tokens each, "
        f"{about}. Ctrl-C stops; finished rounds are kept in {directory}.",
        markup=False, soft_wrap=True,
    )  # fmt: skip


def _line(event: Event) -> str:
    run = event.run
    head = f"round {event.round}/{event.rounds}  {event.case:<24}"
    if run["status"] != "ok":
        return f"{head}  {run['status']}: {run['reason']}"
    return (
        f"{head}  {run['decode_tok_s']:8.2f} tok/s   first token {run['first_token_s']:7.2f} s"
        f"   {run['n_tokens']} tokens{_disturbed(run)}"
    )


def _disturbed(run: dict[str, Any]) -> str:
    others = run["others_pct"]
    return f"   (others took {others:.0f} % of the cores)" if others and others > 10 else ""


def _save(result: BenchResult, directory: Path) -> pd.DataFrame:
    """Write the tables; returns the summary."""
    from labkit.bench.report import remarks, verdict
    from labkit.bench.summary import summary
    from labkit.errors import BenchError

    table = summary(result)
    result.save(directory)
    words = [verdict(result, table), *remarks(result, table), *result.facts["notes"]]
    try:
        table.to_csv(directory / "summary.csv", index=False, lineterminator="\n")
        result.runs.to_csv(directory / "runs.csv", index=False, lineterminator="\n")
        (directory / "report.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{directory}: cannot be written: {error.strerror}") from error
    return table


def _show(result: BenchResult, table: pd.DataFrame, console: Any) -> None:
    from labkit.bench.report import remarks, verdict
    from labkit.bench.tables import all_tables

    for part in all_tables(result, table):
        console.print(part)
    console.print(verdict(result, table), style="bold", markup=False)
    for remark in remarks(result, table):
        console.print(f"- {remark}", markup=False)
    console.print("\nNot controlled:", style="dim")
    for note in result.facts["notes"]:
        console.print(f"- {note}", style="dim", markup=False)


def _plain(result: BenchResult, table: pd.DataFrame, directory: Path) -> dict[str, Any]:
    from labkit.bench.report import remarks, verdict

    values = table.astype(object)
    return {
        "verdict": verdict(result, table),
        "remarks": remarks(result, table),
        "not_controlled": result.facts["notes"],
        "summary": values.where(values.notna(), None).to_dict("records"),
        "facts": result.facts,
        "logits_sha256": [
            {"round": run["round"], "case": run["case"], "rows": len(run["digests"]),
             "sha256": run["digests"][-1] if run["digests"] else None}
            for run in result.records()[0]
        ],
        "directory": directory,
    }  # fmt: skip


@contextlib.contextmanager
def _terminated_like_ctrl_c() -> Iterator[None]:
    """SIGTERM ends the benchmark by an exception too, so that its cgroup and process go with it."""

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    old = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
