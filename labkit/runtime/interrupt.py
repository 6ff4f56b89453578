"""Ctrl-C and Jupyter's stop button, safe around a call into llama.cpp.

Python's own handler would raise inside the graph callback, where an exception is lost and the
graph's result with it. During a step the signal only sets the abort flag; the exception is raised
when the step has put everything in order.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from labkit.runtime.hook import AbortFlag


class InterruptGuard:
    """Holds back SIGINT for the length of a step; `pending` says that one came.

    On threads other than the main one signals do not arrive and the guard does nothing.
    """

    def __init__(self, abort: AbortFlag) -> None:
        self._abort = abort
        self._previous = None
        self.pending = False

    def __enter__(self) -> InterruptGuard:
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
        previous, self._previous = self._previous, None
        if previous:
            signal.signal(signal.SIGINT, previous)
            if self.pending:
                previous(signal.SIGINT, None)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.pending = True
        self._abort.set()
