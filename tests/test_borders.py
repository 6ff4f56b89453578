"""Bit identity where one thing ends and another begins: batches, resets, sessions, processes."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from soak import holdings

from labkit import bundled, host
from labkit.errors import BudgetError, LabkitError, OptionError, SessionError
from labkit.gguf_map import open_gguf
from labkit.runtime import Session

pytestmark = pytest.mark.filterwarnings("ignore::labkit.runtime.BudgetWarning")

TEXT = "In the beginning God created the heaven and the earth."
OTHER = "def main(argv):\n    return sum(argv)"
OVERLAPS: list[Any] = ["serial", "pipeline"]
OVERLAPS += ["userfaultfd"] * (host.userfaultfd_problem() is None)
SMALL, LARGE = 0.3, 5  # MiB: below the token cycle, and room for two whole layers


@pytest.fixture(scope="module")
def model() -> Path:
    return bundled.model_path()


def hashed(session: Session, prompt: Any = TEXT, n: int = 6) -> str | None:
    """A hash of the logits of a fresh conversation."""
    session.reset()
    return session.generate(prompt, n, hash_logits=True).logits_sha256


def resident(path: Path, prompt: Any = TEXT, **options: Any) -> str | None:
    with Session(path, resident=True, trial=False, **options) as session:
        return hashed(session, prompt)


# Batches


@pytest.mark.parametrize("width", [1, 2, 7, 32])
def test_prompts_about_as_long_as_a_batch(model: Path, width: int) -> None:
    ids = [(11 * i + 5) % 900 for i in range(2 * width + 1)]
    lengths = sorted({n for n in (1, width - 1, width, width + 1, 2 * width, 2 * width + 1) if n})
    with Session(model, resident=True, n_ubatch=width, trial=False, all_logits=True) as session:
        expected = [hashed(session, ids[:n]) for n in lengths]
    for turn, prefill in enumerate(("experts", "layers", "auto")):
        overlap = OVERLAPS[(turn + width) % len(OVERLAPS)]
        with Session(
            model, cache_mib=LARGE, n_ubatch=width, prefill=prefill, overlap=overlap,
            trial=False, all_logits=True,
        ) as session:  # fmt: skip
            assert [hashed(session, ids[:n]) for n in lengths] == expected
            for n in lengths:
                session.reset()
                session.generate(ids[:n], 0)
                paths = [step.path for step in session.prefill_steps]
                tail = n % width == 1 or width == 1
                assert len(paths) == n
                if prefill == "experts":
                    assert set(paths) == {"cache"}
                elif prefill == "layers":  # a batch of one token is no wide batch
                    assert paths[-1] == ("cache" if tail else "layers")


@pytest.mark.parametrize("quant", ["main-f16", "main-q4_k_m", "main-q4_0"])
@pytest.mark.parametrize("prefill", ["experts", "layers"])
def test_the_bundled_models_whose_tensors_differ_in_type(prefill: Any, quant: str) -> None:
    path = bundled.model_path(quant)
    gguf = open_gguf(path)
    if quant == "main-q4_k_m":
        assert len({part.tensor.type_name for part in gguf.expert_tensors}) > 1
    expected = resident(path, TEXT * 3)
    budget = 2.2 * max(gguf.n_expert * gguf.entry_bytes(layer) for layer in gguf.moe_layers) / 2**20
    for overlap in OVERLAPS:
        with Session(
            path, cache_mib=budget, prefill=prefill, overlap=overlap, trial=False
        ) as session:
            assert hashed(session, TEXT * 3) == expected


# Conversations


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_resets_in_the_middle_of_a_stream(model: Path, overlap: Any) -> None:
    expected = resident(model)
    with Session(model, cache_mib=SMALL, overlap=overlap, trial=False) as session:
        begun = session.stream(TEXT, 9)  # never asked for anything
        assert hashed(session) == expected
        stream = session.stream(OTHER, 9)
        next(stream)
        session.reset()
        for dead in (begun, stream):
            with pytest.raises(SessionError, match="Another generation"):
                next(dead)
        assert hashed(session) == expected
        stream = session.stream(OTHER, 9)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        stream = session.stream(OTHER, 9)
        next(stream)
        del stream
        gc.collect()
        session.interrupt()
        session.reset()
        session.reset()
        assert hashed(session) == expected
        assert session.generate([], 0).tokens == []
        assert hashed(session) == expected


def test_a_conversation_that_begins_again_from_its_callback(model: Path) -> None:
    """A reset inside a step is refused, and the step goes on as if nothing had been asked."""
    expected, refused = resident(model), []

    def on_logits(_: np.ndarray) -> None:
        try:
            session.reset()
        except SessionError as error:
            refused.append(error)

    with Session(model, cache_mib=SMALL, trial=False) as session:
        session.on_logits = on_logits
        assert hashed(session) == expected
    assert len(refused) == 7


@pytest.mark.parametrize("prefill", ["experts", "layers"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_interrupts_at_random_moments_of_prompt_and_decode(
    model: Path, overlap: Any, prefill: Any
) -> None:
    """Over the combinations more than a hundred; the moments come from another thread's clock."""
    rng = random.Random(3)
    expected = resident(model, n_ubatch=64)
    cut = 0
    with Session(
        model, cache_mib=1.8, overlap=overlap, prefill=prefill, prefetch="previous",
        n_ubatch=64, n_ctx=1024, trial=False,
    ) as session:  # fmt: skip
        tries = 0
        while cut < 20 and tries < 300:
            tries += 1
            session.reset()
            timer = threading.Timer(rng.random() * 0.06, session.interrupt)
            timer.start()
            try:
                session.generate(rng.choice([TEXT, TEXT * 20]), 10)
            except KeyboardInterrupt:
                cut += 1
            timer.join()
            if rng.random() < 0.2:
                assert hashed(session) == expected
        assert hashed(session) == expected
    assert cut == 20


