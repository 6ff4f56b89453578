"""Writes the figures into data/README.md, between its two markers."""

from __future__ import annotations

import json
from pathlib import Path

from .settings import DOMAINS, FINISH, SHARP, Shape, Training

OPENING, CLOSING = "<!-- figures: written by data/build -->", "<!-- end of figures -->"
FILES = {
    "f16": "F16",
    "q8_0": "Q8_0",
    "q4_k_m": "Q4_K_M",
    "q4_0": "Q4_0",
    "sharp-q8_0": "sharp, Q8_0",
}


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _perplexity(figures: dict) -> str:
    rows = []
    for name, label in FILES.items():
        entry = figures[name]
        values = [f"{entry['perplexity'][domain]:.2f}" for domain in DOMAINS]
        size = f"{entry['bytes'] / 2**20:.1f}"
        rows.append([label, size, *values, f"{entry['exact_answers'] * 100:.1f} %"])
    return _table(["file", "MiB", *DOMAINS, "answers right"], rows)


def _routing(figures: dict) -> str:
    columns = {
        "q8_0": "main, Q8_0",
        "sharp-q8_0": "sharp, Q8_0",
        "control": "untrained",
        "uniform": "uniform",
    }
    lines = {
        "purity": "purity, mean over experts",
        "tv_smallest": "distance of two domains (TV), smallest",
        "tv_largest": "distance of two domains (TV), largest",
        "load_largest": "largest load, times fair share",
        "load_smallest": "smallest load, times fair share",
        "unused": "unused experts",
    }
    lines |= {f"churn_{domain}": f"churn, {domain}" for domain in DOMAINS}
    lines |= {f"lru25_{domain}": f"LRU hits at 25 %, {domain}" for domain in DOMAINS}
    rows = [
        [label]
        + [
            f"{figures[column]['routing'][key]:.0f}"
            if key == "unused"
            else f"{figures[column]['routing'][key]:.2f}"
            for column in columns
        ]
        for key, label in lines.items()
    ]
    return _table(["held-out text", *columns.values()], rows)


def _agreement(figures: dict) -> str:
    rows = []
    for name in ("q8_0", "q4_k_m", "q4_0"):
        against = figures[name]["against_f16"]
        rows.append([FILES[name], f"{against['experts']:.3f}", f"{against['best_token']:.3f}"])
    return _table(["file, against F16", "same experts", "same best token"], rows)


def _texts(report: dict) -> str:
    rows = [
        [
            domain,
            f"{report[domain]['training_works']:,}",
            f"{report[domain]['held_out_works']:,}",
            f"{len(report[domain]['near_duplicates'])}",
            f"{report[domain]['training_tokens']:,}",
        ]
        for domain in DOMAINS
        if domain != "arithmetic"
    ]
    own = report["arithmetic"]
    problems = [f"{own['training_problems']:,}", f"{own['held_out_problems']:,}", "0"]
    rows.append(["arithmetic (problems)", *problems, f"{own['training_tokens']:,}"])
    head = ["domain", "works to train on", "held out", "near-duplicates put back", "tokens"]
    return _table(head, rows)


def write(work: Path, readme: Path) -> None:
    """Replaces what stands between the markers."""
    figures = json.loads((work / "figures.json").read_text())
    report = json.loads((work / "texts.json").read_text())
    shape, training = Shape(), Training()
    check, parity = figures["f16"]["against_pytorch"], figures["f16"]["tokenizer"]
    steps = training.steps + FINISH.steps
    tokens = steps * training.windows * training.window
    more = SHARP.steps * SHARP.windows * SHARP.window
    routed = shape.layers - shape.dense_layers
    parts = [
        f"{shape.layers} layers ({shape.dense_layers} dense, {routed} with experts), width "
        f"{shape.width}, {shape.experts} routed experts of {shape.expert_ff} and one shared of "
        f"{shape.shared_ff}, top-{shape.top_k}, {shape.vocab:,} tokens, context {shape.context}. "
        f"Trained on {tokens / 1e6:.1f} million tokens in {steps:,} steps; the sharp variant on "
        f"{more / 1e6:.1f} million more.",
        _texts(report),
        "Perplexity on held-out text, and held-out sums and differences answered rightly:",
        _perplexity(figures),
        f"F16 against PyTorch in float32: same best token {check['best_token']:.4f}, same experts "
        f"{check['experts']:.4f}. Tokenizer: {parity['tokens']:,} tokens of held-out text, "
        f"{parity['texts_that_differ']} texts that differ.",
        _routing(figures),
        _agreement(figures),
    ]
    text = readme.read_text()
    before, rest = text.split(OPENING)
    after = rest.split(CLOSING)[1]
    body = "\n\n".join(parts)
    readme.write_text(f"{before}{OPENING}\n\n{body}\n\n{CLOSING}{after}")
