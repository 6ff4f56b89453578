"""`labkit doctor`: what this machine has, a plain verdict per line, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_STYLE = {"ok": "green", "note": "yellow", "problem": "bold red"}


def command(
    model: Annotated[
        Path | None, typer.Argument(help="A GGUF model to look at (default: the bundled one).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check this machine: versions, llama.cpp, direct I/O, memory, Jupyter; say what to do."""
    from dataclasses import asdict

    from labkit.cli.console import emit_json, stdout
    from labkit.doctor import examine

    checks = examine(model)
    problems = sum(check.verdict == "problem" for check in checks)
    if as_json:
        emit_json({"ok": problems == 0, "checks": [asdict(check) for check in checks]})
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for _ in range(3):
            table.add_column(overflow="fold")  # a path is shown whole
        for check in checks:
            text = check.found + (f"\n→ {check.advice}" if check.advice else "")
            verdict = Text(check.verdict, style=_STYLE[check.verdict])
            table.add_row(verdict, Text(check.name), Text(text))
        stdout().print(table)
        stdout().print(
            f"{problems} problem(s)." if problems else "No problems: `labkit tour` should work."
        )
    if problems:
        raise typer.Exit(1)
