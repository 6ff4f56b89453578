"""Ctrl-C, Jupyter's stop button and signal handlers, safe around a call into llama.cpp.

A signal handler that raises inside the graph callback loses its exception in C, and the graph's
result with it. So during a step Ctrl-C only sets the abort flag, and what any other handler raised
is caught where Python reports lost exceptions; both are raised when the step has put everything in
order.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from labkit.runtime.abort import AbortFlag
from labkit.runtime.node_counter import NodeCounter


class InterruptGuard:
    """Holds back SIGINT for the length of a step; `pending` says that one came.

    On threads other than the main one signals do not arrive. An exception that was lost in a
    callback of this thread aborts the step and is raised at its end.
    """

    def __init__(self, abort: AbortFlag | NodeCounter) -> None:
        self._abort = abort
        self._previous: Any = None
        self.pending = False
        self.lost: BaseException | None = None

    def __enter__(self) -> InterruptGuard:
        _watch(self)
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _guards.pop(threading.get_ident(), None)
        previous, self._previous = self._previous, None
        if previous:
            signal.signal(signal.SIGINT, previous)
        if self.lost:
            raise self.lost
        if previous and self.pending:
            previous(signal.SIGINT, None)

    def lose(self, error: BaseException) -> None:
        """Note an exception that C threw away, and end the graph that it was thrown away from."""
        self.lost = self.lost or error
        self._abort.set()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.pending = True
        self._abort.set()


_guards: dict[int, InterruptGuard] = {}
_report_elsewhere: Callable[[Any], Any] = sys.__unraisablehook__


def _watch(guard: InterruptGuard) -> None:
    """Have exceptions that callbacks of this thread lose told to `guard`, others as before."""
    global _report_elsewhere
    if sys.unraisablehook is not _on_unraisable:
        _report_elsewhere = sys.unraisablehook
        sys.unraisablehook = _on_unraisable
    _guards[threading.get_ident()] = guard


def _on_unraisable(report: Any) -> None:
    guard = _guards.get(threading.get_ident())
    if guard and report.exc_value is not None and "ctypes callback" in (report.err_msg or ""):
        guard.lose(report.exc_value)
    else:
        _report_elsewhere(report)
