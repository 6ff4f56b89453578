"""Charts of the memory ledger: what must fit, how a context grows, which device, which bound."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from labkit.charts.theme import CARD, CATEGORICAL, FAINT_INK, INK, title
from labkit.sheet import CACHE_KINDS, PARTS, MemoryLedger
from labkit.sheet.ledger import RESIDENT, STREAMED, TOO_LARGE

MIB, GIB = 2**20, 2**30
_WIDTH = 560
_ROUTED, _SHARED, _DENSE, _EMBEDDINGS = PARTS
_ITEM_COLOURS = {
    _ROUTED: "#0072B2",
    _SHARED: "#56B4E9",
    _DENSE: "#009E73",
    _EMBEDDINGS: "#E69F00",
    "active weights": "#CC79A7",
    "KV cache": "#D55E00",
    "compute buffers": "#5F6B7A",
}
_TEMPTING, _LEAST, _ALL = "active parameters alone", "experts streamed", "all resident"


def must_fit(
    name: str, ledger: MemoryLedger, *, usable_mib: float | None = None, device: str = ""
) -> alt.LayerChart | alt.FacetChart:
    """Draw what "active parameters" suggest beside what streaming and a resident run really need.

    `ledger` is that of the model `name`; a device's usable memory is a line across.
    """
    table = ledger_bars(ledger)
    sums = table.groupby("run", sort=False)["size_gib"].sum()
    unit, scale = ("GiB", 1.0) if sums.max() >= 1 else ("MiB", 1024.0)
    table = table.assign(size=table["size_gib"] * scale)
    finding = (
        f"{name} needs {_amount(ledger.resident_bytes)} in memory; its active parameters are"
        f" {_amount(ledger.token_bytes)}, a figure of work and not of memory"
    )
    if ledger.cache_floor_bytes:
        finding += f". Streaming its experts takes {_amount(ledger.streamed_cycle_bytes)}"
    detail = (
        "What each way of running keeps in memory; streaming with a cache of one token cycle, below"
        " which an LRU cache finds nothing."
    )
    if usable_mib:
        detail += f" Dashed line: {usable_mib / 1024:.3g} GiB usable on {device or 'the device'}."
    items = [item for item in _ITEM_COLOURS if item in set(table["item"])]
    bars = (
        alt.Chart(table, width=_WIDTH, height=150)
        .mark_bar()
        .encode(
            x=alt.X("sum(size):Q", title=f"memory ({unit})"),
            y=alt.Y("run:N", sort=[_TEMPTING, _LEAST, _ALL], title=None),
            color=alt.Color(
                "item:N",
                sort=items,
                title=None,
                scale=alt.Scale(domain=items, range=[_ITEM_COLOURS[i] for i in items]),
            ),
            order=alt.Order("place:Q"),
            tooltip=["run", "item", alt.Tooltip("size:Q", format=".3g", title=unit)],
        )
    )
    layers: list[alt.Chart] = [bars]
    if usable_mib:
        line = alt.Chart(pd.DataFrame({"size": [usable_mib / 1024 * scale]}))
        layers.append(
            line.mark_rule(strokeDash=[5, 4], color=INK, strokeWidth=1.5).encode(x="size:Q")
        )
    return alt.layer(*layers).properties(title=title(finding, detail, width_px=_WIDTH + 120))


def ledger_bars(ledger: MemoryLedger) -> pd.DataFrame:
    """The table behind `must_fit`: run, item, place (order in a bar), size_gib."""
    rest = [(part, ledger.part_bytes[part]) for part in PARTS if part != _ROUTED]
    rest += [("KV cache", ledger.kv_bytes or 0), ("compute buffers", ledger.compute_bytes)]
    cached = ledger.token_cycle_bytes
    runs = {
        _TEMPTING: [("active weights", ledger.token_bytes)],
        _LEAST: [(_ROUTED, cached), *rest] if cached else [],
        _ALL: [(_ROUTED, ledger.part_bytes[_ROUTED]), *rest],
    }
    rows = [
        (run, item, place, size / GIB)
        for run, items in runs.items()
        for place, (item, size) in enumerate(items)
        if size
    ]
    return pd.DataFrame(rows, columns=["run", "item", "place", "size_gib"])


def kv_growth(
    name: str, table: pd.DataFrame, weights_bytes: float
) -> alt.LayerChart | alt.FacetChart:
    """Draw the cache against the context, by what its rows are kept for.

    `table` is one of `labkit.sheet.report.kv_kinds_table`; the weights are a line to compare with.
    """
    total = table.groupby("n_ctx")["kv_bytes"].sum()
    least, most = int(total.index.min()), int(total.index.max())
    finding = (
        f"At {most:,} tokens {name} keeps {_amount(total[most])} of cache,"
        f" {100 * total[most] / weights_bytes:.0f} % of its weights"
    )
    if most > least and total[least]:
        growth = total[most] / total[least]
        finding += f"; {most / least:,.0f} x the context costs {growth:,.0f} x the memory"
    kinds = [kind for kind in CACHE_KINDS if kind in set(table["kind"])]
    detail = (
        "F16 keys and values as llama.cpp allocates them, both scales logarithmic. Attention to "
        "everything grows with the context; windows and recurrent states do not. Dashed: weights."
    )
    shown = table[table["kv_bytes"] > 0]
    x = alt.X("n_ctx:Q", title="context (tokens)", scale=alt.Scale(type="log", base=2))
    lines = (
        alt.Chart(shown, width=_WIDTH, height=230)
        .mark_line(point=alt.OverlayMarkDef(size=40))
        .encode(
            x=x,
            y=alt.Y("kv_mib:Q", title="cache (MiB)", scale=alt.Scale(type="log", base=2)),
            color=alt.Color(
                "kind:N",
                title=None,
                sort=kinds,
                scale=alt.Scale(domain=kinds, range=CATEGORICAL[: len(kinds)]),
            ),
            tooltip=["kind", "n_ctx", alt.Tooltip("kv_mib:Q", format=",.1f")],
        )
    )
    weights = (
        alt.Chart(pd.DataFrame({"kv_mib": [weights_bytes / MIB]}))
        .mark_rule(strokeDash=[5, 4], color=FAINT_INK)
        .encode(y="kv_mib:Q")
    )
    return alt.layer(weights, lines).properties(title=_title(finding, detail))


def which_fits(table: pd.DataFrame, bits: float = 4) -> alt.LayerChart | alt.FacetChart:
    """Draw which model fits which device, with a slider for the width of the weights.

    `table` is one of `labkit.sheet.fit_table`, at widths that are numbers.
    """
    widths = sorted(table["bits"].unique())
    shown = table[table["bits"] == bits]
    tempting = int(shown["tempting"].sum())
    fits = int((shown["verdict"] == RESIDENT).sum())
    finding = (
        f"At {bits:g} bits {fits} of {len(shown)} pairs fit whole; in {tempting} more the active"
        " weights would fit and the model does not"
    )
    detail = (
        "Needed memory over usable memory, in %. Streamed: not whole, but all except the routed"
        " experts fits. Choose the bits of a weight below."
    )
    chosen = alt.param(
        name="bits_shown",
        value=bits,
        bind=alt.binding_select(options=widths, name="bits a weight "),
    )
    table = table.assign(need_pct=100 * table["resident_mib"] / table["usable_mib"])
    models = list(dict.fromkeys(table.sort_values("total_b")["model"]))
    devices = list(dict.fromkeys(table.sort_values("usable_mib")["device"]))
    verdicts = [RESIDENT, STREAMED, TOO_LARGE]
    base = (
        alt.Chart(table, width=max(360, 74 * len(devices)), height=26 * len(models))
        .transform_filter("datum.bits == bits_shown")
        .encode(
            x=alt.X("device:N", sort=devices, title=None, axis=alt.Axis(labelAngle=-30)),
            y=alt.Y("model:N", sort=models, title=None),
            tooltip=[
                "model",
                "device",
                "verdict",
                alt.Tooltip("resident_mib:Q", format=",.0f"),
                alt.Tooltip("streamed_mib:Q", format=",.0f"),
                alt.Tooltip("active_mib:Q", format=",.0f"),
                alt.Tooltip("usable_mib:Q", format=",.0f"),
            ],
        )
    )
    cells = base.mark_rect(stroke=CARD, strokeWidth=2).encode(
        color=alt.Color(
            "verdict:N",
            title=None,
            sort=verdicts,
            scale=alt.Scale(domain=verdicts, range=["#009E73", "#F0C36B", "#B9C2CD"]),
        )
    )
    # black also on a dark page: the cells are light there as well
    words = base.mark_text(fontSize=11.5, color="black").encode(
        text=alt.Text("need_pct:Q", format=",.0f")
    )
    return alt.layer(cells, words).add_params(chosen).properties(title=_title(finding, detail))


def what_sparsity_saves(table: pd.DataFrame, n_tokens: int) -> alt.LayerChart | alt.FacetChart:
    """Draw what part of its weights a model computes with, reads in a batch, and stores.

    `table` is one of `labkit.sheet.sparsity_table` for batches of `n_tokens`.
    """
    names = {
        "compute_pct": "operations of a token",
        "batch_read_pct": f"weights read by {n_tokens} tokens",
        "capacity_pct": "weights to be stored",
    }
    long = table.rename(columns=names).melt(
        id_vars=["model", "total_b"], value_vars=list(names.values()), var_name="what"
    )
    long = long.rename(columns={"value": "share_pct"})
    finding = (
        f"Routing saves work, not room: a token computes with {table['compute_pct'].median():.0f} %"
        f" of the weights, yet {n_tokens} tokens read {table['batch_read_pct'].median():.0f} % of"
        " them, and all must be stored"
    )
    detail = (
        "Medians over the models shown. The batch's share assumes even, independent routing; real "
        "routing repeats itself and reads somewhat less."
    )
    models = list(dict.fromkeys(table.sort_values("total_b")["model"]))
    base = alt.Chart(long, width=_WIDTH - 60, height=26 * len(models)).encode(
        y=alt.Y("model:N", sort=models, title=None)
    )
    span = base.mark_rule(color="#C8D0DA", strokeWidth=2).encode(
        x=alt.X("min(share_pct):Q"), x2="max(share_pct)"
    )
    points = base.mark_point(filled=True, size=90, opacity=1).encode(
        x=alt.X("share_pct:Q", title="share of all weights (%)", scale=alt.Scale(domain=[0, 100])),
        color=alt.Color(
            "what:N",
            title=None,
            sort=list(names.values()),
            scale=alt.Scale(domain=list(names.values()), range=CATEGORICAL[:3]),
        ),
        tooltip=["model", "what", alt.Tooltip("share_pct:Q", format=".1f")],
    )
    return alt.layer(span, points).properties(title=_title(finding, detail))


def intensity(name: str, table: pd.DataFrame, device: str) -> alt.LayerChart | alt.FacetChart:
    """Draw operations per byte against the size of a batch, and the device's ridge point.

    `table` is one of `labkit.sheet.report.intensity_table`.
    """
    one = float(table["flop_per_byte"].iloc[0])
    ridge = float(table["ridge_flop_per_byte"].iloc[0])
    below = table.loc[table["flop_per_byte"] < ridge, "n_tokens"]
    if np.isnan(ridge):
        finding = f"One token of {name} makes {one:.3g} operations of each byte that it reads"
        detail = f"The profile of {device} names no operations, so there is no ridge point."
    else:
        finding = (
            f"One token of {name} makes {one:.3g} operations of each byte, {device} could make"
            f" {ridge:.0f}"
        )
        if len(below):
            finding += f": it waits for memory, and so does a batch of {below.max()} tokens"
        detail = "Dashed: the ridge point, advertised operations a second over bytes a second."
    line = (
        alt.Chart(table, width=_WIDTH, height=210)
        .mark_line(color=CATEGORICAL[0], point=alt.OverlayMarkDef(size=45, color=CATEGORICAL[0]))
        .encode(
            x=alt.X("n_tokens:Q", title="tokens in the batch", scale=alt.Scale(type="log", base=2)),
            y=alt.Y("flop_per_byte:Q", title="FLOP per byte", scale=alt.Scale(type="log")),
            tooltip=[
                "n_tokens",
                alt.Tooltip("flop_per_byte:Q", format=".3g"),
                alt.Tooltip("read_mib:Q", format=",.0f"),
            ],
        )
    )
    layers: list[alt.Chart] = [line]
    if not np.isnan(ridge):
        rule = alt.Chart(pd.DataFrame({"flop_per_byte": [ridge]}))
        layers.append(
            rule.mark_rule(strokeDash=[5, 4], color=CATEGORICAL[1]).encode(y="flop_per_byte:Q")
        )
    return alt.layer(*layers).properties(title=_title(finding, detail))


def _amount(nbytes: float) -> str:
    if nbytes >= GIB:
        return f"{nbytes / GIB:.3g} GiB"
    return f"{nbytes / MIB:.3g} MiB" if nbytes >= MIB else f"{nbytes / 1024:.3g} KiB"


def _title(finding: str, detail: str) -> alt.TitleParams:
    """A title whose lines do not break before a percent sign."""
    return title(finding.replace(" %", "\u00a0%"), detail, width_px=_WIDTH + 60)
