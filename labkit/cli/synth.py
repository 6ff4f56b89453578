"""`labkit synth`: make a model with random weights, tiny or large, of any MoE architecture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.errors import LabkitError

if TYPE_CHECKING:
    from labkit.gguf_map import GGUFMap
    from labkit.synth import LlamaWorker


def _count(text: str) -> Any:
    return typer.Option(min=1, metavar="N", help=text)


def _print_architectures(wanted: bool) -> None:
    if wanted:
        from labkit.synth import architectures

        for name in architectures():
            typer.echo(name)
        raise typer.Exit


def command(
    arch: Annotated[str, typer.Argument(help="An architecture such as qwen3moe or gpt-oss.")],
    out: Annotated[Path, typer.Argument(help="The GGUF file to write.")],
    size_gib: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="GIB", help="A large model of this size."),
    ] = None,
    large: Annotated[
        bool, typer.Option("--large", help="A large model, as big as its shape makes it.")
    ] = False,
    quant: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Of the experts: F32, F16, Q4_0, Q8_0, Q4_K, Q6_K or MXFP4. A tiny model has F32 "
            "by default, a large one Q4_0.",
        ),
    ] = None,
    layers: Annotated[int | None, _count("Layers, dense ones counted.")] = None,
    experts: Annotated[int | None, _count("Experts in a layer.")] = None,
    top_k: Annotated[int | None, _count("Experts that a token uses in a layer.")] = None,
    d_model: Annotated[int | None, _count("Width of the model.")] = None,
    d_ff: Annotated[int | None, _count("Width of one expert.")] = None,
    shards: Annotated[int, _count("Files to split the model into.")] = 1,
    seed: Annotated[int, typer.Option(metavar="N", help="Equal seeds give equal files.")] = 0,
    check: Annotated[bool, typer.Option(help="Decode a few tokens with llama.cpp.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Plain JSON about what was made.")] = False,
    list_: Annotated[
        bool,
        typer.Option(
            "--list", is_eager=True, callback=_print_architectures, help="Name all architectures."
        ),
    ] = False,
) -> None:
    """Make a MoE model with random weights: tiny, or large for experiments at scale.

    It has no tokenizer: run it from token ids.
    """
    from labkit.cli.console import emit_json, stdout
    from labkit.gguf_map import open_gguf
    from labkit.synth import LlamaWorker, make
    from labkit.synth.gguf_writer import shard_path

    if out.is_dir():
        raise LabkitError(f"{out} is a directory: name the file to write in it.")
    target = shard_path(out, 0, shards)
    if target.exists() and not force:
        raise LabkitError(f"{target} exists: remove it, or give --force to write over it.")
    _require_name(arch)
    wishes = {"layers": layers, "experts": experts, "top_k": top_k}
    wishes |= {"d_model": d_model, "d_ff": d_ff, "quant": quant}
    options: dict[str, Any] = {key: value for key, value in wishes.items() if value is not None}
    options |= {"shards": shards, "seed": seed}
    with LlamaWorker() as worker:
        start = time.perf_counter()
        if large or size_gib is not None:
            first = _make_large(arch, out, size_gib, worker, options)
        else:
            first = make(arch, out, worker=worker, **options)
        wall_s = time.perf_counter() - start
        checked = _check(arch, first, worker) if check else None
    facts = _facts(open_gguf(first), wall_s, checked)
    if json:
        emit_json(facts)
    else:
        stdout().print(_summary(facts), markup=False, soft_wrap=True)


def _require_name(arch: str) -> None:
    import difflib

    from labkit.synth import candidates

    if arch not in candidates():
        near = difflib.get_close_matches(arch, candidates(), n=3)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise LabkitError(f"no architecture is called {arch}. {hint}See: labkit synth --list")


def _make_large(
    arch: str, out: Path, size_gib: float | None, worker: LlamaWorker, options: dict[str, Any]
) -> Path:
    from rich.progress import Progress

    from labkit.cli.console import stderr
    from labkit.synth import make_large

    with Progress(console=stderr(), transient=True) as bar:
        task = bar.add_task("writing", total=None)
        return make_large(
            arch,
            out,
            size_gib=size_gib,
            worker=worker,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            **options,
        )


def _check(arch: str, path: Path, worker: LlamaWorker) -> dict[str, Any]:
    """Decode with llama.cpp; the file stays, whatever comes of it."""
    from labkit.synth import UNAVAILABLE

    answer = worker.decode(path)
    if not answer["finite"] or answer["spread"] == 0:
        raise LabkitError(
            f"{path} was written, but llama.cpp computes no usable logits from it"
            + (f": {UNAVAILABLE[arch]}." if arch in UNAVAILABLE else ".")
        )
    return {"tokens": answer["tokens"], "logits_sha256": answer["sha256"]}


def _facts(model: GGUFMap, wall_s: float, checked: dict[str, Any] | None) -> dict[str, Any]:
    first = model.moe_layers[0]
    return {
        "paths": [str(path) for path in model.paths],
        "bytes": sum(path.stat().st_size for path in model.paths),
        "architecture": model.architecture,
        "layers": model.n_layers,
        "moe_layers": len(model.moe_layers),
        "experts": model.n_expert,
        "top_k": model.n_expert_used,
        "expert_type": model.expert_tensors[0].tensor.type_name,
        "entry_bytes": model.entry_bytes(first),
        "wall_s": wall_s,
        "check": checked,
    }


def _summary(facts: dict[str, Any]) -> str:
    decoded = "decodes with llama.cpp" if facts["check"] else "not checked"
    return (
        f"{facts['paths'][0]}: {facts['architecture']}, {facts['bytes'] / 2**20:,.1f} MiB, "
        f"{facts['moe_layers']} MoE layers of {facts['layers']}, {facts['experts']} experts, "
        f"top-{facts['top_k']}, {facts['expert_type']}, "
        f"{facts['entry_bytes'] / 2**10:,.1f} KiB an expert, "
        f"written in {facts['wall_s']:.1f} s, {decoded}"
    )
