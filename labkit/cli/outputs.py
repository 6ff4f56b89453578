"""Where a command writes, checked while its options are read: before anything is computed."""

from __future__ import annotations

import os
from pathlib import Path

import typer


def file_to_write(path: Path | None) -> Path | None:
    """Callback of an option that names a file in a folder that is there."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return file_to_make(path)


def file_to_make(path: Path | None) -> Path | None:
    """Callback of an option that names a file whose folder is made if it is missing."""
    if path is None:
        return None
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder: name the file to write in it")
    if not path.exists():
        directory_to_write(path.parent)
    elif not os.access(path, os.W_OK):
        raise typer.BadParameter(f"{path} is there already and must not be written")
    return path


def directory_to_write(path: Path | None) -> Path | None:
    """Callback of an option that names a folder, which is made if it is missing."""
    if path is None:
        return None
    there = next(part for part in (path, *path.absolute().parents) if part.exists())
    if not there.is_dir():
        raise typer.BadParameter(f"{there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"nothing may be written in {there}")
    return path
