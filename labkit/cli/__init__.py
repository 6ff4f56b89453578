"""The `labkit` command.

Every command is a module of this package that defines `command`, a function with typer's
annotations. A command imports what it needs inside the function, so that `labkit --help` loads
neither llama.cpp nor pandas. Results go to stdout (plain JSON with `--json`), everything else to
stderr. Exit codes: 0 done, 1 labkit says why it cannot, 2 wrong use, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Annotated

import typer

from labkit import __version__
from labkit.errors import LabkitError

app = typer.Typer(
    name="labkit",
    help="A lab for Mixture-of-Experts inference: stream the experts of a GGUF model and watch "
    "which ones each token chooses.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

#: Commands in the order in which `labkit --help` shows them.
COMMANDS = (
    "tour",
    "run",
    "inspect",
    "sheet",
    "generate",
    "trace",
    "replay",
    "bench",
    "prefill",
    "htp",
    "device",
    "plan",
    "synth",
    "doctor",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"labkit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show labkit's and llama.cpp's log on stderr.")
    ] = False,
) -> None:
    if verbose:
        import logging

        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
        )


for _name in COMMANDS:
    _module = importlib.import_module(f"{__name__}.{_name}")
    app.command(_name, cls=getattr(_module, "PairedOptions", None))(_module.command)


def main() -> None:
    """Entry point of the `labkit` command; turns a `LabkitError` into one message, exit code 1."""
    warnings.showwarning = _show_warning
    try:
        app()
    except LabkitError as error:
        typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
        typer.echo(str(error), err=True)
        sys.exit(1)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as a remark for people, without the line of code that it came from."""
    typer.secho("note: ", fg="yellow", bold=True, nl=False, err=True)
    typer.echo(str(message), err=True)
