"""Charts of a model file: where weights lie, what an expert costs to read, what a token uses."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from labkit.charts.theme import CATEGORICAL, FAINT_INK, INK, ROLE_COLOURS, title
from labkit.gguf_map import GGUFMap
from labkit.gguf_map.layout_tables import expert_table, layer_layout_table, over_read_table
from labkit.gguf_map.summary import roles_table, token_bytes
from labkit.gguf_map.tables import tensors_table

_WIDTH = 640
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


def unit_of(nbytes: float) -> tuple[int, str]:
    """The unit in which a byte count of this size reads best: ``(bytes, name)``."""
    return next((u for u in _UNITS if nbytes >= 2 * u[0]), _UNITS[-1])


def in_words(nbytes: float) -> str:
    """Bytes as a person says them: 731136 -> "714 KiB"."""
    unit, name = unit_of(nbytes)
    return (
        f"{nbytes / unit:,.3g} {name}" if nbytes / unit < 1000 else f"{nbytes / unit:,.0f} {name}"
    )


def file_map(gguf: GGUFMap, layer: int, expert: int) -> alt.VConcatChart:
    """Draw files as strips and layers as bars, by role, with one expert's slices marked."""
    share = 100 * gguf.expert_bytes / gguf.nbytes
    finding = (
        f"{share:.0f}\N{NO-BREAK SPACE}% of the weights are routed experts; expert {expert} of"
        f" layer {layer} lies in {len(gguf.expert(layer, expert))} pieces"
    )
    detail = (
        "Colours: what the bytes are for. Black marks: the slices of that expert. Top: the file"
        " from its first byte to its last. Below: each layer's tensors in file order."
    )
    parts = [_strips(gguf, layer, expert), _layers(gguf, layer, expert)]
    return (
        alt.vconcat(*parts, spacing=18)
        .resolve_scale(color="shared")
        .properties(title=title(finding, detail, width_px=_WIDTH))
    )


