"""Random sessions for a while: every output must be the resident run's, whatever happened before.

    python tests/soak.py --seconds 3600 --seed 1

Budgets, lanes, overlap, prefill path, policy and direct I/O are drawn at random, and steps are
interrupted at random moments. A deadlock shows as a run that does not end: whoever starts this sets
a time limit. Prints what it did as JSON.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import random
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

from labkit import host
from labkit.policy import ONLINE
from labkit.runtime import Session

MODEL = Path(__file__).parents[1] / "data/models/labkit-moe-q8_0.gguf"
WIDTHS = (16, 64, 512)
PROMPTS = (
    "Once upon a time",
    "def main(argv):\n    return",
    "1+1=2\n2+2=",
    "In the beginning " * 12,
)


def outputs(session: Session, prompt: str, n: int) -> str:
    """A hash of the logits of one fresh conversation."""
    session.reset()
    return str(session.generate(prompt, n, hash_logits=True).logits_sha256)


def interrupted(session: Session, prompt: str, n: int, after_s: float) -> bool:
    """Whether an interrupt after so many seconds came in time to end a generation."""
    session.reset()
    timer = threading.Timer(after_s, session.interrupt)
    timer.start()
    try:
        session.generate(prompt, n)
    except KeyboardInterrupt:
        return True
    finally:
        timer.cancel()
        timer.join()
    return False


def draw(rng: random.Random) -> dict:
    """Random options of a session."""
    ways = ["auto", "serial", "pipeline"]
    if not host.userfaultfd_problem():
        ways += ["userfaultfd"] * 3
    return {
        "cache_mib": rng.choice([0, 0.2, 0.7, 1, 2, 3, 5, 20]),
        "lanes": rng.choice([1, 2, 4, 8]),
        "overlap": rng.choice(ways),
        "prefill": rng.choice(["experts", "auto"]),
        "prefetch": rng.choice([None, "previous"]),
        "policy": rng.choice(list(ONLINE)),
        "direct_io": rng.choice([None, False]),
        "n_ubatch": rng.choice(WIDTHS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(arguments.seconds + 60)
    rng = random.Random(arguments.seed)
    n = 12
    expected = {}
    for width in WIDTHS:
        with Session(MODEL, resident=True, n_ctx=512, n_ubatch=width) as session:
            expected |= {(width, prompt): outputs(session, prompt, n) for prompt in PROMPTS}
    done: Counter[str] = Counter()
    end = time.monotonic() + arguments.seconds
    while time.monotonic() < end:
        options = draw(rng)
        with Session(MODEL, n_ctx=512, trial=False, **options) as session:
            for _ in range(rng.randrange(1, 6)):
                prompt = rng.choice(PROMPTS)
                if rng.random() < 0.5:
                    cut = interrupted(session, prompt, 60, rng.random() * 0.05)
                    done["interrupts"] += cut
                if outputs(session, prompt, n) != expected[options["n_ubatch"], prompt]:
                    sys.exit(f"logits differ: {options}, seed {arguments.seed}, after {dict(done)}")
                done["outputs"] += 1
        done["sessions"] += 1
        done[f"overlap {options['overlap']}"] += 1
    digest = hashlib.sha256("".join(expected.values()).encode()).hexdigest()[:12]
    sys.stdout.write(json.dumps({"seed": arguments.seed, "expected": digest, **done}) + "\n")


if __name__ == "__main__":
    main()