# Sessions and threads


def test_two_sessions_in_turns_do_not_disturb_each_other(model: Path) -> None:
    other = bundled.model_path("main-q4_k_m")
    expected = resident(model, OTHER), resident(other, OTHER)
    for overlap in OVERLAPS:
        with (
            Session(model, cache_mib=SMALL, overlap=overlap, trial=False) as one,
            Session(other, cache_mib=LARGE, overlap=overlap, trial=False) as two,
        ):
            streams: list[Iterator] = [one.stream(TEXT, 12), two.stream(TEXT * 5, 12)]
            for _ in range(12):
                for stream in streams:
                    next(stream)
            assert (hashed(one, OTHER), hashed(two, OTHER)) == expected


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_sessions_in_threads_at_the_same_time(model: Path, overlap: Any) -> None:
    expected = [resident(model, prompt) for prompt in (TEXT, OTHER, TEXT * 4)]
    together = threading.Barrier(3)

    def work(number: int) -> bool:
        options: Any = {"overlap": overlap, "prefetch": (None, "previous", "router")[number]}
        with Session(
            model, cache_mib=(SMALL, 1, LARGE)[number], threads=1, trial=False, **options
        ) as session:
            together.wait(60)
            prompt = (TEXT, OTHER, TEXT * 4)[number]
            return all(hashed(session, prompt) == expected[number] for _ in range(4))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3))) == [True] * 3


def test_opened_here_used_there_closed_elsewhere(model: Path) -> None:
    expected = resident(model)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        session = one.submit(lambda: Session(model, cache_mib=SMALL, trial=False)).result()
        assert two.submit(hashed, session).result() == expected
        assert hashed(session) == expected
        one.submit(session.close).result()
    with pytest.raises(SessionError, match="closed"):
        session.generate(TEXT, 1)


# Forks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("state", ["open", "closed"])
def test_a_forked_child_is_refused_and_takes_nothing_with_it(model: Path, state: str) -> None:
    expected = resident(model)
    session = Session(model, cache_mib=SMALL, overlap=OVERLAPS[-1], trial=False)
    hashed(session)
    if state == "closed":
        session.close()
    child = os.fork()
    if not child:
        code = 1
        try:
            session.close()
            Session(model, trial=False)
        except SessionError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            session.__del__()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if state == "open":
        assert hashed(session) == expected
        session.close()
    with Session(model, cache_mib=SMALL, trial=False) as session:
        assert hashed(session) == expected


# Leftovers


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="read from /proc")
def test_fifty_sessions_that_end_in_every_way_leave_nothing(model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:-4096])
    rng = random.Random(1)

    def refused(error: type[LabkitError]) -> Callable[..., None]:
        def attempt(path: Path, **options: Any) -> None:
            with pytest.raises(error):
                Session(path, trial=False, **options).generate(TEXT, 2)

        return attempt

    def once(number: int) -> None:
        overlap = OVERLAPS[number % len(OVERLAPS)]
        options: dict[str, Any] = {
            "overlap": overlap, "prefetch": rng.choice([None, "previous", "router"]),
            "prefill": rng.choice(["experts", "layers"]), "lanes": rng.choice([1, 4]),
            "dense": rng.choice(["anonymous", "mmap"]), "trial": False,
        }  # fmt: skip
        with Session(model, cache_mib=LARGE, **options) as session:
            session.generate(TEXT * 4, 3)
            if number % 3 == 0:
                session.interrupt()
                next(session.stream(OTHER, 9))
            if number % 4 == 0:
                threading.Timer(0.003, session.interrupt).start()
                with contextlib.suppress(KeyboardInterrupt):
                    session.generate(TEXT * 20, 50)
        if number % 5 == 0:
            refused(BudgetError)(model, cache_mib=0.01)
            refused(OptionError)(model, n_ctx=1 << 30)
            refused(LabkitError)(cut)

    for number in range(12):  # allocators and thread pools grow to their size
        once(number)
    before = holdings()
    for number in range(50):
        once(number)
    after = holdings()
    assert after["files"] == before["files"]
    assert after["threads"] <= before["threads"]
    assert after["mappings"] <= before["mappings"] + 20
    assert after["anonymous_mib"] <= before["anonymous_mib"] + 20
