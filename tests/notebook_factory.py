"""Tiny notebooks for the tests of headless runs."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

KERNELSPEC = {"name": "python3", "display_name": "Python 3", "language": "python"}


def write_notebook(path: Path, *cells: str, parameters: str | None = None) -> Path:
    """Write a notebook of code cells; `parameters` is the source of the tagged cell, put first."""
    notebook = new_notebook(metadata={"kernelspec": KERNELSPEC})
    notebook.cells.append(new_markdown_cell("# A notebook"))
    if parameters is not None:
        tagged = new_code_cell(parameters)
        tagged.metadata.tags = ["parameters"]
        notebook.cells.append(tagged)
    notebook.cells += [new_code_cell(source) for source in cells]
    nbformat.write(notebook, path)
    return path


def outputs(executed: Path) -> list[str]:
    """Streamed text of each code cell of an executed notebook, injected cells left out."""
    texts = []
    for cell in nbformat.read(executed, as_version=4).cells:
        if cell.cell_type == "code" and "injected-parameters" not in cell.metadata.tags:
            texts.append("".join(o.text for o in cell.outputs if o.output_type == "stream"))
    return texts


def statuses(executed: Path) -> list[str]:
    """papermill's status of each code cell, injected cells left out."""
    cells = nbformat.read(executed, as_version=4).cells
    return [
        cell.metadata.papermill.status
        for cell in cells
        if cell.cell_type == "code" and "injected-parameters" not in cell.metadata.tags
    ]
