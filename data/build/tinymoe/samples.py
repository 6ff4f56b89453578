"""Writes a sample of the held-out texts, so that the routing figures can be recomputed."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

from . import corpus

SHARED = {
    "english": ["Ge33", "Isa40", "Mat6", "Psa65", "Prv16", "Ge14"],
    "python": ["getpass.py", "importlib/resources/readers.py", "tkinter/commondialog.py"],
}
POEMS = 120
SHEETS = 10


def write(work: Path, folder: Path) -> None:
    """Writes ``<domain>.json``, each a list of {"work", "text"}, and the licence of the code."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain, works in corpus.held_out(work).items():
        if domain in SHARED:
            names = SHARED[domain]
        else:
            names = sorted(works)[: POEMS if domain == "chinese" else SHEETS]
        sample = [{"work": name, "text": works[name]} for name in names]
        text = json.dumps(sample, ensure_ascii=False, indent=1)
        (folder / f"{domain}.json").write_text(text + "\n", encoding="utf-8")
    licence = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    (folder / "PSF-LICENSE.txt").write_text(licence.read_text())
