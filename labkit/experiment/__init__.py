"""Headless runs of notebooks: one at a time, or the whole tour.

`write_finding` is what notebooks use, so importing this package does not load papermill, which
takes a second; the names that need it are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.experiment.findings import Finding, read_finding, write_finding

if TYPE_CHECKING:
    from labkit.experiment.guided_tour import TourResult, tour
    from labkit.experiment.run import NotebookRun, run_notebook

__all__ = [
    "Finding",
    "NotebookRun",
    "TourResult",
    "read_finding",
    "run_notebook",
    "tour",
    "write_finding",
]


def __getattr__(name: str) -> Any:
    if name in ("NotebookRun", "run_notebook"):
        from labkit.experiment import run

        return getattr(run, name)
    if name in ("TourResult", "tour"):
        from labkit.experiment import guided_tour

        return getattr(guided_tour, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
