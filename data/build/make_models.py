"""Rebuilds data/models, data/heldout and the figures of the model card from the texts.

    python data/build/make_models.py --work SOME_FOLDER

Needs what data/build/requirements.txt lists, Debian's ``bible-kjv`` and npm. Each stage keeps
its result in the work folder and is skipped when that is there; training goes on from its last
checkpoint.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tinymoe import card, corpus, evaluate, export, llama, samples, train
from tinymoe.settings import DATA, FINISH, SHARP, Training

DESCRIPTIONS = {
    "finish": (
        "A small mixture of experts for studying routing: KJV, Python, Tang verse, arithmetic"
    ),
    "sharp": "The same model continued so that its experts belong to kinds of text more sharply",
}


def convert(work: Path, models: Path) -> None:
    """Writes every shipped file from the two checkpoints."""
    models.mkdir(parents=True, exist_ok=True)
    for name, description in DESCRIPTIONS.items():
        shipped = name == "finish"
        stem = "labkit-moe" if shipped else "labkit-moe-sharp"
        full = (models if shipped else work) / f"{stem}-f16.gguf"
        model = evaluate.load(work / f"{name}.pt")
        export.write(model, work / "tokenizer.json", full, stem, description)
        for kind in llama.FILE_TYPES if shipped else ("q8_0",):
            llama.quantise(full, models / f"{stem}-{kind}.gguf", kind)


def main() -> None:
    """Runs the stages that are not done yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument(
        "--stop-after",
        choices=("texts", "main", "finish", "sharp"),
        help="do no more than this stage",
    )
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    stages = [
        ("texts", lambda: corpus.prepare(work)),
        ("main", lambda: train.train(work, "main", Training())),
        ("finish", lambda: train.train(work, "finish", FINISH, start="main")),
        ("sharp", lambda: train.train(work, "sharp", SHARP, start="finish")),
        ("files", lambda: convert(work, DATA / "models")),
        ("samples", lambda: samples.write(work, DATA / "heldout")),
    ]
    for name, stage in stages:
        stage()
        if name == options.stop_after:
            return
    figures = evaluate.everything(work, DATA / "models")
    (work / "figures.json").write_text(json.dumps(figures, indent=1))
    card.write(work, DATA / "README.md")


if __name__ == "__main__":
    main()
