"""What the commands share: JSON on stdout, and a console for people on either stream."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@cache
def stdout() -> Console:
    """A rich console for results meant for people."""
    from rich.console import Console

    return Console(highlight=False)


@cache
def stderr() -> Console:
    """A rich console for progress and remarks, which must not mix with results."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def emit_json(value: Any) -> None:
    """Write `value` as one JSON document to stdout; numpy scalars and paths are converted.

    Raises `ValueError` for NaN and infinity, which are not JSON: give None for "not measured".
    """
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)
    sys.stdout.write("\n")


def dated_directory(prefix: str = "") -> Path:
    """`runs/<prefix><date and time>` in the current directory, not made yet."""
    return Path("runs") / f"{prefix}{datetime.now():%Y-%m-%d_%H%M%S}"


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return value.tolist()
    if hasattr(value, "__fspath__"):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