def direct_read_ends(
    gguf: GGUFMap, layer: int, expert: int, block_bytes: int
) -> alt.Chart | alt.FacetChart:
    """Draw the first and the last block that a direct read of each slice touches.

    What lies between them is needed whole; only these two hold bytes that are not.
    """
    slices = expert_table(gguf, layer, expert, block_bytes)
    rows = []
    for part in gguf.expert(layer, expert):
        begin = part.offset % block_bytes
        end = begin + part.nbytes
        last = -(-end // block_bytes) * block_bytes
        tail = end - (last - block_bytes)
        name = f"{part.projection} ({in_words(part.nbytes)})"
        first_end = min(end, block_bytes)
        rows += [
            (name, "first block", 0, begin, "read, not needed"),
            (name, "first block", begin, first_end, "the slice"),
            (name, "first block", first_end, block_bytes, "read, not needed"),
        ]
        if last > block_bytes:
            rows += [
                (name, "last block", 0, tail, "the slice"),
                (name, "last block", tail, block_bytes, "read, not needed"),
            ]
    table = pd.DataFrame(rows, columns=["slice", "block", "start_bytes", "end_bytes", "bytes"])
    table = table[table["end_bytes"] > table["start_bytes"]]
    over, needed = slices["over_read_bytes"].sum(), slices["size_bytes"].sum()
    finding = (
        f"Reading this expert directly fetches {in_words(over)} that it does not need:"
        f" {100 * over / needed:.3g}\N{NO-BREAK SPACE}% more than its {in_words(needed)}"
    )
    detail = (
        f"Direct I/O reads whole blocks of {block_bytes} bytes; the slices begin and end inside"
        " one. The blocks between first and last are needed whole."
    )
    base = alt.Chart(table).encode(
        x=alt.X(
            "start_bytes:Q",
            title="byte within the block",
            scale=alt.Scale(domain=[0, block_bytes], nice=False),
            axis=alt.Axis(values=[0, block_bytes // 2, block_bytes], format=",d"),
        ),
        x2="end_bytes:Q",
        y=alt.Y("slice:N", title=None, sort=list(dict.fromkeys(table["slice"]))),
        color=alt.Color(
            "bytes:N",
            title=None,
            scale=alt.Scale(
                domain=["the slice", "read, not needed"], range=[CATEGORICAL[0], CATEGORICAL[1]]
            ),
            legend=alt.Legend(orient="bottom"),
        ),
        tooltip=["slice", "block", "bytes", "start_bytes", "end_bytes"],
    )
    bars = base.mark_bar(height=20).properties(width=230, height=34 * len(slices))
    return bars.facet(column=alt.Column("block:N", title=None), spacing=26).properties(
        title=title(finding, detail, width_px=_WIDTH)
    )


def over_read_by_size(gguf: GGUFMap, block_bytes: int) -> alt.LayerChart | alt.FacetChart:
    """Draw over-read against slice size: this model's slices on the curve of all sizes."""
    table = over_read_table(gguf, block_bytes)
    largest_kib = max(16384, 2 * int(table["size_bytes"].max()) // 1024)
    sizes = np.geomspace(1 << 10, largest_kib << 10, 60)
    curve = pd.DataFrame({"size_kib": sizes / 1024, "over_read_pct": 100 * block_bytes / sizes})
    points = table.assign(size_kib=table["size_bytes"] / 1024)
    points = points.groupby(["type", "size_kib"], as_index=False, observed=True).agg(
        over_read_pct=("over_read_pct", "mean"),
        n_slices=("n_slices", "sum"),
        projections=("projection", lambda names: ", ".join(dict.fromkeys(names))),
    )
    worst = points.sort_values("over_read_pct").iloc[-1]
    finding = (
        f"Direct reads fetch {worst['over_read_pct']:.3g}\N{NO-BREAK SPACE}% too much at slices of"
        f" {in_words(worst['size_kib'] * 1024)}; at 1 MiB it would be"
        f" {100 * block_bytes / (1 << 20):.2g}\N{NO-BREAK SPACE}%"
    )
    detail = (
        f"Points: slices of this model. Line: one block of {block_bytes} bytes per slice, which is"
        " what a slice at an arbitrary offset costs on average. Both axes are logarithmic."
    )
    x = alt.X(
        "size_kib:Q",
        title="bytes of one slice (KiB)",
        scale=alt.Scale(type="log", domain=[1, largest_kib], nice=False),
        axis=alt.Axis(values=[4**i for i in range(10)], format=",d"),
    )
    top = max(1000.0, float(points["over_read_pct"].max()) * 1.5)
    y = alt.Y(
        "over_read_pct:Q",
        title="read beyond the slice (%)",
        scale=alt.Scale(type="log", domain=[0.02, top], nice=False, clamp=True),
        axis=alt.Axis(values=[0.1, 1, 10, 100, 1000], format="~g"),
    )
    line = alt.Chart(curve).mark_line(color=FAINT_INK, strokeDash=[5, 4]).encode(x=x, y=y)
    dots = (
        alt.Chart(points)
        .mark_point(filled=True, size=130, color=CATEGORICAL[1], opacity=1)
        .encode(x=x, y=y, tooltip=["projections", "type", "n_slices", "size_kib", "over_read_pct"])
    )
    names = dots.mark_text(align="left", angle=325, dx=11, color=INK).encode(text="projections:N")
    return alt.layer(line, dots, names).properties(
        width=_WIDTH - 60, height=240, title=title(finding, detail, width_px=_WIDTH)
    )


def token_against_model(gguf: GGUFMap) -> alt.Chart:
    """Draw the bytes of the whole model beside those that one token uses, by role."""
    table = roles_table(gguf)
    unit, unit_name = unit_of(gguf.nbytes)
    token = token_bytes(gguf)
    cycle = 100 * gguf.token_cycle_bytes / max(gguf.expert_bytes, 1)
    finding = (
        f"One token uses {in_words(token)} of the model's {in_words(gguf.nbytes)}"
        f" ({100 * token / gguf.nbytes:.0f}\N{NO-BREAK SPACE}%), but only {cycle:.3g}"
        "\N{NO-BREAK SPACE}% of its routed experts"
    )
    detail = (
        f"Each token uses {gguf.n_expert_used} of {gguf.n_expert} experts in"
        f" {len(gguf.moe_layers)} layers, and all other weights (of a separate embedding, one row)."
    )
    long = table.melt("role", ["size_bytes", "token_bytes"], "what", "bytes")
    long["what"] = long["what"].map({"size_bytes": "whole model", "token_bytes": "one token"})
    long["amount"] = long["bytes"] / unit
    long["order"] = long["role"].map({role: i for i, role in enumerate(ROLE_COLOURS)})
    return (
        alt.Chart(long)
        .mark_bar(height=34)
        .encode(
            x=alt.X("amount:Q", title=f"weights ({unit_name})", stack="zero"),
            y=alt.Y("what:N", title=None, sort=["whole model", "one token"]),
            color=_role_colour(table["role"]),
            order="order:Q",
            tooltip=["what", "role", alt.Tooltip("amount:Q", format=",.3f", title=unit_name)],
        )
        .properties(width=_WIDTH - 90, height=110, title=title(finding, detail, width_px=_WIDTH))
    )


def _role_colour(roles: pd.Series) -> alt.Color:
    present = [role for role in ROLE_COLOURS if role in set(roles)]
    return alt.Color(
        "role:N",
        title=None,
        scale=alt.Scale(domain=present, range=[ROLE_COLOURS[role] for role in present]),
        legend=alt.Legend(orient="bottom", columns=5),
    )


def _strips(gguf: GGUFMap, layer: int, expert: int) -> alt.LayerChart | alt.FacetChart:
    """One horizontal strip per file."""
    unit, unit_name = unit_of(max(gguf.sizes))
    table = tensors_table(gguf)
    files = [f"file {i + 1}" if len(gguf.paths) > 1 else "file" for i in range(len(gguf.paths))]
    header = pd.DataFrame(
        {"name": "header: metadata and tensor list", "role": "other", "offset_bytes": 0,
         "end_bytes": gguf.data_offsets, "shard": range(len(files))}
    )  # fmt: skip
    table = pd.concat([header, table], ignore_index=True)
    table = table.assign(
        start=table["offset_bytes"] / unit,
        end=table["end_bytes"] / unit,
        file=[files[i] for i in table["shard"]],
    )[["name", "role", "file", "start", "end"]]
    marks = pd.DataFrame(
        {
            "file": [files[s.shard] for s in gguf.expert(layer, expert)],
            "at": [s.offset / unit for s in gguf.expert(layer, expert)],
            "slice": [s.projection for s in gguf.expert(layer, expert)],
            "offset": [s.offset for s in gguf.expert(layer, expert)],
        }
    )
    x = alt.X(
        "start:Q",
        title=f"offset in the file ({unit_name})",
        scale=alt.Scale(domain=[0, max(gguf.sizes) / unit], nice=False),
    )
    y = alt.Y("file:N", title=None, sort=files, axis=alt.Axis(ticks=False))
    bars = alt.Chart(table).mark_bar(height=26).encode(
        x=x, x2="end:Q", y=y, color=_role_colour(table["role"]),
        tooltip=["name", "role", alt.Tooltip("start:Q", format=",.3f", title=unit_name)],
    )  # fmt: skip
    ticks = alt.Chart(marks).mark_tick(color=INK, thickness=2, height=34, opacity=1).encode(
        x="at:Q", y=y, tooltip=["slice", alt.Tooltip("offset:Q", format=",d")],
    )  # fmt: skip
    return alt.layer(bars, ticks).properties(width=_WIDTH - 90, height=max(44, 38 * len(files)))


def _layers(gguf: GGUFMap, layer: int, expert: int) -> alt.LayerChart | alt.FacetChart:
    """One bar per layer, its tensors in file order."""
    table = layer_layout_table(gguf)
    unit, unit_name = unit_of(float(table["layer_end_bytes"].max()))
    table = table.assign(
        start=table["layer_start_bytes"] / unit, end=table["layer_end_bytes"] / unit
    )
    by_name = table.set_index("name")["layer_start_bytes"]
    tensors = gguf.layer_tensors(layer)
    marks = pd.DataFrame(
        {
            "layer": layer,
            "slice": [e.projection for e in tensors],
            "at": [
                (float(by_name.loc[e.tensor.name]) + expert * e.slice_bytes) / unit for e in tensors
            ],
        }
    )
    step = 22 if gguf.n_layers <= 12 else max(6, 420 // max(gguf.n_layers, 1))
    y = alt.Y("layer:O", title="layer", axis=alt.Axis(labelOverlap=True, ticks=False))
    bars = alt.Chart(table[["name", "role", "layer", "start", "end"]]).mark_bar().encode(
        x=alt.X("start:Q", title=f"bytes of the layer, in file order ({unit_name})",
                scale=alt.Scale(nice=False)),
        x2="end:Q", y=y, color=_role_colour(table["role"]),
        tooltip=["name", "role", alt.Tooltip("start:Q", format=",.3f", title=unit_name)],
    )  # fmt: skip
    ticks = alt.Chart(marks).mark_tick(color=INK, thickness=2, opacity=1, height=step + 4).encode(
        x="at:Q", y=y, tooltip=["slice"],
    )  # fmt: skip
    layers = [bars, ticks]
    if step >= 16:  # room for a word inside the bar
        layers.append(
            ticks.mark_text(align="left", dx=6, color="white", fontSize=11, fontWeight=600).encode(
                text="slice:N"
            )
        )
    return alt.layer(*layers).properties(width=_WIDTH - 90, height=alt.Step(step))
