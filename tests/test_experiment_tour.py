"""The tour and its pages: figures without a script, findings, failures that stop nothing."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from notebook_factory import write_notebook
from PIL import Image

from labkit.errors import NotebookError
from labkit.experiment import read_finding, tour, write_finding
from labkit.experiment.notebooks import NOTEBOOKS_DIR, find_notebook
from labkit.experiment.report import Entry, export_html, write_index, write_thumbnail

FINDS = """
import pandas as pd
from labkit.experiment import write_finding
tables = {"sizes": pd.DataFrame({"a": [1]})}
write_finding(out_dir, "Sizes & shapes", f"The model is {model!r}.", tables)
"""


def _png(colour: str = "red") -> bytes:
    target = io.BytesIO()
    Image.new("RGB", (900, 30), colour).save(target, "png")
    return target.getvalue()


def _shows(data: dict[str, object], *tags: str) -> nbformat.NotebookNode:
    cell = new_code_cell("show()", outputs=[new_output("display_data", data=data)])
    cell.metadata.tags = list(tags)
    return cell


def test_findings_and_their_tables_are_written_and_read_back(tmp_path):
    table = pd.DataFrame({"layer": [0, 1], "read_mib": [1.5, 2.0]})
    write_finding(tmp_path / "new", "A title", "What was found: 2 µs.", {"reads": table})
    finding = read_finding(tmp_path / "new")
    assert finding is not None
    assert (finding.title, finding.finding) == ("A title", "What was found: 2 µs.")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "new" / finding.tables[0]), table)
    assert read_finding(tmp_path) is None


def test_charts_and_widgets_are_pictures_on_a_page_without_scripts(tmp_path):
    png = base64.b64encode(_png()).decode()
    view = {"model_id": "abc", "version_major": 2, "version_minor": 0}
    notebook = new_notebook(
        cells=[
            _shows({"application/vnd.vegalite.v5+json": {"mark": "bar"}, "image/png": png}),
            _shows({"application/vnd.jupyter.widget-view+json": view, "image/png": png}),
        ],
        metadata={"widgets": {"application/vnd.jupyter.widget-state+json": {"state": {}}}},
    )
    executed = tmp_path / "a.ipynb"
    nbformat.write(notebook, executed)
    page = export_html(executed, "A <title>", back="../index.html").read_text()
    assert page.count(f"data:image/png;base64,{png}") == 2
    assert "<script" not in page
    assert not re.search(r"""(src|href)=["']https?:""", page)
    assert "A &lt;title&gt;" in page


def test_thumbnail_is_the_tagged_picture_or_the_first(tmp_path):
    red, blue = (base64.b64encode(_png(c)).decode() for c in ("red", "blue"))
    notebook = new_notebook(cells=[_shows({"image/png": red}), _shows({"image/png": blue})])
    nbformat.write(notebook, tmp_path / "a.ipynb")
    assert write_thumbnail(tmp_path / "a.ipynb", tmp_path / "t.png")
    with Image.open(tmp_path / "t.png") as image:
        assert image.width == 640
        assert image.convert("RGB").getpixel((5, 5)) == (255, 0, 0)
    notebook.cells[1].metadata.tags = ["thumbnail"]
    nbformat.write(notebook, tmp_path / "a.ipynb")
    write_thumbnail(tmp_path / "a.ipynb", tmp_path / "t.png")
    with Image.open(tmp_path / "t.png") as image:
        assert image.convert("RGB").getpixel((5, 5)) == (0, 0, 255)
    nbformat.write(new_notebook(), tmp_path / "a.ipynb")
    assert not write_thumbnail(tmp_path / "a.ipynb", tmp_path / "t.png")


class _Recorder:
    def __init__(self) -> None:
        self.cells: list[tuple[int, int]] = []
        self.ended: list[Entry] = []

    def notebook_started(self, name: str) -> None:
        self.cells.clear()

    def cell_started(self, index: int, total: int) -> None:
        self.cells.append((index, total))

    def notebook_ended(self, entry: Entry) -> None:
        self.ended.append(entry)


def test_tour_goes_on_after_a_failure_and_says_so_on_its_index(tmp_path):
    notebooks = [
        write_notebook(tmp_path / "01_bad.ipynb", "1 / 0"),
        write_notebook(tmp_path / "02_good.ipynb", FINDS, parameters="out_dir = ''\nmodel = ''"),
    ]
    stale = tmp_path / "out" / "01_bad"
    write_finding(stale, "Old", "Stale.")
    recorder = _Recorder()
    model = tmp_path / "my.gguf"
    result = tour(tmp_path / "out", notebooks=notebooks, model=model, progress=recorder)

    assert [entry.name for entry in result.failed] == ["01_bad"]
    assert recorder.ended == list(result.entries)
    assert recorder.cells == [(0, 4), (1, 4), (2, 4), (3, 4)]
    index = result.index.read_text()
    assert "1 of 2 notebooks failed" in index
    assert "ZeroDivisionError" in index
    assert "Stale" not in index
    assert "Sizes &amp; shapes" in index
    assert "The model is &#x27;" + str(model) in index
    links = re.findall(r'href="([^"]+)"', index)
    assert "02_good/sizes.csv" in links
    assert all((result.directory / link).is_file() for link in links)
    assert (result.directory / "01_bad" / "01_bad.html").is_file()


def test_index_names_a_notebook_that_found_nothing(tmp_path):
    page = write_index(tmp_path, [Entry("03_x", 1.0)], ["a fact & more"]).read_text()
    assert "wrote no finding" in page
    assert "a fact &amp; more" in page


def test_notebooks_are_found_by_number_name_and_path(tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.experiment.notebooks.NOTEBOOKS_DIR", tmp_path)
    with pytest.raises(NotebookError, match="installed without them"):
        find_notebook("2")
    path = write_notebook(tmp_path / "02_live_routing.ipynb", "1")
    for name in ("2", "02", "02_live_routing", "live_routing", "02_live_routing.ipynb", str(path)):
        assert find_notebook(name) == path
    with pytest.raises(NotebookError, match="It has: 02_live_routing"):
        find_notebook("9")
    with pytest.raises(NotebookError, match="no notebook at"):
        find_notebook("x/9.ipynb")


@pytest.mark.parametrize("path", sorted(NOTEBOOKS_DIR.glob("*.ipynb")), ids=lambda p: p.stem)
def test_own_notebooks_are_committed_clean(path: Path):
    content = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    tagged = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1
    for cell in code:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
        assert len("".join(cell["source"]).splitlines()) <= 25
