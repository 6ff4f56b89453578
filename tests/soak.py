"""Random sessions for a while: every output must be the resident run's, whatever happened before.

    nohup python tests/soak.py --seconds 3600 --seed 1 --share 0.5 > soak.json 2> soak.log &

Models, budgets, lanes, overlap, prefetch, hot list, prefill path, policy, dense weights and direct
I/O are drawn at random. Steps are interrupted, conversations reset, streams left in the middle, and
the disk fails, all at random moments; after each the next output must be right to the last bit.

With a `--share` below 1 it runs at the lowest priority and rests between sessions, so that it works
for that share of the time. Progress goes to stderr every half minute. The last line of
stdout is JSON: "ok", what was done, and what the process holds at its end beside its beginning. A
deadlock ends it with the stacks of all threads once nothing has moved for `--patience` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from broken_files import FAULTS, broken

from labkit import bundled, host
from labkit.errors import LabkitError, ReadError
from labkit.policy import ONLINE
from labkit.runtime import Session
from labkit.runtime.memory import process_memory

MODELS = [bundled.model_path(name).resolve() for name in ("main-q8_0", "main-q4_k_m")]
WIDTHS = (1, 16, 64, 512)
N = 12
PROMPTS = (
    "Once upon a time",
    "def main(argv):\n    return",
    "1+1=2\n2+2=",
    "In the beginning " * 12,
    "太初有道 " * 30,
)
OVERLAPS = ["auto", "serial", "pipeline"]
OVERLAPS += ["userfaultfd"] * 3 * (host.userfaultfd_problem() is None)


class DifferenceError(Exception):
    """Logits that are not the resident run's."""


