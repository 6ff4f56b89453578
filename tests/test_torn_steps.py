"""Exceptions from elsewhere, at any place: afterwards a session is right, or it is refused.

Some timeouts and debuggers have an exception raised in another thread (`PyThreadState_SetAsyncExc`)
wherever that happens to be. A function of the runtime that raises when it is called, or when it is
done, stands for one that came there.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labkit import bundled, host
from labkit.errors import SessionError
from labkit.runtime import Session
from labkit.runtime.abort import AbortFlag
from labkit.runtime.expert_memory import ExpertMemory
from labkit.runtime.gate import Gate
from labkit.runtime.graph_record import TokenRecord
from labkit.runtime.hook import RouterHook
from labkit.runtime.interrupt import InterruptGuard
from labkit.runtime.native import NativeModel
from labkit.runtime.node_counter import NodeCounter
from labkit.runtime.prefill import PrefillPath
from labkit.runtime.reader import FileReader
from labkit.runtime.recorder import Recorder
from labkit.runtime.source import ExpertStreamSource
from labkit.runtime.streaming import Streaming

pytestmark = pytest.mark.filterwarnings("ignore::labkit.runtime.BudgetWarning")

TEXT = "In the beginning God created the heaven and the earth."
OVERLAPS = ["serial", "pipeline"] + ["userfaultfd"] * (host.userfaultfd_problem() is None)


class TornError(BaseException):
    """What nobody inside labkit knows."""


@pytest.fixture(scope="module")
def model() -> Path:
    return bundled.model_path().resolve()


@pytest.fixture(scope="module")
def expected(model: Path) -> str | None:
    with Session(model, resident=True) as session:
        return session.generate(TEXT, 6, hash_logits=True).logits_sha256


def tearing(call: Callable[..., Any], before: bool, countdown: list[int]) -> Callable[..., Any]:
    """`call`, which raises TornError the time that `countdown` reaches 0."""

    def torn(*arguments: Any, **options: Any) -> Any:
        countdown[0] -= 1
        if before and countdown[0] == 0:
            raise TornError
        found = call(*arguments, **options)
        if countdown[0] == 0:
            raise TornError
        return found

    return torn


def right_or_refused(session: Session) -> str | None:
    """A hash of logits, or "refused" where a session says of every use that it is in doubt."""
    try:
        session.reset()
    except SessionError:
        for use in (session.reset, lambda: session.tokenize("a"), lambda: session.generate([1], 1)):
            with pytest.raises(SessionError, match="in doubt"):
                use()
        return "refused"
    return session.generate(TEXT, 6, hash_logits=True).logits_sha256


PLACES = [
    (ExpertMemory, "requests"), (ExpertMemory, "evict"), (FileReader, "submit"),
    (FileReader, "finish"), (ExpertStreamSource, "wait"), (ExpertStreamSource, "settle"),
    (ExpertStreamSource, "prefetch"), (Streaming, "begin_graph"), (TokenRecord, "choose"),
    (Recorder, "steps"), (Recorder, "keep"), (RouterHook, "begin"), (RouterHook, "end"),
    (RouterHook, "_forget_plans"), (NativeModel, "decode"), (NodeCounter, "_nodes_to_next"),
]  # fmt: skip


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_step_that_is_torn_out_of_its_work(
    model: Path, expected: str, overlap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict = {"overlap": overlap, "prefetch": "previous", "trial": False}
    for number, (owner, name) in enumerate(PLACES):
        before = (number + OVERLAPS.index(overlap)) % 2 == 0
        with Session(model, cache_mib=0.7, dense="mmap", **options) as session:
            session.generate(TEXT, 4)
            session.reset()
            with monkeypatch.context() as patch:
                times = 1 if name == "_forget_plans" else 4
                torn = tearing(getattr(owner, name), before, [times])
                patch.setattr(owner, name, torn)
                with pytest.raises(TornError):
                    session.generate(TEXT, 40)
            what = f"{owner.__name__}.{name}, {'before' if before else 'after'}"
            assert right_or_refused(session) in ("refused", expected), what


def test_ctrl_c_between_the_steps_leaves_a_session_usable(
    model: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(model, cache_mib=0.7, trial=False) as session:
        for owner, name in ((Recorder, "restart"), (AbortFlag, "clear"), (NodeCounter, "clear")):
            with monkeypatch.context() as patch:
                call = getattr(owner, name)

                def interrupted(self: Any, call: Any = call) -> None:
                    signal.raise_signal(signal.SIGINT)
                    call(self)

                patch.setattr(owner, name, interrupted)
                for use in (session.reset, lambda: session.stream(TEXT)):
                    with contextlib.suppress(KeyboardInterrupt):
                        use()
            assert right_or_refused(session) == expected


def test_a_prompt_by_layers_that_is_torn_out_of_its_work(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = TEXT * 3
    for name in ("begin", "at_layer", "end", "_start", "release"):
        with Session(model, cache_mib=5, prefill="layers", n_ubatch=16, trial=False) as session:
            with monkeypatch.context() as patch:
                torn = tearing(getattr(PrefillPath, name), name == "end", [1])
                patch.setattr(PrefillPath, name, torn)
                with pytest.raises(TornError):
                    session.generate(prompt, 2)
            with pytest.raises(SessionError, match="in doubt"):
                session.generate(prompt, 2)


def generate_for_ever(session: Session, thrower: threading.Timer) -> None:
    thrower.start()
    while True:
        session.reset()
        session.generate(TEXT, 6)


def test_exceptions_from_another_thread_at_random_moments(model: Path, expected: str) -> None:
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc
    this, rng = ctypes.c_ulong(threading.get_ident()), random.Random(3)
    for number in range(12):
        overlap: Any = OVERLAPS[number % len(OVERLAPS)]
        with Session(model, cache_mib=0.7, overlap=overlap, trial=False) as session:
            what = (this, ctypes.py_object(TornError))
            thrower = threading.Timer(rng.random() * 0.05, throw, what)
            with pytest.raises(TornError):
                generate_for_ever(session, thrower)
            assert right_or_refused(session) in ("refused", expected)


def test_who_is_torn_out_of_a_gate_keeps_it_shut_but_not_from_closing() -> None:
    gate, told = Gate(), []

    def torn(error: BaseException) -> None:
        with gate:
            raise error

    with pytest.raises(SessionError):
        torn(SessionError("known"))
    with pytest.raises(ValueError, match="excused"):
        torn(gate.excuse(ValueError("excused")))
    with gate:
        pass
    with pytest.raises(TornError):
        torn(TornError())
    with pytest.raises(SessionError, match="in doubt"), gate:
        pass
    gate.close(lambda: told.append("stop"), lambda: told.append("give back"))
    gate.close(lambda: told.append("stop"), lambda: told.append("give back"))
    assert told == ["stop", "give back"]


def test_what_is_given_back_in_part_is_given_back_by_the_next_close() -> None:
    gate, left = Gate(), [TornError()]

    def give_back() -> None:
        if left:
            raise left.pop()

    with pytest.raises(TornError):
        gate.close(lambda: None, give_back)
    with pytest.raises(SessionError, match="closed"), gate:
        pass
    gate.close(lambda: None, give_back)
    assert not left


def test_a_guard_that_nobody_left_holds_nothing_back() -> None:
    previous = signal.getsignal(signal.SIGINT)
    guard = InterruptGuard(AbortFlag())

    def torn_out() -> None:
        guard.__enter__()

    try:
        torn_out()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)
