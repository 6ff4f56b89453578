"""Traces survive being written and read, and files that users bring are read or refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from labkit.errors import OptionError, TraceError
from labkit.trace import COLUMNS, RouteTrace, RoutingBlock, TraceWarning

PEER = Path(__file__).resolve().parents[2] / "shared" / "peer" / "qwen3-30b-a3b.route.csv"
HEADER = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
ROW = "0,1,5,3,0,17,0.25,0,4096"


def block(phase: str, positions: list[int], layer: int) -> RoutingBlock:
    rng = np.random.default_rng(layer)
    n = len(positions)
    experts = np.stack([rng.permutation(16)[:4] for _ in positions]).astype(np.int32)
    resident = rng.random((n, 4)) < 0.5
    weights = rng.random((n, 4), np.float32)
    weights[0, 0] = np.nan
    read_bytes = np.where(resident, 0, 4096)
    return RoutingBlock(
        0, phase, layer, np.array(positions), experts, weights, resident, read_bytes
    )


@pytest.fixture
def trace() -> RouteTrace:
    trace = RouteTrace(
        model="/models/a model.gguf",
        architecture="qwen3moe",
        n_layers=3,
        n_expert=16,
        n_expert_used=4,
        entry_bytes={1: 4096, 2: 4096},
        dense_bytes={0: 10, 1: 20, 2: 30},
        tokens=[(0, 0, 7, "In"), (0, 1, 8, " the"), (0, 2, 9, " 太")],
        domains={0: "prose"},
    )
    trace.append(block("prefill", [0, 1], 1))
    trace.append(block("prefill", [1], 2))
    trace.append(block("decode", [2], 1))
    trace.append(block("decode", [2], 2))
    return trace


def test_the_table_has_a_row_per_choice(trace: RouteTrace) -> None:
    table = trace.table
    assert list(table.columns) == list(COLUMNS)
    assert len(table) == 4 * (2 + 1 + 1 + 1)
    assert not table.duplicated(["turn", "phase", "step", "layer", "slot"]).any()
    assert list(table["phase"].unique()) == ["prefill", "decode"]


def test_csv_and_back(trace: RouteTrace, tmp_path: Path) -> None:
    back = RouteTrace.from_csv(trace.to_csv(tmp_path / "t.csv"))
    pd.testing.assert_frame_equal(
        back.table, trace.table, check_dtype=False, rtol=1e-5, check_categorical=True
    )
    assert (back.architecture, back.n_layers, back.n_expert) == ("qwen3moe", 3, 16)
    assert back.entry_bytes == trace.entry_bytes
    assert back.dense_bytes == trace.dense_bytes


def test_parquet_and_back_is_exact(trace: RouteTrace, tmp_path: Path) -> None:
    back = RouteTrace.from_parquet(trace.to_parquet(tmp_path / "t.parquet"))
    pd.testing.assert_frame_equal(back.table, trace.table)
    assert back.tokens == trace.tokens
    assert back.domains == {0: "prose"}
    assert back.model == trace.model
    assert back.entry_bytes == trace.entry_bytes


def test_an_empty_trace_is_a_table_without_rows(tmp_path: Path) -> None:
    path = RouteTrace(n_layers=1).to_csv(tmp_path / "t.csv")
    assert len(RouteTrace.from_csv(path).table) == 0


@pytest.mark.parametrize("extra", ["", ",0", ",0,1,2"], ids=["9", "10", "12"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_more_columns_and_either_line_end(extra: str, end: str, tmp_path: Path) -> None:
    names = ",".join(["", "dropped", "a", "b"][: extra.count(",") + 1])
    path = tmp_path / "t.csv"
    lines = ["# route_trace v1", HEADER + names, ROW + extra, ROW.replace("0.25", "nan") + extra]
    path.write_bytes((end.join(lines) + end).encode())
    table = RouteTrace.from_csv(path).table
    assert table["expert"].tolist() == [17, 17]
    assert np.isnan(table["weight"].tolist()[1])


def test_a_cut_last_line_is_reported_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for cut in (ROW[:-1], ROW[:9], ROW):
        path.write_text("\n".join([HEADER, ROW, cut]))
        with pytest.warns(TraceWarning, match="line 3 has no line end"):
            assert len(RouteTrace.from_csv(path).table) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("layer,token\n1,2\n", "column turn is missing"),
        (f"{HEADER}\n0,1,5\n", ":2: 3 values for 9 columns"),
        (f"{HEADER}\n{ROW}\n{ROW.replace('17', 'x')}\n", ":3: expert is 'x'"),
        (f"{HEADER}\n{ROW.replace('17', '-1')}\n", ":2: expert is negative"),
        (f"{HEADER}\n{ROW.replace('17', '9' * 30)}\n", ":2: expert is"),
        (f"{HEADER}\n0,2{ROW[3:]}\n", ":2: phase is neither"),
        (f"# layer=x expert_bytes=1\n{HEADER}\n", "header line"),
    ],
)
def test_nonsense_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        RouteTrace.from_csv(path)


def test_binary_and_absent_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(bytes(range(256)))
    for read in (RouteTrace.from_csv, RouteTrace.from_parquet):
        with pytest.raises(TraceError):
            read(path)
        with pytest.raises(TraceError):
            read(tmp_path / "absent")


def test_a_trace_that_cannot_be_written_leaves_no_half_file(trace: RouteTrace) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(TraceError, match="cannot be written"):
        trace.to_csv(full)
    with pytest.raises(TraceError, match="cannot be written"):
        trace.to_csv("/absent-folder/t.csv")


def test_a_failed_write_keeps_what_was_there(trace: RouteTrace, tmp_path: Path) -> None:
    target = tmp_path / "t.csv"
    target.write_text("of the user")
    (tmp_path / ".t.csv.partial").mkdir()
    with pytest.raises(TraceError, match="cannot be written"):
        trace.to_csv(target)
    assert target.read_text() == "of the user"


def test_a_link_stays_a_link(trace: RouteTrace, tmp_path: Path) -> None:
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "t.csv")
    trace.to_csv(link)
    assert link.is_symlink()
    assert len(RouteTrace.from_csv(tmp_path / "t.csv").table) == len(trace.table)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.csv", "t.csv"]


def test_a_trace_that_was_read_can_go_on(trace: RouteTrace, tmp_path: Path) -> None:
    back = RouteTrace.from_csv(trace.to_csv(tmp_path / "t.csv"))
    back.append(block("decode", [3], 1))
    assert len(back.table) == len(trace.table) + 4


def test_a_table_made_while_another_thread_appends_is_not_kept(trace: RouteTrace) -> None:
    before = len(trace.table)
    first = block("decode", [3], 1)
    trace.append(Appending(trace, first))
    assert len(trace.table) == before + 4
    assert len(trace.table) == before + 8


class Appending(RoutingBlock):
    """A block whose rows are asked for at the very moment in which another one is added."""

    def __init__(self, trace: RouteTrace, rows: RoutingBlock) -> None:
        for name in ("turn", "phase", "layer", "positions"):
            object.__setattr__(self, name, getattr(rows, name))
        for name in ("experts", "weights", "resident", "read_bytes"):
            object.__setattr__(self, name, getattr(rows, name))
        object.__setattr__(self, "owner", trace)

    def table(self) -> pd.DataFrame:
        owner, self.__dict__["owner"] = self.__dict__["owner"], None
        if owner:
            owner.append(block("decode", [4], 1))
        return super().table()


def test_the_recorded_trace_of_the_peer_is_read() -> None:
    if not PEER.exists():
        pytest.skip("the peer's recorded trace is not beside this checkout")
    trace = RouteTrace.from_csv(PEER)
    assert (trace.architecture, trace.n_layers, trace.n_expert) == ("qwen3moe", 48, 128)
    assert set(trace.entry_bytes) == set(range(48))
    assert len(trace.table) == 44_766
    assert trace.table["expert"].between(0, 127).all()


def test_bare_choices_become_tokens(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    # A prompt of two tokens, of which the last layer routes the last, then a token.
    pairs = [(0, 1), (0, 2), (0, 2), (0, 3), (1, 7), (1, 6), (0, 4), (0, 1), (1, 6), (1, 5)]
    path.write_text("layer,expert\n" + "".join(f"{a},{b}\n" for a, b in pairs))
    trace = RouteTrace.open(path)
    table = trace.table
    assert trace.n_expert_used == 2
    assert list(zip(table["layer"], table["expert"], strict=True)) == [
        (0, 1), (0, 2), (0, 2), (0, 3), (1, 7), (1, 6), (0, 4), (0, 1), (1, 6), (1, 5),
    ]  # fmt: skip
    assert table["step"].tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert table["phase"].tolist() == ["prefill"] * 6 + ["decode"] * 4
    with pytest.raises(TraceError, match="no multiple of 3"):
        RouteTrace.open(path, n_expert_used=3)
    path.write_text("layer,expert\n1,x\n")
    with pytest.raises(TraceError, match=":2: expert is 'x'"):
        RouteTrace.open(path)
    path.write_text("layer,expert\n")
    assert RouteTrace.open(path).table.empty


@pytest.mark.parametrize(
    "of_a_token",  # choices of one token, layer by layer
    [[0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]],
)
def test_bare_choices_of_layers_that_differ_are_not_taken_for_a_prompt_in_silence(
    tmp_path: Path, of_a_token: list[int]
) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{layer},{i % 7}\n" for _ in range(5) for i, layer in enumerate(of_a_token)]
    path.write_text("layer,expert\n" + "".join(rows))
    with pytest.warns(TraceWarning, match=r"layer 0 has \d choices in a row and layer 1 has \d"):
        RouteTrace.open(path)


def test_rows_out_of_order_are_sorted(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [ROW, ROW.replace("0,1,5", "0,1,4"), ROW.replace("0,1,5", "0,0,9")]
    path.write_text("\n".join([HEADER, *rows, ""]))
    table = RouteTrace.from_csv(path).table
    assert table["step"].tolist() == [9, 4, 5]


def test_parts_of_a_trace(trace: RouteTrace) -> None:
    decode = trace.select(phase="decode")
    assert decode.table["phase"].unique().tolist() == ["decode"]
    assert len(decode.table) + len(trace.select(phase="prefill").table) == len(trace.table)
    assert trace.select(layers=[2]).table["layer"].unique().tolist() == [2]
    assert trace.select(turns=[1]).table.empty
    assert decode.entry_bytes == trace.entry_bytes


def test_one_trace_after_another(trace: RouteTrace) -> None:
    both = RouteTrace.concat([trace, trace])
    pd.testing.assert_frame_equal(both.select(turns=[0]).table, trace.table)
    assert both.table["turn"].unique().tolist() == [0, 1]
    assert len(both.table) == 2 * len(trace.table)
    with pytest.raises(TraceError, match="different models"):
        RouteTrace.concat([trace, RouteTrace(n_layers=9)])
    with pytest.raises(TraceError, match="no trace"):
        RouteTrace.concat([])


def test_tokens_and_domains_keep_their_turn(trace: RouteTrace) -> None:
    other = RouteTrace.concat([trace])
    other.domains = {0: "code"}
    both = RouteTrace.concat([trace, other, trace])
    assert both.domains == {0: "prose", 1: "code", 2: "prose"}
    assert [token[:3] for token in both.tokens if token[0] == 1] == [
        (1, 0, 7),
        (1, 1, 8),
        (1, 2, 9),
    ]
    prose = both.select(domain="prose")
    assert prose.table["turn"].unique().tolist() == [0, 2]
    assert {token[0] for token in prose.tokens} == {0, 2}
    assert prose.domains == {0: "prose", 2: "prose"}
    assert {name: len(table) for name, table in both.by_domain().items()} == {
        "prose": 2 * len(trace.table),
        "code": len(trace.table),
    }


def test_slices_combine(trace: RouteTrace) -> None:
    both = RouteTrace.concat([trace, trace])
    both.domains = {0: "prose", 1: "code"}
    part = both.select(phase="decode", layers=[1], turns=[0, 1], domain="code")
    table = part.table
    assert table[["turn", "phase", "step", "layer"]].drop_duplicates().to_numpy().tolist() == [
        [1, "decode", 2, 1]
    ]
    assert part.tokens == [(1, 2, 9, " 太")]
    assert len(both.select(phase="decode").select(layers=[1]).select(domain="code").table) == 4
    assert both.select(turns=[0], domain="code").table.empty
    assert both.select(layers=[]).table.empty


def test_a_slice_that_cannot_be_is_refused(trace: RouteTrace) -> None:
    with pytest.raises(OptionError, match=r"no phase 'decoding'; there are prefill and decode"):
        trace.select(phase="decoding")
    with pytest.raises(OptionError, match=r"domain 'law'; domains: prose"):
        trace.select(domain="law")
    with pytest.raises(OptionError, match="set `domains`"):
        RouteTrace().select(domain="law")


def test_an_empty_trace_joins_and_slices_like_any(trace: RouteTrace) -> None:
    empty = RouteTrace()
    assert RouteTrace.concat([empty, empty]).table.empty
    both = RouteTrace.concat([empty, trace, empty, trace])
    pd.testing.assert_frame_equal(both.table, RouteTrace.concat([trace, trace]).table)
    assert both.entry_bytes == trace.entry_bytes
    assert both.domains == {0: "prose", 1: "prose"}
    part = empty.select(phase="prefill", layers=[0], turns=[0])
    assert part.table.empty
    assert list(part.table.columns) == list(COLUMNS)


def bare(path: Path, pairs: list[tuple[int, int]]) -> RouteTrace:
    path.write_text("layer,expert\n" + "".join(f"{a},{b}\n" for a, b in pairs))
    return RouteTrace.open(path)


def test_bare_choices_of_one_model_join_though_their_largest_ids_differ(
    trace: RouteTrace, tmp_path: Path
) -> None:
    short = bare(tmp_path / "a.csv", [(0, 1), (1, 2), (0, 0), (1, 1)])
    wide = bare(tmp_path / "b.csv", [(0, 9), (1, 2), (2, 3)])
    both = RouteTrace.concat([short, wide])
    assert (both.n_layers, both.n_expert, both.n_expert_used) == (3, 10, 1)
    assert both.table[["turn", "layer", "expert"]].to_numpy().tolist() == [
        [0, 0, 1], [0, 1, 2], [0, 0, 0], [0, 1, 1], [1, 0, 9], [1, 1, 2], [1, 2, 3],
    ]  # fmt: skip
    # Beside a trace that knows its model, they take its facts, if they fit.
    known = RouteTrace.concat([short, trace])
    assert (known.n_layers, known.n_expert, known.entry_bytes) == (3, 16, trace.entry_bytes)
    with pytest.raises(TraceError, match="different models"):
        RouteTrace.concat([trace, bare(tmp_path / "c.csv", [(0, 16)])])
