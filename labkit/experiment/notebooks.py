"""Finding the lab's notebooks and reading what a notebook declares."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat

from labkit.errors import NotebookError
from labkit.experiment.parameters import Parameter, declared_parameters

#: The lab's notebooks, beside the package in a clone.
NOTEBOOKS_DIR = Path(__file__).resolve().parent.parent.parent / "notebooks"


def lab_notebooks() -> list[Path]:
    """The lab's own notebooks in the order of the tour.

    Raises `NotebookError` when there are none, as in a copy installed from a wheel.
    """
    found = sorted(NOTEBOOKS_DIR.glob("[0-9][0-9]_*.ipynb"))
    if not found:
        raise NotebookError(
            f"there are no notebooks in {NOTEBOOKS_DIR}: this labkit was installed without them. "
            'Clone the repository and run `pip install -e ".[test]"` in it.'
        )
    return found


def find_notebook(name: str | Path) -> Path:
    """A notebook by path, by name (`02_live_routing`, `live_routing`) or by number (`2`, `02`).

    Raises `NotebookError` when there is none of that name.
    """
    path = Path(name)
    if path.suffix == ".ipynb":
        if path.is_file():
            return path.resolve()
        beside = NOTEBOOKS_DIR / path.name
        if path.parent == Path() and beside.is_file():
            return beside
        raise NotebookError(f"there is no notebook at {path}.")
    known = lab_notebooks()
    for notebook in known:
        number, _, title = notebook.stem.partition("_")
        if name in (notebook.stem, title, number) or (
            str(name).isdecimal() and int(str(name)) == int(number)
        ):
            return notebook
    raise NotebookError(
        f"the lab has no notebook {str(name)!r}. It has: {', '.join(p.stem for p in known)}. "
        "Another notebook is named by its path, ending in .ipynb."
    )


def read_notebook(path: Path) -> nbformat.NotebookNode:
    """A notebook in the current format, or `NotebookError` saying why it cannot be read."""
    what = f"{path} is not a Jupyter notebook"
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except OSError as error:
        raise NotebookError(f"cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise NotebookError(f"{what}: its bytes are no text.") from error
    except (ValueError, RecursionError) as error:
        if not text.strip():
            raise NotebookError(f"{path} is empty: no notebook was saved in it.") from error
        raise NotebookError(
            f"{what}, or it was cut off or damaged: its text is not JSON ({error})."
        ) from error
    if not isinstance(content, dict) or "nbformat" not in content:
        raise NotebookError(f"{what}: it is JSON, but it does not say `nbformat`.")
    try:
        return nbformat.reads(text, as_version=4)
    except Exception as error:  # nbformat raises many kinds: validation, version, a missing key
        raise NotebookError(f"{what}, or a damaged one: {error}") from error


def parameters_of(notebook: nbformat.NotebookNode, name: str) -> dict[str, Parameter]:
    """Parameters of the first cell tagged `parameters`; empty when no cell has the tag."""
    for cell in notebook.cells:
        if cell.cell_type == "code" and "parameters" in cell.metadata.get("tags", []):
            return declared_parameters(cell.source, name)
    return {}


def strip_outputs(path: Path) -> bool:
    """Remove outputs and run counts from a notebook in place; tags and text stay.

    Returns whether the file changed. Notebooks are committed in this state.
    """
    before = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(before, as_version=4)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        cell.metadata.pop("papermill", None)
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
    notebook.metadata.pop("widgets", None)
    notebook.metadata.pop("papermill", None)
    after = nbformat.writes(notebook) + "\n"
    if after != before:
        path.write_text(after, encoding="utf-8")
    return after != before
