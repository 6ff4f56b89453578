"""A forked child has its parent's memory but none of its threads: it is told, and never waits."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labkit import bundled, host
from labkit.errors import SessionError
from labkit.runtime import Session
from labkit.runtime.memory import PAGE, PageRange
from labkit.runtime.stock import StockModel

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::labkit.runtime.BudgetWarning"),
]

TEXT = "In the beginning God created the heaven and the earth."
OVERLAPS = ["serial", "pipeline"] + ["userfaultfd"] * (host.userfaultfd_problem() is None)


@pytest.fixture(scope="module")
def model() -> Path:
    return bundled.model_path().resolve()


def ends_well(child: int) -> bool:
    """Whether a child ends by itself with 0. One that waits for a thread never does."""
    for _ in range(2000):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def in_child(work: Callable[[], bool]) -> int:
    """Fork; the child does `work` and ends with 0 if it was true. Its process id."""
    child = os.fork()
    if not child:
        code = 2
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return child


def is_refused(use: Callable[[], object]) -> bool:
    try:
        use()
    except SessionError as error:
        return "forked" in str(error)
    return False


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_every_use_in_a_child_is_refused_at_once(model: Path, overlap: Any) -> None:
    with Session(model, cache_mib=2, overlap=overlap, trial=False) as session:
        stream = session.stream(TEXT, 9)
        next(stream)
        expected = [step.token for step in stream]
        streaming = session._engine.streaming
        assert streaming is not None
        stream = session.stream([], 9)
        next(stream)
        uses: list[Callable[[], object]] = [
            lambda: next(stream),
            lambda: session.generate(TEXT, 1),
            lambda: session.tokenize(TEXT),
            lambda: session.detokenize([1]),
            lambda: session.resident_expert_bytes,
            session.reset,
            session.interrupt,
            lambda: streaming.reader.read([]),
        ]

        def use_all() -> bool:
            refused = all(map(is_refused, uses))
            session.close()
            session.__del__()
            return refused

        assert ends_well(in_child(use_all))
        session.reset()
        assert [step.token for step in session.stream(TEXT, 9)][1:] == expected


@pytest.mark.parametrize("prefill", ["experts", "layers"])
@pytest.mark.parametrize("way", ["goes on", "raises"])
def test_a_child_that_was_forked_inside_a_step(model: Path, prefill: Any, way: str) -> None:
    """Reads of the next graph are under way, on threads that the child has not."""
    options: dict = {"n_ubatch": 16, "all_logits": True, "trial": False, "prefill": prefill}
    children: list[int] = []
    parent = os.getpid()
    with Session(model, cache_mib=5, **options) as session:
        expected = session.generate(TEXT * 3, 3, hash_logits=True).logits_sha256
        session.reset()

        def on_logits(_: object) -> None:
            if not children:
                children.append(os.fork())
                if not children[0] and way == "raises":
                    raise ValueError("of the child")

        session.on_logits = on_logits
        code, found = 2, None
        try:
            found = session.generate(TEXT * 3, 3, hash_logits=True).logits_sha256
        except SessionError as error:
            code = 0 if "forked" in str(error) and way == "goes on" else 1
        except ValueError:
            code = 0 if way == "raises" else 1
        finally:
            if os.getpid() != parent:
                session.close()
                os._exit(code)
        assert ends_well(children[0])
        assert found == expected


def test_a_child_that_another_thread_forks_during_a_step_hears_ctrl_c(model: Path) -> None:
    begun, forked = threading.Event(), threading.Event()
    children: list[int] = []

    def interrupted() -> bool:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            return True
        return False

    def fork() -> None:
        begun.wait()
        children.append(in_child(interrupted))
        forked.set()

    thread = threading.Thread(target=fork)
    thread.start()
    with Session(model, cache_mib=5, trial=False) as session:

        def on_logits(_: object) -> None:
            begun.set()
            assert forked.wait(20)

        session.on_logits = on_logits
        session.generate(TEXT, 1)
    thread.join()
    assert ends_well(children[0])


def test_stock_llama_cpp_in_a_child(model: Path) -> None:
    with StockModel(model) as stock:
        stock.prefill([1, 2, 3])

        def use() -> bool:
            refused = is_refused(lambda: stock.decode(4))
            stock.close()
            return refused

        assert ends_well(in_child(use))
        assert stock.decode(4) > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_a_child_shares_no_page_that_experts_are_read_into() -> None:
    """Else a direct read under way at the fork could end in the page that the child keeps."""
    pages = PageRange(4 * PAGE)
    pages.memory[:4] = b"here"
    assert ends_well(in_child(lambda: bytes(pages.memory[:4]) == bytes(4)))
    assert bytes(pages.memory[:4]) == b"here"
    pages.close()
