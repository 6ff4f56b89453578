"""Charts of a benchmark: where a token's time goes, its latency, what overlap hides, cold start."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from labkit.charts.theme import CATEGORICAL, FAINT_INK, INK, title

Drawing = alt.Chart | alt.LayerChart | alt.FacetChart

_WIDTH = 560
_ROW = 34

#: Parts of a token's wall time: column, what the legend says, colour.
PARTS = (
    ("compute_ms", "compute (what is left over)", "#0072B2"),
    ("wait_ms", "exposed wait for reads", "#D55E00"),
    ("manage_ms", "cache management", "#CC79A7"),
    ("unsplit_ms", "not split: compute and page faults", "#8A94A3"),
)


def where_time_goes(table: pd.DataFrame) -> Drawing:
    """Draw the mean wall time of a token in each case, in its parts.

    `table` is a `labkit.bench.summary.summary`. Stock llama.cpp does not say what it waits for, so
    its bar has one part.
    """
    done = table[table["status"] == "ok"]
    if done.empty:
        return _nothing("No case ran to its end")
    parts = _parts(done)
    streamed = done[done["wait_ms"].notna() & done["kind"].str.startswith("stream")]
    finding = "No streamed case ran to its end"
    if len(streamed):
        share = 100 * streamed["wait_ms"] / streamed["wall_ms"]
        worst, best = streamed.loc[share.idxmax()], streamed.loc[share.idxmin()]
        finding = (
            f"{best['case']} stands still for reads in {share.min():.0f} % of a token's "
            f"{_ms(best['wall_ms'])}"
        )
        if len(streamed) > 1:
            finding += f", {worst['case']} in {share.max():.0f} % of {_ms(worst['wall_ms'])}"
    detail = (
        "Means of the median round's tokens. Compute is no measurement: it is what wait and "
        "management leave. A mapped file waits inside the computation, where nobody sees it."
    )
    names = list(done["case"])
    y = alt.Y("case:N", sort=names, title=None)
    bars = (
        alt.Chart(parts, width=_WIDTH, height=_ROW * len(names))
        .mark_bar()
        .encode(
            x=alt.X("ms:Q", title="milliseconds per token"),
            y=y,
            color=_part_colours(parts),
            order="place:Q",
            tooltip=["case", "part", alt.Tooltip("ms:Q", format=".2f")],
        )
    )
    totals = (
        alt.Chart(
            pd.DataFrame(
                {
                    "case": done["case"],
                    "wall_ms": done["wall_ms"],
                    "words": [f"{_figure(v)} tok/s" for v in done["decode_tok_s"]],
                }
            )
        )
        .mark_text(align="left", dx=6, color=FAINT_INK)
        .encode(x="wall_ms:Q", y=y, text="words:N")
    )
    return alt.layer(bars, totals).properties(title=_title(finding, detail))


def token_by_token(tokens: pd.DataFrame, cases: list[str]) -> Drawing:
    """Draw every token of the first round, in its parts, one row of bars a case.

    `tokens` is the `tokens` of a `BenchResult`, `cases` the cases to show. Warm-up tokens are pale.
    """
    first = tokens[(tokens["round"] == tokens["round"].min()) & tokens["case"].isin(cases)]
    first = first.assign(number=first["index"] + 1)
    measured = first[~first["warmup"]]
    if measured.empty:
        return _nothing("No token of these cases was measured")
    parts = _parts(first, keep=["case", "number", "warmup", "read_mib"])
    slow = measured.sort_values("wall_ms").iloc[-1]
    middle = measured.loc[measured["case"] == slow["case"], "wall_ms"].median()
    finding = (
        f"The slowest token, number {slow['number']} of {slow['case']}, took "
        f"{_ms(slow['wall_ms'])}, {slow['wall_ms'] / middle:.1f} x the median of its case"
    )
    if np.isfinite(slow["read_mib"]):
        finding += f"; it read {slow['read_mib']:.1f} MiB"
    detail = (
        "One round, one scale. Pale: the warm-up, in which the cache fills; it is in no other "
        "figure."
    )
    top = 1.05 * float(measured["wall_ms"].max())
    if first["wall_ms"].max() > 1.5 * top:
        detail += " Its bars are cut where they are higher than all measured ones."
    else:
        top = 1.05 * float(first["wall_ms"].max())
    every = max(1, round(first["number"].max() / 40)) * 5
    ticks = [1, *range(every, int(first["number"].max()) + 1, every)]
    bars = (
        alt.Chart(parts, width=_WIDTH, height=96)
        .mark_bar(clip=True)
        .encode(
            x=alt.X("number:O", title="token", axis=alt.Axis(labelAngle=0, values=ticks)),
            y=alt.Y("ms:Q", title="ms", scale=alt.Scale(domain=[0, top], nice=False)),
            color=_part_colours(parts),
            order="place:Q",
            opacity=alt.condition("datum.warmup", alt.value(0.45), alt.value(1)),
            tooltip=["case", "number", "part", alt.Tooltip("ms:Q", format=".2f"),
                     alt.Tooltip("read_mib:Q", format=".2f")],
        )
    )  # fmt: skip
    header = alt.Header(title=None, labelAnchor="start", labelOrient="top")
    return bars.facet(row=alt.Row("case:N", sort=cases, header=header), spacing=8).properties(
        title=_title(finding, detail)
    )


def latency_distribution(tokens: pd.DataFrame, table: pd.DataFrame) -> Drawing:
    """Draw the share of tokens that are done within a time, with p50, p95 and p99 marked.

    `tokens` is `BenchResult.measured()`, `table` its summary.
    """
    done = table[table["status"] == "ok"]
    if done.empty:
        return _nothing("No case ran to its end")
    names = list(done["case"])
    curves = []
    for name in names:
        times = np.sort(tokens.loc[tokens["case"] == name, "wall_ms"].to_numpy())
        share = 100 * np.arange(1, len(times) + 1) / len(times)
        curves.append(pd.DataFrame({"case": name, "ms": times, "share_pct": share}))
    curve = pd.concat(curves, ignore_index=True)
    marks = done.melt("case", ["p50_ms", "p95_ms", "p99_ms"], "mark", "ms")
    marks["share_pct"] = marks["mark"].str.slice(1, 3).astype(float)
    marks["mark"] = marks["mark"].str.slice(0, 3)
    tails = done.assign(tail=done["p99_ms"] / done["p50_ms"]).sort_values("tail")
    even, uneven = tails.iloc[0], tails.iloc[-1]
    finding = (
        f"{uneven['case']} has the longest tail: p99 {_ms(uneven['p99_ms'])} is "
        f"{uneven['tail']:.1f} x its median"
    )
    if len(tails) > 1:
        finding += f" ({even['case']}: {even['tail']:.1f} x)"
    least = int(done["n_tokens"].min())
    detail = f"Steps: all measured tokens. Points: p50, p95, p99. At least {least} tokens a case"
    detail += "; with fewer than 100 the p99 is nearly the worst one." if least < 100 else "."
    wide = curve["ms"].max() > 20 * max(curve["ms"].min(), 1e-6)
    x = alt.X(
        "ms:Q",
        title="wall time of a token (ms" + (", logarithmic)" if wide else ")"),
        scale=alt.Scale(type="log", nice=False) if wide else alt.Scale(zero=False),
    )
    y = alt.Y("share_pct:Q", title="tokens done within (%)", scale=alt.Scale(domain=[0, 100]))
    lines = (
        alt.Chart(curve, width=_WIDTH, height=240)
        .mark_line(interpolate="step-after")
        .encode(x=x, y=y, color=_case_colours(names))
    )
    points = (
        alt.Chart(marks)
        .mark_point(filled=True, size=70, opacity=1)
        .encode(
            x=x,
            y=y,
            color=_case_colours(names),
            shape=alt.Shape("mark:N", title=None, legend=alt.Legend(symbolFillColor=INK)),
            tooltip=["case", "mark", alt.Tooltip("ms:Q", format=".2f")],
        )
    )
    return alt.layer(lines, points).properties(title=_title(finding, detail))


def exposed_wait(table: pd.DataFrame) -> Drawing:
    """Draw for each streamed case how long reads were under way, and how much of it was exposed.

    `table` is a `labkit.bench.summary.summary`.
    """
    streamed = table[(table["status"] == "ok") & table["read_ms"].notna()]
    streamed = streamed[streamed["kind"].str.startswith("stream")]
    read = streamed["read_ms"].clip(lower=1e-9)
    hidden = (100 * (1 - streamed["wait_ms"] / read)).clip(0, 100)
    rows = streamed.assign(hidden_pct=hidden.where(streamed["read_ms"] > 1e-3, np.nan))
    known = rows[rows["hidden_pct"].notna()]
    if known.empty:
        return _nothing("Nothing was read, so there was nothing to hide")
    best = known.sort_values("hidden_pct").iloc[-1]
    finding = (
        f"{best['case']} hides {best['hidden_pct']:.0f} % of its reading behind compute: of "
        f"{_ms(best['read_ms'])} a token {_ms(best['wait_ms'])} are exposed"
    )
    detail = (
        "Grey: time with at least one read under way. Coloured: the graph stood still for reads; "
        "with the hand-over to and from the readers it can be longer than the reads."
    )
    names = list(rows["case"])
    base = alt.Chart(rows, width=_WIDTH, height=_ROW * len(names)).encode(
        y=alt.Y("case:N", sort=names, title=None),
        tooltip=[
            "case",
            alt.Tooltip("read_ms:Q", format=".2f"),
            alt.Tooltip("wait_ms:Q", format=".2f"),
            alt.Tooltip("hidden_pct:Q", format=".0f"),
        ],
    )
    x = "milliseconds per token"
    under_way = base.mark_bar(color="#C9D0D9").encode(x=alt.X("read_ms:Q", title=x))
    exposed = base.mark_bar(color="#D55E00", height=12).encode(x=alt.X("wait_ms:Q", title=x))
    words = (
        base.transform_filter("isValid(datum.hidden_pct)")
        .transform_calculate(
            words="format(datum.hidden_pct, '.0f') + ' % hidden'",
            end="max(datum.read_ms, datum.wait_ms)",
        )
        .mark_text(align="left", dx=6, color=INK)
        .encode(x="end:Q", text="words:N")
    )
    return alt.layer(under_way, exposed, words).properties(title=_title(finding, detail))


def cold_start(table: pd.DataFrame) -> Drawing:
    """Draw the time from opening to the first token, in its two parts.

    `table` is a `labkit.bench.summary.summary`.
    """
    done = table[table["status"] == "ok"]
    if done.empty:
        return _nothing("No case ran to its end")
    fast = done.sort_values("first_token_s").iloc[0]
    finding = (
        f"{fast['case']} has its first token after {_ms(1e3 * fast['first_token_s'])}, the earliest"
    )
    mapped = done[done["kind"] == "mmap"]
    if len(mapped) and fast["kind"] != "mmap":
        other = mapped.iloc[0]
        factor = other["first_token_s"] / fast["first_token_s"]
        finding += f"; mmap after {_ms(1e3 * other['first_token_s'])}, {factor:.1f} x as long"
    parts = done.melt(
        ["case", "load_read_mib"], ["open_s", "prefill_s"], "part", "seconds"
    ).replace({"part": {"open_s": "open the model", "prefill_s": "run the prompt"}})
    short = done["first_token_s"].max() < 1  # then in the unit of the title
    unit, factor_of = ("milliseconds", 1e3) if short else ("seconds", 1.0)
    parts["time"] = factor_of * parts["seconds"]
    names = list(done["case"])
    y = alt.Y("case:N", sort=names, title=None)
    bars = (
        alt.Chart(parts, width=_WIDTH, height=_ROW * len(names))
        .mark_bar()
        .encode(
            x=alt.X(
                "time:Q",
                axis=alt.Axis(tickCount=8),
                title=f"{unit} from opening to the first token",
            ),
            y=y,
            color=alt.Color(
                "part:N",
                title=None,
                scale=alt.Scale(
                    domain=["open the model", "run the prompt"],
                    range=[CATEGORICAL[0], CATEGORICAL[4]],
                ),
                legend=alt.Legend(orient="bottom"),
            ),
            tooltip=["case", "part", alt.Tooltip("seconds:Q", format=".3f"), "load_read_mib"],
        )
    )
    read = (
        alt.Chart(done[["case", "load_read_mib", "open_s", "prefill_s"]])
        .transform_filter("isValid(datum.load_read_mib)")
        .transform_calculate(
            end=f"{factor_of} * (datum.open_s + datum.prefill_s)",
            words="'reads ' + format(datum.load_read_mib, ',.0f') + ' MiB'",
        )
        .mark_text(align="left", dx=6, color=FAINT_INK)
        .encode(x="end:Q", y=y, text="words:N")
    )
    detail = (
        "Medians over rounds, the file dropped from the page cache before each. The bytes are what "
        "storage gave, with what the kernel read ahead of its own accord."
    )
    return alt.layer(bars, read).properties(title=_title(finding, detail))


def _nothing(finding: str) -> alt.Chart:
    """A chart that says why it is empty."""
    words = pd.DataFrame({"words": ["nothing to draw"]})
    text = alt.Chart(words, width=_WIDTH, height=60).mark_text(color=FAINT_INK)
    return text.encode(text="words:N").properties(title=_title(finding, ""))


def _parts(table: pd.DataFrame, keep: list[str] | None = None) -> pd.DataFrame:
    """One row a part of each row's wall time, with its place in the stack."""
    split = table["wait_ms"].notna()
    wide = table.assign(unsplit_ms=table["wall_ms"].where(~split))
    wide["compute_ms"] = wide["compute_ms"].clip(lower=0)
    columns = [column for column, _, _ in PARTS]
    long = wide.melt(keep or ["case"], columns, "column", "ms").dropna(subset="ms")
    long["place"] = long["column"].map({column: i for i, column in enumerate(columns)})
    long["part"] = long["column"].map({column: words for column, words, _ in PARTS})
    return long.drop(columns="column")


def _part_colours(parts: pd.DataFrame) -> alt.Color:
    there = [(words, colour) for _, words, colour in PARTS if (parts["part"] == words).any()]
    return alt.Color(
        "part:N",
        title=None,
        scale=alt.Scale(domain=[w for w, _ in there], range=[c for _, c in there]),
        legend=alt.Legend(orient="bottom", labelLimit=260, columns=2),
    )


def _case_colours(names: list[str]) -> alt.Color:
    palette = [CATEGORICAL[i % len(CATEGORICAL)] for i in range(len(names))]
    return alt.Color("case:N", sort=names, scale=alt.Scale(domain=names, range=palette))


def _ms(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1000 else f"{value:.{1 if value >= 10 else 2}f} ms"


def _figure(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 2}f}"


def _title(finding: str, detail: str) -> alt.TitleParams:
    """A title whose lines do not break before a percent sign or a unit."""
    for unit in (" %", " ms", " s,", " x "):
        finding = finding.replace(unit, unit.replace(" ", "\u00a0", 1))
    return title(finding, detail, width_px=_WIDTH + 90)
