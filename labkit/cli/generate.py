"""`labkit generate`: run a model, resident or streamed, and say what it cost."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.cli import options
from labkit.cli.outputs import file_to_write

if TYPE_CHECKING:
    from labkit.runtime import Generation, Session
    from labkit.runtime.steps import TokenStep


def command(
    ctx: typer.Context,
    model: options.ModelPath,
    prompt: options.Prompt = None,
    tokens: options.TokenIds = None,
    n: options.Count = 64,
    cache_mib: options.CacheMib = None,
    resident: options.Resident = False,
    lanes: options.Lanes = 4,
    direct_io: options.DirectIO = None,
    overlap: options.Overlap = "auto",
    prefill: options.Prefill = "auto",
    prefetch: options.Prefetch = None,
    hot_list: options.HotList = None,
    policy: options.Policy = "lru",
    threads: options.Threads = None,
    n_ctx: options.ContextLength = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    metrics: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.csv",
            callback=file_to_write,
            help="A row of figures per token, as bmoe_metrics CSV.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Plain JSON with all figures.")] = False,
) -> None:
    """Generate text with a MoE model inside a memory budget, and show what it cost."""
    options.refuse_with_resident(ctx)
    wanted = options.parse_prompt(prompt, tokens)
    from labkit.cli.console import emit_json, stderr
    from labkit.runtime import Session

    begin = time.perf_counter()
    with Session(
        model,
        resident=resident,
        cache_mib=cache_mib,
        lanes=lanes,
        direct_io=direct_io,
        overlap=overlap,  # pyright: ignore[reportArgumentType] - the session checks it
        prefill=prefill,  # pyright: ignore[reportArgumentType]
        prefetch=prefetch,  # pyright: ignore[reportArgumentType]
        hot_list=hot_list,
        policy=policy,
        threads=threads,
        n_ctx=n_ctx,
        temperature=temperature,
        seed=seed,
    ) as session:
        open_s = time.perf_counter() - begin
        show = None if json else _show
        listed = _hot_list(hot_list, session)
        result = session.generate(wanted, n, hash_logits=True, on_step=show)
        figures = _figures(session, result, open_s) | {"hot_list": listed}
        if metrics:
            _write_metrics(metrics, session, result, io_threads=lanes, temp=temperature, seed=seed)
    if json:
        emit_json(figures)
        return
    typer.echo("" if result.text else " ".join(map(str, result.tokens)))
    stderr().print(_summary(figures), style="dim")


def _show(step: TokenStep) -> None:
    """The text as it comes."""
    typer.echo(step.text, nl=False)
    sys.stdout.flush()


def _figures(session: Session, result: Generation, open_s: float) -> dict[str, Any]:
    from labkit.runtime.memory import process_memory

    peak = process_memory()["peak_rss"]
    return {
        "text": result.text,
        "tokens": result.tokens,
        "prompt_tokens": result.prompt_tokens,
        "stop": result.stop,
        "logits_sha256": result.logits_sha256,
        "prefill_tok_s": result.prefill_tok_s,
        "decode_tok_s": result.decode_tok_s,
        "ttft_s": result.ttft_s,
        "open_s": open_s,
        "token_latency_ms": _latency(result),
        "hit_rate": result.hit_rate,
        "bytes_read": None if session.cache_bytes is None else result.bytes_read,
        "cache_mib": None if session.cache_bytes is None else session.cache_bytes / 2**20,
        "resident_expert_bytes": session.resident_expert_bytes,
        "peak_memory_mib": None if peak is None else peak / 2**20,
        "reads": session.reader_note,
        "overlap": session.overlap,
        "overlap_note": session.overlap_note,
        "prefetch": _prefetch(session, result),
    }


def _hot_list(directory: Path | None, session: Session) -> dict[str, Any] | None:
    """The hot list's file, and how many experts earlier runs put on it; None without one."""
    if directory is None:
        return None
    from labkit.runtime.hot_list import HotList

    found = HotList(directory, session.map)
    return {"file": found.path, "experts_of_earlier_runs": len(found.hottest())}


def _prefetch(session: Session, result: Generation) -> dict[str, Any] | None:
    """How often prefetch was right, and what it read; None without it."""
    table = session.prefetch_accuracy
    if table.empty:
        return None
    sums = table.sum()
    return {
        "recall": sums["right"] / sums["chosen"] if sums["chosen"] else None,
        "control_right": sums.get("control_right"),
        "control_wrong": sums.get("control_wrong"),
        "control_ties": sums.get("control_ties"),
        "hits": sum(step.prefetch_hits for step in result.steps),
        "bytes_read": sum(step.prefetch_bytes for step in result.steps),
    }


def _latency(result: Generation) -> dict[str, float] | None:
    """p50, p95 and p99 of a generated token's wall time; None without tokens."""
    from labkit.runtime.metrics_csv import percentiles

    return percentiles([1e3 * step.wall_s for step in result.steps]) if result.steps else None


def _write_metrics(path: Path, session: Session, result: Generation, **options: Any) -> None:
    from labkit.cli.console import stderr
    from labkit.runtime.metrics_csv import session_info, write_metrics

    write_metrics(path, [result], session_info(session, **options))
    stderr().print(f"{len(result.steps)} rows written to {path}", style="dim", soft_wrap=True)


def _summary(figures: dict[str, Any]) -> str:
    parts = [
        f"prefill {figures['prefill_tok_s']:.0f} tok/s",
        f"decode {figures['decode_tok_s']:.1f} tok/s" if figures["decode_tok_s"] else "no token",
    ]
    if figures["cache_mib"] is not None:
        parts += [
            f"cache {figures['cache_mib']:.1f} MiB",
            f"hits {100 * (figures['hit_rate'] or 0):.1f} %",
            f"read {figures['bytes_read'] / 2**20:.1f} MiB",
        ]
    if figures["prefetch"] and figures["prefetch"]["recall"] is not None:
        parts.append(f"prefetch foretold {100 * figures['prefetch']['recall']:.1f} % of choices")
    if figures["peak_memory_mib"] is not None:
        parts.append(f"peak memory {figures['peak_memory_mib']:.0f} MiB")
    summary = " · ".join(parts)
    if listed := figures["hot_list"]:
        known = listed["experts_of_earlier_runs"]
        began = (
            f"of the {known} experts that earlier runs used, the most used that fit were read first"
            if known
            else "nothing was known of earlier runs"
        )
        summary += f"\nhot list: {began}; what this run used is noted in {listed['file']}"
    return summary
