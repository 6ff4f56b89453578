"""Charts and tables of a model file, and the notebook that shows them."""

from __future__ import annotations

import ast
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from gguf_bytes import tiny_moe, write_split

from labkit.charts import file_map as draw
from labkit.charts import png
from labkit.errors import NotMoEError
from labkit.experiment import read_finding, run_notebook
from labkit.gguf_map import open_gguf
from labkit.gguf_map.layout_tables import (
    expert_table,
    layer_layout_table,
    nearest_expert,
    over_read_table,
)

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "01_gguf_offsets.ipynb"


@pytest.fixture
def gguf(tmp_path):
    doc = tiny_moe(n_layers=4)
    return open_gguf(write_split(doc, [9, len(doc.tensors) - 9], tmp_path, "m")[0])


def words(chart: Any) -> str:
    text = chart.to_dict()["title"]["text"]
    return " ".join([text] if isinstance(text, str) else text).replace("\xa0", " ")


def rows(chart: Any) -> list[dict]:
    """All data rows of a chart that carries them as objects."""
    return [row for values in chart.to_dict()["datasets"].values() for row in values]


def test_the_map_marks_the_slices_at_their_offsets(gguf):
    chart = draw.file_map(gguf, 2, 5)
    share = 100 * gguf.expert_bytes / gguf.nbytes
    assert words(chart) == (
        f"{share:.0f} % of the weights are routed experts; expert 5 of layer 2 lies in 3 pieces"
    )
    marks = [row for row in rows(chart) if "offset" in row]
    assert {(m["file"], m["offset"]) for m in marks} == {
        (f"file {s.shard + 1}", s.offset) for s in gguf.expert(2, 5)
    }
    drawn = {row["name"] for row in rows(chart) if "name" in row}
    assert drawn >= {t.name for t in gguf.tensors}
    assert png(chart.to_dict(), scale=1).startswith(b"\x89PNG")


def test_direct_reads_are_drawn_to_the_byte(gguf):
    chart = draw.direct_read_ends(gguf, 2, 5, 4096)
    table = expert_table(gguf, 2, 5, 4096)
    wasted = sum(
        row["end_bytes"] - row["start_bytes"]
        for row in rows(chart)
        if row["bytes"] == "read, not needed"
    )
    assert wasted == table["over_read_bytes"].sum()
    assert draw.in_words(wasted) in words(chart)


def test_over_read_by_size_takes_slices_beyond_16_mib(gguf):
    table = over_read_table(gguf, 4096)
    assert (table["direct_bytes"] - table["size_bytes"]).tolist() == pytest.approx(
        table["over_read_bytes"].tolist()
    )
    assert table["n_slices"].sum() == len(gguf.slices_table())
    chart = draw.over_read_by_size(gguf, 4096)
    assert "at 1 MiB it would be 0.39 %" in words(chart)


def test_token_against_model_adds_up(gguf):
    bars = rows(draw.token_against_model(gguf))
    whole = sum(row["bytes"] for row in bars if row["what"] == "whole model")
    token = sum(row["bytes"] for row in bars if row["what"] == "one token")
    assert whole == gguf.nbytes
    assert token == gguf.dense_bytes + gguf.token_cycle_bytes
    assert words(draw.token_against_model(gguf)).endswith("25 % of its routed experts")


def test_layer_layout_leaves_no_gap(gguf):
    table = layer_layout_table(gguf)
    for _, layer in table.groupby("layer"):
        ends = layer["layer_end_bytes"].tolist()
        assert layer["layer_start_bytes"].tolist() == [0, *ends[:-1]]
        assert ends[-1] == layer["size_bytes"].sum()


@pytest.mark.parametrize(
    ("asked", "given"),
    [((2, 5), (2, 5)), ((0, 5), (1, 5)), ((99, 99), (3, 7)), ((1, -4), (1, 0))],
)
def test_the_nearest_expert_is_taken(gguf, asked, given):
    assert nearest_expert(gguf, *asked) == given


def test_a_dense_model_has_no_nearest_expert(tmp_path):
    dense = tiny_moe(dense_layers=3).write(tmp_path / "m.gguf")
    with pytest.raises(NotMoEError):
        nearest_expert(open_gguf(dense, inspect_only=True), 0, 0)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (2047, "2,047 bytes"), (8704, "8.5 KiB"), (63.4e9, "59 GiB")],
)
def test_bytes_in_words(nbytes, text):
    assert draw.in_words(nbytes) == text


# --- the notebook --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def executed(synth_model: Callable[..., Path], tmp_path_factory) -> Path:
    """The notebook, run on a model of another shape, its exercises answered from the tables."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    answers = iter(
        [
            'int(table.set_index("name").loc[f"blk.{last}.ffn_down_exps.weight", "offset_bytes"])'
            ' + 2 * entry["size_bytes"].iloc[-1]',
            "-(-(gguf.expert(last, 2)[-1].offset + gguf.expert(last, 2)[-1].nbytes) // 4096) * 4096"
            " - gguf.expert(last, 2)[-1].offset // 4096 * 4096",
            "2 * 2 * sum(gguf.entry_bytes(il) for il in gguf.moe_layers)",
            "8 / 2",
        ]
    )
    for cell in notebook.cells:
        if cell.source.startswith("answer = None"):
            cell.source = cell.source.replace("None", next(answers), 1)
    assert next(answers, None) is None
    source = folder / "01_gguf_offsets.ipynb"
    nbformat.write(notebook, source)
    model = synth_model("qwen3moe", shards=3)
    run_notebook(source, folder / "out.ipynb", {"model": str(model), "out_dir": str(folder)})
    return folder / "out.ipynb"


def test_the_notebook_runs_on_any_model(executed: Path):
    finding = read_finding(executed.parent)
    assert finding is not None
    assert "slices" in finding.finding
    for name in ("tensors", "expert", "over_read", "roles"):
        assert (executed.parent / f"{name}.csv").stat().st_size > 0
    outputs = [o for c in json.loads(executed.read_text())["cells"] for o in c.get("outputs", [])]
    pictures = [o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 4
    assert all(base64.b64decode("".join(p)).startswith(b"\x89PNG") for p in pictures)
    text = ["".join(o["data"].get("text/plain", "")) for o in outputs if "data" in o]
    assert sum("the same" in t and "NOT" not in t for t in text) == 1
    assert sum(t.startswith("✓ Right") for t in text) == 4


def test_the_notebook_as_it_is_kept():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [c for c in cells if c["cell_type"] == "code"]
    assert code[0]["metadata"]["tags"] == ["parameters"]
    for cell in code:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
        assert len(cell["source"]) <= 25
        ast.parse("".join(cell["source"]))
