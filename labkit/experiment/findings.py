"""What a notebook found: one sentence and its tables, where the tour's index page reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

FINDING_FILE = "finding.json"


@dataclass(frozen=True)
class Finding:
    """A notebook's title, what it found in a sentence or two, and the file names of its tables."""

    title: str
    finding: str
    tables: tuple[str, ...] = ()


def write_finding(
    out_dir: str | Path,
    title: str,
    finding: str,
    tables: Mapping[str, pd.DataFrame] | None = None,
) -> Path:
    """Write each table to `out_dir/<name>.csv` and the finding to `out_dir/finding.json`.

    The index of a table is left out: what matters is in its columns. Returns `out_dir`.
    """
    directory = Path(out_dir)
    directory.mkdir(parents=True, exist_ok=True)
    names = []
    for name, table in (tables or {}).items():
        table.to_csv(directory / f"{name}.csv", index=False)
        names.append(f"{name}.csv")
    text = json.dumps(
        {"title": title, "finding": finding, "tables": names}, indent=2, ensure_ascii=False
    )
    (directory / FINDING_FILE).write_text(text + "\n", encoding="utf-8")
    return directory


def read_finding(out_dir: str | Path) -> Finding | None:
    """The finding in `out_dir`, or None when the notebook wrote none."""
    path = Path(out_dir) / FINDING_FILE
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    return Finding(content["title"], content["finding"], tuple(content.get("tables", ())))
