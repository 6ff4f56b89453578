"""Texts as token streams: what training draws from and what evaluation reads."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from . import arithmetic, split, texts, tokenizer
from .settings import DOMAINS, SEED, Shape

SHEET_LINES = 40
SMALL, WORKED, RUNNING = "small arithmetic", "worked arithmetic", "running verse"


def prepare(work: Path) -> None:
    """Gathers, splits and tokenises everything into ``work`` (skipped if it is there)."""
    if (work / "corpus.npz").exists():
        return
    gathered = texts.gather(work / "cache")
    train: dict[str, dict[str, str]] = {}
    held: dict[str, dict[str, str]] = {}
    report = {}
    for domain, works in gathered.items():
        train[domain], held[domain], rejected = split.split(domain, works)
        report[domain] = {
            "works": len(works),
            "training_works": len(train[domain]),
            "held_out_works": len(held[domain]),
            "near_duplicates": rejected,
            "training_characters": sum(map(len, train[domain].values())),
            "held_out_characters": sum(map(len, held[domain].values())),
        }
    bpe = tokenizer.train(train, Shape().vocab, SEED, work / "tokenizer.json")
    end = bpe.token_to_id(tokenizer.END)
    rng = random.Random(SEED)
    pool, held_pool, products = arithmetic.problems()
    held["arithmetic"] = {
        f"sheet{i}": arithmetic.sheet(held_pool, [], SHEET_LINES, rng) for i in range(20)
    }
    held["arithmetic"] = {
        name: "".join(arithmetic.worked(line) + "\n" for line in text.splitlines())
        for name, text in held["arithmetic"].items()
    }
    train["arithmetic"] = {
        f"sheet{i}": arithmetic.sheet(pool, products, SHEET_LINES, rng) for i in range(8000)
    }
    report["arithmetic"] = {
        "training_problems": len(pool),
        "held_out_problems": len(held_pool),
        "products_by_heart": len(products),
    }
    arrays = {}
    for domain in DOMAINS:
        names = sorted(train[domain])
        rng.shuffle(names)
        ids: list[int] = []
        for encoding in bpe.encode_batch([train[domain][n] for n in names]):
            ids += [end, *encoding.ids]
        arrays[domain] = np.asarray(ids, dtype=np.uint16)
        report[domain]["training_tokens"] = len(ids)
    sums = arithmetic.small(pool)
    rng = random.Random(SEED + 1)
    easy = "".join(arithmetic.sheet(sums, products, SHEET_LINES, rng) for _ in range(2000))
    arrays[SMALL] = np.asarray(bpe.encode(easy).ids, dtype=np.uint16)
    shown = [arithmetic.worked(line) for line in pool]
    rng = random.Random(SEED + 2)
    sheets = [arithmetic.sheet(shown, products, SHEET_LINES, rng) for _ in range(4000)]
    arrays[WORKED] = np.asarray(bpe.encode("".join(sheets)).ids, dtype=np.uint16)
    (work / "held_out.json").write_text(json.dumps(held, ensure_ascii=False, indent=0))
    (work / "texts.json").write_text(json.dumps(report, indent=1))
    np.savez(work / "corpus.npz", **arrays)


def streams(work: Path) -> dict[str, np.ndarray]:
    """Training tokens of each domain, of the other two kinds of sums, and of verse that runs on.

    Each is (n,) int64; every work begins with the end token, but in sums and in running verse.
    """
    with np.load(work / "corpus.npz") as arrays:
        found = {name: arrays[name].astype(np.int64) for name in (*DOMAINS, SMALL, WORKED)}
    end = bpe(work).token_to_id(tokenizer.END)
    return found | {RUNNING: found["chinese"][found["chinese"] != end]}


def held_out(work: Path) -> dict[str, dict[str, str]]:
    """Held-out works: domain -> name -> text."""
    return json.loads((work / "held_out.json").read_text())


def bpe(work: Path) -> Tokenizer:
    """The trained tokenizer."""
    return Tokenizer.from_file(str(work / "tokenizer.json"))


def held_out_windows(work: Path, window: int, count: int) -> dict[str, np.ndarray]:
    """The same held-out windows every time: domain -> (count, window + 1) token ids.

    Works begin with the end token, but verse runs on, as it did when training ended.
    """
    tokens = bpe(work)
    end = tokens.token_to_id(tokenizer.END)
    result = {}
    for domain, works in held_out(work).items():
        ids: list[int] = []
        for name in sorted(works):
            start = [] if domain == "chinese" else [end]
            ids += start + tokens.encode(works[name]).ids
        rng = np.random.default_rng(SEED)
        starts = rng.integers(0, len(ids) - window - 1, count)
        result[domain] = np.stack([np.asarray(ids[s : s + window + 1]) for s in starts])
    return result
