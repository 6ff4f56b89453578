"""The tour: every notebook of the lab, headlessly and in order, into one directory."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import psutil

from labkit import __version__
from labkit.errors import LabkitError
from labkit.experiment.findings import FINDING_FILE, read_finding
from labkit.experiment.notebooks import lab_notebooks, parameters_of, read_notebook
from labkit.experiment.report import Entry, export_html, write_index, write_thumbnail
from labkit.experiment.run import run_notebook

_CELL_TIMEOUT_S = 600  # a notebook is meant to take under a minute; this only ends a hang


class Progress(Protocol):
    """What a tour reports while it goes; all calls come from the thread that runs the tour."""

    def notebook_started(self, name: str) -> None: ...
    def cell_started(self, index: int, total: int) -> None: ...
    def notebook_ended(self, entry: Entry) -> None: ...


@dataclass(frozen=True)
class TourResult:
    """Where a tour's results lie and how each notebook went, in order."""

    directory: Path
    index: Path
    entries: tuple[Entry, ...]
    wall_s: float

    @property
    def failed(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.error is not None)


def tour(
    out_dir: str | Path,
    *,
    notebooks: Sequence[Path] | None = None,
    model: str | Path | None = None,
    progress: Progress | None = None,
) -> TourResult:
    """Run the lab's notebooks in order and write notebooks, pages, tables and an index.

    Each notebook has a directory of its name in `out_dir`. `model` replaces the bundled model
    where a notebook has that parameter. A notebook that fails does not stop the others: look at
    `TourResult.failed`. The index page is rewritten after each notebook, so a tour that is
    stopped leaves a right one.
    """
    notebooks = lab_notebooks() if notebooks is None else notebooks
    started = datetime.now().astimezone()
    clock = time.monotonic()
    directory = Path(out_dir).resolve()
    directory.mkdir(parents=True, exist_ok=True)

    entries: list[Entry] = []
    index = directory / "index.html"
    for notebook in notebooks:
        if progress:
            progress.notebook_started(notebook.stem)
        entry = _visit(notebook, directory / notebook.stem, model, progress)
        entries.append(entry)
        facts = _facts(started, time.monotonic() - clock, model)
        index = write_index(directory, entries, facts)
        if progress:
            progress.notebook_ended(entry)
    return TourResult(directory, index, tuple(entries), time.monotonic() - clock)


def _visit(
    notebook: Path, directory: Path, model: str | Path | None, progress: Progress | None
) -> Entry:
    executed = directory / notebook.name
    (directory / FINDING_FILE).unlink(missing_ok=True)  # an earlier tour's is not this one's
    on_cell: Callable[[int, int], None] | None = progress.cell_started if progress else None
    clock = time.monotonic()
    error: str | None = None
    peak: float | None = None
    try:
        parameters = _parameters(notebook, model)
        run = run_notebook(
            notebook, executed, parameters, on_cell=on_cell, cell_timeout_s=_CELL_TIMEOUT_S
        )
        peak = run.peak_rss_mib
    except LabkitError as reason:
        error = str(reason)
    files: list[str] = []
    if executed.is_file():
        page = export_html(executed, notebook.stem, back="../index.html")
        write_thumbnail(executed, directory / "thumbnail.png")
        tables = sorted(p.name for p in directory.iterdir() if p.suffix in (".csv", ".parquet"))
        files = [page.name, executed.name, *tables]
    finding = read_finding(directory)
    return Entry(notebook.stem, time.monotonic() - clock, finding, error, peak, files)


def _parameters(notebook: Path, model: str | Path | None) -> dict[str, Any]:
    if model is None:
        return {}
    declared = parameters_of(read_notebook(notebook), notebook.name)
    return {"model": str(Path(model).resolve())} if "model" in declared else {}


def _facts(started: datetime, wall_s: float, model: str | Path | None) -> list[str]:
    try:
        bindings = version("llama-cpp-python")
    except PackageNotFoundError:
        bindings = "not installed"
    memory_gib = psutil.virtual_memory().total / 2**30
    return [
        f"{started:%Y-%m-%d %H:%M %Z}, {wall_s:.0f} s for all. labkit {__version__}, "
        f"llama-cpp-python {bindings}, Python {platform.python_version()}.",
        f"{platform.system()} on {platform.machine()}, {os.cpu_count()} cores, "
        f"{memory_gib:.0f} GiB of memory. Model: {Path(model).name if model else 'bundled'}.",
    ]
