"""`Stepper`: runs a session's steps one at a time, and ends them when somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from labkit.errors import SessionError
from labkit.runtime.abort import AbortFlag
from labkit.runtime.gate import Gate
from labkit.runtime.interrupt import InterruptGuard
from labkit.runtime.node_counter import NodeCounter

Result = TypeVar("Result")


class Stepper:
    """A step is the prefill of a prompt or one generated token; the steps of a stream belong to it.

    Args:
        abort: ends the graph that runs.

    Attributes:
        gate: guards everything that steps use.
    """

    def __init__(self, abort: AbortFlag | NodeCounter) -> None:
        self.gate = Gate()
        self._abort = abort
        self._interrupted = False
        self._stream_id = 0

    def begin_stream(self) -> int:
        """A new stream; older ones are over, and so are interrupts that nobody waited for."""
        with InterruptGuard(self._abort), self.gate:
            self._stream_id += 1
            self._interrupted = False
            self._abort.clear()
            return self._stream_id

    def end_streams(self, work: Callable[[], object]) -> None:
        """`work`, after which no stream goes on that began before."""
        with InterruptGuard(self._abort), self.gate:
            self._stream_id += 1
            work()

    def run(self, stream_id: int, work: Callable[..., Result], *arguments: Any) -> Result:
        """`work(*arguments)` as one step; an interrupt that came meanwhile is raised after it.

        Raises:
            KeyboardInterrupt: `interrupt` was called. For a signal, whatever its handler raises.
            SessionError: see `Gate`; or a newer stream began, or the session was closed meanwhile.
        """
        with InterruptGuard(self._abort):
            try:
                result = self._run_alone(stream_id, work, arguments)
            except KeyboardInterrupt:
                self._check_stopped()
                raise
        self._check_stopped()
        return result

    def interrupt(self) -> None:
        """End the running step, from any thread."""
        self.gate.home.check("This session")
        self._interrupted = True
        self._abort.set()

    def close(self, give_back: Callable[[], None]) -> None:
        """End the running step, and `give_back` once."""
        self.gate.close(self.interrupt, give_back)

    def _run_alone(
        self, stream_id: int, work: Callable[..., Result], arguments: tuple[Any, ...]
    ) -> Result:
        with self.gate:
            if stream_id != self._stream_id:
                raise SessionError("Another generation began on this session; this one is over.")
            try:
                return work(*arguments)
            finally:
                self._abort.clear()

    def _check_stopped(self) -> None:
        if self.gate.closing:
            raise SessionError("This session was closed in another thread while it was at work.")
        if self._interrupted:
            raise KeyboardInterrupt
