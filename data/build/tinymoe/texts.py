"""Gathers the texts: whole works per domain, from packages anybody can install."""

from __future__ import annotations

import collections
import json
import re
import shutil
import subprocess
import sysconfig
import tarfile
from pathlib import Path

POETRY_PACKAGE = "chinese-poetry@2.0.1"
SKIPPED_PYTHON = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages"}
SKIPPED_PYTHON |= {"__pycache__", "lib2to3", "idlelib", "turtledemo", "ensurepip"}
FREQUENT_CHARACTERS = 2500


def english() -> dict[str, str]:
    """Chapters of the King James Bible (Debian package ``bible-kjv``), one verse a line."""
    if shutil.which("bible") is None:
        raise SystemExit("the program 'bible' is missing: apt-get install bible-kjv")
    command = ["bible", "-f", "-l", "0", "gen1:1-rev22:21"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    chapters: dict[str, list[str]] = collections.defaultdict(list)
    for line in text.splitlines():
        if match := re.match(r"(\w+):\d+ (.*)", line):
            chapters[match[1]].append(match[2].strip())
    return {name: "\n".join(verses) + "\n" for name, verses in chapters.items()}


def python() -> dict[str, str]:
    """Files of the running Python's standard library that are plain ASCII source."""
    root = Path(sysconfig.get_paths()["stdlib"])
    works = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_PYTHON & set(name.parts) or path.stat().st_size > 200_000:
            continue
        text = path.read_bytes()
        if text.strip() and text.isascii():
            works[name.as_posix()] = text.decode("ascii").replace("\r\n", "\n")
    return works


def chinese(cache: Path) -> dict[str, str]:
    """Tang poems in regular verse (npm package ``chinese-poetry``), couplet by couplet.

    Only poems of two to eight even couplets of 5 or 7 characters a line whose characters all
    belong to the 2,500 most frequent ones: a small model then sees each of them often enough.
    """
    archive = cache / (POETRY_PACKAGE.replace("@", "-") + ".tgz")
    if not archive.exists():
        command = ["npm", "pack", "--silent", "--pack-destination", str(cache), POETRY_PACKAGE]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    poems: list[tuple[str, list[str]]] = []
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            if re.fullmatch(r"package/dist/quantangshi/poet\.tang\.\d+\.json", member.name):
                handle = tar.extractfile(member)
                assert handle is not None
                poems += [(p["id"], p["paragraphs"]) for p in json.load(handle)]
    poems.sort()
    counts = collections.Counter("".join("".join(lines) for _, lines in poems))
    frequent = {character for character, _ in counts.most_common(FREQUENT_CHARACTERS)}
    works = {}
    for name, lines in poems:
        regular = {len(line) for line in lines} in ({12}, {16}) and 2 <= len(lines) <= 8
        if regular and frequent.issuperset("".join(lines)):
            works[name] = "\n".join(lines) + "\n"
    return works


def gather(cache: Path) -> dict[str, dict[str, str]]:
    """All written domains: domain -> name of the work -> text."""
    cache.mkdir(parents=True, exist_ok=True)
    return {"english": english(), "python": python(), "chinese": chinese(cache)}
