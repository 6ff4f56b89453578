"""`labkit tour`: every notebook of the lab, headlessly, into one directory with an index page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.outputs import directory_to_write


def command(
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", help="A GGUF file to use in place of the bundled model."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            callback=directory_to_write,
            help="Directory for results (default: runs/<date and time>).",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Run all notebooks on the bundled model and write pages, tables and an index."""
    from labkit.cli.console import dated_directory, emit_json, stderr, stdout
    from labkit.cli.progress import NotebookProgress
    from labkit.experiment.guided_tour import tour

    if model is not None and not model.exists():
        raise typer.BadParameter(f"there is no file {model}", param_hint="--model")
    directory = out or dated_directory()
    try:
        with NotebookProgress(stderr()) as progress:
            result = tour(directory, model=model, progress=progress)
    except KeyboardInterrupt:
        stderr().print(f"Stopped. What was finished is in {directory}", markup=False)
        raise typer.Exit(130) from None
    if as_json:
        emit_json(
            {
                "directory": result.directory,
                "index": result.index,
                "wall_s": round(result.wall_s, 3),
                "notebooks": [
                    {
                        "name": entry.name,
                        "wall_s": round(entry.wall_s, 3),
                        "peak_rss_mib": entry.peak_rss_mib,
                        "finding": entry.finding.finding if entry.finding else None,
                        "error": entry.error,
                    }
                    for entry in result.entries
                ],
            }
        )
    else:
        failed = f", {len(result.failed)} failed" if result.failed else ""
        stdout().print(f"{len(result.entries)} notebooks in {result.wall_s:.0f} s{failed}.")
        stdout().print(f"Open {result.index}", soft_wrap=True, markup=False)
    if result.failed:
        raise typer.Exit(1)