class Soak:
    """What is drawn, done and counted.

    Attributes:
        done: what happened how often.
        drawn: options of the session that runs, for whoever looks into a failure.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.drawn: dict[str, Any] = {}
        self._folder = folder
        self._expected: dict[tuple[Path, int, str], str] = {}
        for model in MODELS:
            for width in WIDTHS:
                with Session(model, resident=True, n_ctx=512, n_ubatch=width) as session:
                    for prompt in PROMPTS:
                        self._expected[model, width, prompt] = outputs(session, prompt)

    def session(self) -> None:
        """One session with some outputs, and trouble before about half of them."""
        self.drawn = options = self._draw()
        model = options.pop("model")
        with Session(model, n_ctx=512, trial=False, **options) as session:
            for _ in range(self.rng.randrange(1, 7)):
                trouble = self.rng.choice([None, None, None, *TROUBLES])
                if trouble:
                    what = trouble(self, session, model)
                    self.done[f"{trouble.__name__}: {what}"] += 1
                prompt = self.rng.choice(PROMPTS)
                if outputs(session, prompt) != self._expected[model, options["n_ubatch"], prompt]:
                    raise DifferenceError(f"after {trouble.__name__ if trouble else 'no trouble'}")
                self.done["outputs"] += 1
        self.done["sessions"] += 1
        for name in ("overlap", "prefill", "prefetch"):
            self.done[f"{name} {options[name]}"] += 1

    def _draw(self) -> dict[str, Any]:
        rng = self.rng
        cache_mib = rng.choice([0, 0.2, 0.7, 1, 2, 3, 5, 20])
        prefills = ["experts", "auto"] + ["layers"] * 2 * (cache_mib >= 3)
        return {
            "model": rng.choice(MODELS),
            "cache_mib": cache_mib,
            "lanes": rng.choice([1, 2, 4, 8]),
            "overlap": rng.choice(OVERLAPS),
            "prefill": rng.choice(prefills),
            "prefetch": rng.choice([None, "previous", "router"]),
            "hot_list": rng.choice([None, self._folder]),
            "policy": rng.choice(list(ONLINE)),
            "dense": rng.choice(["anonymous", "anonymous", "warm", "mmap"]),
            "direct_io": rng.choice([None, False]),
            "n_ubatch": rng.choice(WIDTHS),
            "threads": rng.choice([1, 1, 1, 2]),
        }

    def interrupt(self, session: Session, _: Path) -> str:
        """Stop a generation after a while."""
        with later(self.rng.random() * 0.06, session.interrupt):
            return self._generate(session)

    def fault(self, session: Session, model: Path) -> str:
        """The disk fails after a while, and works again afterwards."""
        kind = self.rng.choice(list(FAULTS))
        with broken(model, kind) as break_now, later(self.rng.random() * 0.03, break_now):
            found = self._generate(session)
            # What is still read ahead would tell of the fault in the next step.
            with contextlib.suppress(ReadError):
                session._engine.streaming.source.finish_reads()  # type: ignore[union-attr]
            return f"{kind} {found}"

    def reset(self, session: Session, _model: Path) -> str:
        """Leave a stream in the middle, in one of several ways."""
        stream = session.stream(self.rng.choice(PROMPTS), 20)
        for _ in range(self.rng.randrange(4)):
            next(stream)
        way = self.rng.choice(["left", "reset", "closed"])
        if way == "reset":
            session.reset()
        elif way == "closed":
            stream.close()  # type: ignore[attr-defined]
        return way

    def turns(self, session: Session, _: Path) -> str:
        """Some turns of one conversation, so that what is cached is not what comes next."""
        session.reset()
        for prompt in self.rng.sample(PROMPTS[:3], 2):
            session.generate(prompt, self.rng.randrange(1, 20))
        return "two"

    def _generate(self, session: Session) -> str:
        session.reset()
        try:
            session.generate(self.rng.choice(PROMPTS), 60)
        except KeyboardInterrupt:
            return "came in time"
        except ReadError:
            return "was an error"
        return "came too late"


TROUBLES: list[Callable[[Soak, Session, Path], str]] = [
    Soak.interrupt, Soak.fault, Soak.reset, Soak.turns,
]  # fmt: skip


def outputs(session: Session, prompt: str) -> str:
    """A hash of the logits of one fresh conversation."""
    session.reset()
    return str(session.generate(prompt, N, hash_logits=True).logits_sha256)


@contextlib.contextmanager
def later(after_s: float, act: Callable[[], None]) -> Iterator[None]:
    """`act` on another thread after so many seconds, if the block takes that long."""
    timer = threading.Timer(after_s, act)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def holdings() -> dict[str, int]:
    """Files, threads, mappings and MiB of anonymous memory that this process has."""
    gc.collect()
    return {
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "anonymous_mib": (process_memory()["anonymous"] or 0) >> 20,
    }


def run(soak: Soak, seconds: float, share: float, patience: float) -> dict[str, Any]:
    """Sessions until the time is up or one is wrong; the summary."""
    begin = said = time.monotonic()
    first: dict[str, int] = {}
    failure = None
    while (now := time.monotonic()) < begin + seconds and not failure:
        faulthandler.dump_traceback_later(patience, exit=True)
        try:
            soak.session()
        except (DifferenceError, LabkitError, AssertionError) as error:
            failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        if soak.done["sessions"] == 20:  # allocators have grown to their size
            first = holdings()
        spent = time.monotonic() - now
        if time.monotonic() - said > 30:
            said = time.monotonic()
            words = f"{said - begin:.0f} s, {soak.done['sessions']} sessions, "
            sys.stderr.write(f"{words}{soak.done['outputs']} outputs, {holdings()}\n")
        time.sleep(spent * (1 / share - 1))
    faulthandler.cancel_dump_traceback_later()
    options = {name: str(value) for name, value in soak.drawn.items()}
    return {
        "ok": failure is None,
        "failure": failure,
        "options": options if failure else None,
        "seconds": round(time.monotonic() - begin),
        **dict(sorted(soak.done.items())),
        "held_after_20_sessions": first,
        "held_at_the_end": holdings(),
    }


def main() -> None:
    """Soak, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the time at work")
    parser.add_argument("--patience", type=float, default=300)
    arguments = parser.parse_args()
    if hasattr(os, "nice"):
        os.nice(19 if arguments.share < 1 else 0)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(arguments.seed, Path(folder))
        summary = run(soak, arguments.seconds, arguments.share, arguments.patience)
    sys.stdout.write(json.dumps({"seed": arguments.seed, **summary}) + "\n")
    sys.exit(not summary["ok"])


if __name__ == "__main__":
    main()
