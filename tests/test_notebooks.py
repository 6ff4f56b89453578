"""Every notebook of the lab, run headlessly with its defaults: what a tour's reader gets."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from labkit.experiment import NotebookRun, read_finding, run_notebook
from labkit.experiment.notebooks import lab_notebooks
from labkit.experiment.report import export_html


@pytest.fixture(scope="module", params=lab_notebooks(), ids=lambda path: path.stem)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NotebookRun:
    path: Path = request.param
    return run_notebook(path, tmp_path_factory.mktemp(path.stem) / path.name)


def test_it_says_what_it_found_and_leaves_its_tables(run: NotebookRun):
    finding = read_finding(run.executed.parent)
    assert finding is not None
    assert finding.title
    assert finding.finding.endswith(".")
    assert finding.tables
    for name in finding.tables:
        assert len(pd.read_csv(run.executed.parent / name))


@pytest.mark.parametrize("path", lab_notebooks(), ids=lambda path: path.stem)
def test_cells_are_short_for_logic_lives_in_labkit(path: Path):
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
        if cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= 25, f"cell {number}"
            assert not cell.outputs


def test_it_is_small_and_its_figures_show_on_a_page_without_scripts(run: NotebookRun):
    assert run.executed.stat().st_size < 2**20
    outputs = [
        output
        for cell in nbformat.read(run.executed, as_version=4).cells
        for output in cell.get("outputs", [])
    ]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert figures
    page = export_html(run.executed, run.notebook.stem).read_text(encoding="utf-8")
    assert page.count('src="data:image/png;base64,') == len(figures)
    assert "<script" not in page


@pytest.mark.skipif(sys.platform != "linux", reason="the system keeps no peak of memory")
def test_it_fits_into_binders_memory(run: NotebookRun):
    assert run.peak_rss_mib is not None
    assert run.peak_rss_mib < 700  # of 1,024, with JupyterLab's server beside the kernel
