"""Holds out whole works, and only those that the training part does not nearly contain."""

from __future__ import annotations

import hashlib

HELD_OUT_PER_MILLE = {"english": 50, "python": 40, "chinese": 40}
SHINGLE = {"english": 40, "python": 60, "chinese": 6}
MOST_SHARED = 0.25


def _draw(name: str) -> int:
    """A number from 0 to 999 that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 1000


def _shingles(text: str, length: int) -> set[int]:
    """Hashes of every piece of ``length`` characters, white space collapsed."""
    text = " ".join(text.split())
    return {hash(text[i : i + length]) for i in range(max(1, len(text) - length + 1))}


def split(domain: str, works: dict[str, str]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Splits a domain into training works, held-out works and names of rejected hold-outs.

    A drawn work of which more than a quarter of the shingles also stands in the training part is
    a near-duplicate; it goes back to training. Works whose own text repeats another's wholly
    (a poem that stands twice in the collection) are kept once.
    """
    unique: dict[str, str] = {}
    seen: set[str] = set()
    for name, text in sorted(works.items()):
        if text not in seen:
            seen.add(text)
            unique[name] = text
    drawn = [name for name in unique if _draw(name) < HELD_OUT_PER_MILLE[domain]]
    train = {name: text for name, text in unique.items() if name not in set(drawn)}
    known: set[int] = set()
    for text in train.values():
        known |= _shingles(text, SHINGLE[domain])
    held, rejected = {}, []
    for name in drawn:
        own = _shingles(unique[name], SHINGLE[domain])
        if len(own & known) > MOST_SHARED * len(own):
            rejected.append(name)
            train[name] = unique[name]
        else:
            held[name] = unique[name]
    return train, held, rejected
