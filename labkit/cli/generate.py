"""`labkit generate`: run a model, resident or streamed, and say what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.cli.options import parse_prompt

if TYPE_CHECKING:
    from labkit.runtime import Generation, Session


def command(
    model: Annotated[
        Path, typer.Argument(help="A GGUF file, any shard of a split model, or their directory.")
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
        bool, typer.Option("--resident", help="No streaming: llama.cpp's own memory map.")
    ] = False,
    lanes: Annotated[int, typer.Option(min=1, max=64, help="Reads under way at once.")] = 4,
    direct_io: Annotated[
        bool | None, typer.Option(help="Past the page cache; by default where it can be.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=512, help="Compute threads.")] = None,
    n_ctx: Annotated[int | None, typer.Option(min=1, help="Tokens of context.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Plain JSON with all figures.")] = False,
) -> None:
    """Generate text with a MoE model inside a memory budget, and show what it cost."""
    wanted = parse_prompt(prompt, tokens)
    from labkit.cli.console import emit_json, stderr
    from labkit.runtime import Session

    options: dict[str, Any] = {"threads": threads, "n_ctx": n_ctx}
    options |= {"temperature": temperature, "seed": seed, "resident": resident}
    options |= {"cache_mib": cache_mib, "lanes": lanes, "direct_io": direct_io}
    with Session(model, **options) as session:
        result = session.generate(wanted, n, hash_logits=True)
        figures = _figures(session, result)
    if json:
        emit_json(figures)
        return
    typer.echo(result.text or " ".join(map(str, result.tokens)))
    stderr().print(_summary(figures), style="dim")


def _figures(session: Session, result: Generation) -> dict[str, Any]:
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
        "hit_rate": result.hit_rate,
        "bytes_read": None if session.cache_bytes is None else result.bytes_read,
        "cache_mib": None if session.cache_bytes is None else session.cache_bytes / 2**20,
        "resident_expert_bytes": session.resident_expert_bytes,
        "peak_memory_mib": None if peak is None else peak / 2**20,
        "reads": session.reader_note,
    }


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
    if figures["peak_memory_mib"] is not None:
        parts.append(f"peak memory {figures['peak_memory_mib']:.0f} MiB")
    return " · ".join(parts)
