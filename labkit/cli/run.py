"""`labkit run`: one notebook, headlessly, with parameters of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from labkit.cli.outputs import directory_to_write


class PairedOptions(TyperCommand):
    """Takes papermill's form `-p NAME VALUE`, which typer has no type for, as `-p NAME=VALUE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, joined_pairs(args))


def joined_pairs(args: list[str]) -> list[str]:
    """`["-p", "seed", "1"]` as `["-p", "seed=1"]`; a pair that is joined already stays."""
    joined: list[str] = []
    rest = iter(args)
    for word in rest:
        joined.append(word)
        if word in ("-p", "--parameter"):
            name = next(rest, None)
            if name is None:
                break
            value = None if "=" in name else next(rest, None)
            joined.append(name if value is None else f"{name}={value}")
    return joined


def command(
    notebook: Annotated[
        str, typer.Argument(help="A notebook of the lab (02_live_routing, or 2) or a path.")
    ],
    parameter: Annotated[
        list[str] | None,
        typer.Option("-p", "--parameter", metavar="NAME VALUE", help="Set one; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            callback=directory_to_write,
            help="Directory for results (default: runs/<name>_<time>).",
        ),
    ] = None,
    list_parameters: Annotated[
        bool, typer.Option("--list", help="Show the notebook's parameters and run nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run one notebook headlessly and write the executed notebook, its page and its tables."""
    from labkit.cli.console import dated_directory, emit_json, stderr, stdout
    from labkit.experiment.notebooks import find_notebook, parameters_of, read_notebook

    path = find_notebook(notebook)
    declared = parameters_of(read_notebook(path), path.name)
    if list_parameters:
        if as_json:
            emit_json({name: {"default": p.default} for name, p in declared.items()})
        for name, known in {} if as_json else declared.items():
            stdout().print(f"{name} = {known.default!r}  ({known.describe()})", markup=False)
        return

    given = _given(parameter or [], declared, path.name)

    from labkit.cli.progress import NotebookProgress
    from labkit.experiment.findings import read_finding
    from labkit.experiment.report import export_html
    from labkit.experiment.run import run_notebook

    directory = out or dated_directory(f"{path.stem}_")
    executed = directory.resolve() / path.name
    with NotebookProgress(stderr()) as progress:
        progress.notebook_started(path.stem)
        try:
            run = run_notebook(path, executed, given, on_cell=progress.cell_started)
        except KeyboardInterrupt:
            stderr().print(f"Stopped. What was finished is in {directory}", markup=False)
            raise typer.Exit(130) from None
        finally:  # a run that failed has a page too: it shows where
            if executed.is_file():
                export_html(executed, path.stem)
    finding = read_finding(run.parameters.get("out_dir", directory))
    if as_json:
        emit_json(
            {
                "notebook": executed,
                "page": executed.with_suffix(".html"),
                "parameters": run.parameters,
                "wall_s": round(run.wall_s, 3),
                "peak_rss_mib": run.peak_rss_mib,
                "finding": finding.finding if finding else None,
            }
        )
        return
    if finding:
        stdout().print(f"{finding.title}: {finding.finding}", markup=False)
    where = f"{run.wall_s:.1f} s. Results are in {executed.parent}"
    stdout().print(where, soft_wrap=True, markup=False)


def _given(pairs: list[str], declared: Any, notebook: str) -> dict[str, Any]:
    from labkit.experiment.parameters import checked, from_text

    given: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"{name!r} has no value: write -p NAME VALUE", param_hint="-p")
        given[name] = from_text(name, text, declared, notebook)
    for name, value in given.items():
        # The kernel runs in the notebook's directory, but a path is meant from where one types it.
        if isinstance(value, str) and value and _names_a_path(name):
            given[name] = str(Path(value).resolve())
    return checked(given, declared, notebook)


def _names_a_path(parameter: str) -> bool:
    return parameter == "model" or parameter.endswith(("_path", "_file", "_dir"))
