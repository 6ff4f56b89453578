"""JSON files that people write and hand to labkit: read with a bound, refused in plain words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.errors import LabkitError


def read_json(path: Path, *, what: str, most_bytes: int, error: type[LabkitError]) -> Any:
    """The value in a JSON file of at most `most_bytes`.

    Raises:
        error: it cannot be read, is larger, or is not JSON; the message says that it is no `what`.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(most_bytes + 1)
    except OSError as failure:
        raise error(f"{path}: the {what} cannot be read: {failure.strerror}.") from failure
    if len(raw) > most_bytes:
        raise error(f"{path}: over {most_bytes >> 20} MiB; this is no {what}.")
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as failure:
        raise error(f"{path}: not JSON ({failure}), so no {what}.") from failure
