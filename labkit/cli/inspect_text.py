"""The summary that `labkit inspect` prints for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from labkit.gguf_map import ExpertSlice, GGUFMap
from labkit.gguf_map.summary import bytes_by_role, streaming_refusal, token_bytes

_BLOCK = 4096


def size(nbytes: float) -> str:
    """Bytes with a binary unit: 8704 -> "8.5 KiB"."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}" if nbytes < 100 else f"{nbytes:.0f} {unit}"
    return f"{nbytes / 1024:.3g} TiB"


def spans(numbers: list[int]) -> str:
    """Ascending numbers as ranges: [1, 2, 3, 7] -> "1-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def describe(gguf: GGUFMap) -> Iterator[RenderableType]:
    """What the model is, its bytes by role, and what keeps it from being used, if anything."""
    yield _facts(gguf)
    yield _roles(gguf)
    unknown = [t for t in gguf.tensors if not t.type_known]
    if unknown:
        yield "[yellow]Tensors of a type that labkit does not know:[/]"
        for tensor in unknown[:10]:
            yield f"  {escape(tensor.name)}: type {tensor.type_id}, at most {size(tensor.nbytes)}"
        if len(unknown) > 10:
            yield f"  ... and {len(unknown) - 10} more"
    for problem in gguf.load_problems():
        yield f"[yellow]llama.cpp cannot load it:[/] {escape(problem)}"
    refusal = streaming_refusal(gguf)
    if refusal:
        yield f"[yellow]Not streamable:[/] {escape(refusal)}"
    else:
        prompt = "-p 'In the beginning'" if gguf.has_tokenizer else "--tokens 1,2,3"
        yield f"Streamable. Try: labkit generate {escape(str(gguf.paths[0]))} {prompt}"


def expert_table(gguf: GGUFMap, slices: list[ExpertSlice]) -> Table:
    """Where the slices of one expert entry are."""
    first = slices[0]
    total = sum(s.nbytes for s in slices)
    table = Table(
        title=f"Expert {first.expert} of layer {first.layer}: {len(slices)} slices, {size(total)}",
        caption="\n".join(
            f"shard {shard}: {escape(str(gguf.paths[shard]))}"
            for shard in sorted({s.shard for s in slices})
        ),
        box=box.SIMPLE,
        title_justify="left",
        caption_justify="left",
    )
    for name in ("projection", "shard", "type"):
        table.add_column(name)
    for name in ("offset", "bytes", f"offset mod {_BLOCK}"):
        table.add_column(name, justify="right")
    for s in slices:
        table.add_row(
            s.projection,
            str(s.shard),
            s.type_name,
            str(s.offset),
            str(s.nbytes),
            str(s.offset % _BLOCK),
        )
    return table


def _facts(gguf: GGUFMap) -> Table:
    name = str(gguf.metadata.get("general.name") or gguf.paths[0].name)[:120]
    name = "".join(c if c.isprintable() else "?" for c in name)  # a file may hold escape codes
    table = Table(
        title=escape(name),
        box=None,
        show_header=False,
        title_justify="left",
        title_style="bold",
    )
    table.add_column(style="dim")
    table.add_column()
    files = "1 file" if len(gguf.paths) == 1 else f"{len(gguf.paths)} shards"
    rows = [
        ("architecture", gguf.architecture),
        ("files", f"{files}, {size(sum(gguf.sizes))}, GGUF version {gguf.version}"),
        ("tensors", f"{len(gguf.tensors)}, {size(gguf.nbytes)}"),
        ("layers", str(gguf.n_layers)),
    ]
    rows += _moe_facts(gguf) if gguf.expert_tensors else [("experts", "none: a dense model")]
    rows.append(("tokenizer", "in the file" if gguf.has_tokenizer else "none: give token ids"))
    for label, value in rows:
        table.add_row(label, escape(value))
    return table


def _moe_facts(gguf: GGUFMap) -> list[tuple[str, str]]:
    entries = sorted({gguf.entry_bytes(layer) for layer in gguf.moe_layers})
    entry = size(entries[0])
    if len(entries) > 1:
        entry += f" to {size(entries[-1])}, by layer"
    share = gguf.expert_bytes / gguf.nbytes
    token = token_bytes(gguf)
    projections = ", ".join(e.projection for e in gguf.layer_tensors(gguf.moe_layers[0]))
    n = len(gguf.moe_layers)
    return [
        ("MoE layers", f"{spans(gguf.moe_layers)} ({n} of {gguf.n_layers})"),
        ("experts", f"{gguf.n_expert} a layer, {gguf.n_expert_used} used by each token"),
        ("routed experts", f"{size(gguf.expert_bytes)}, {share:.0%} of the weights: streamable"),
        ("dense weights", f"{size(gguf.dense_bytes)}: used by every token"),
        ("expert entry", f"{entry} ({projections} of one expert)"),
        (
            "token cycle",
            f"{size(gguf.token_cycle_bytes)}: experts that one token uses in all layers;"
            " an LRU cache smaller than that hits next to nothing",
        ),
        ("bytes per token", f"{size(token)} of weights, {token / gguf.nbytes:.1%} of the model"),
    ]


def _roles(gguf: GGUFMap) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("role")
    for name in ("tensors", "size", "used by a token"):
        table.add_column(name, justify="right")
    for row in bytes_by_role(gguf):
        table.add_row(row.role, str(row.n_tensors), size(row.size_bytes), size(row.token_bytes))
    return table
