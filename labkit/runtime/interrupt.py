"""Ctrl-C, Jupyter's stop button and signal handlers, safe around a call into llama.cpp.

A signal handler that raises inside the graph callback loses its exception in C, and the graph's
result with it; one that raises while reads are being asked for would leave them half asked for. So
during a step Ctrl-C only sets the abort flag, and what any other handler raises is caught where the
handler is called, or else where Python reports lost exceptions. All is raised when the step has put
everything in order.
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
from labkit.runtime.running import called_from

_NAMES = ("INT", "TERM", "HUP", "QUIT", "BREAK", "ALRM", "VTALRM", "PROF", "XCPU", "USR1", "USR2")
_SIGNALS = [getattr(signal, f"SIG{name}") for name in _NAMES if hasattr(signal, f"SIG{name}")]


class InterruptGuard:
    """Holds back SIGINT for the length of a step; `pending` says that one came.

    Handlers of other signals run at once; what they raise aborts the step and is raised at its end,
    as is an exception that was lost in a callback of this thread. On threads other than the main
    one signals do not arrive. Nothing is held back once the function that has the guard is over,
    however it ended, nor in a process that another thread forked meanwhile.
    """

    def __init__(self, abort: AbortFlag | NodeCounter) -> None:
        self._abort = abort
        self._previous: dict[int, Any] = {}
        self.user: FrameType | None = None
        self._holds = False
        self.pending = False
        self.lost: BaseException | None = None

    def __enter__(self) -> InterruptGuard:
        self.user = sys._getframe(1)
        _watch(self)
        if threading.current_thread() is threading.main_thread():
            try:
                self._hold_signals()
            except BaseException:
                self._let_signals()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _guards.pop(threading.get_ident(), None)
        self._let_signals()
        self.user = None
        if self.lost:
            raise self.lost
        if self.pending:
            self._previous[signal.SIGINT](signal.SIGINT, None)

    def lose(self, error: BaseException) -> None:
        """Note an exception that C threw away, and end the graph that it was thrown away from."""
        self.lost = self.lost or error
        self._abort.set()

    def _hold_signals(self) -> None:
        self._holds = True
        for number in _SIGNALS:
            previous = signal.getsignal(number)
            if callable(previous):
                self._previous[number] = previous
                signal.signal(number, self._on_signal)

    def _let_signals(self) -> None:
        """Put the handlers back, which from now on may raise in between."""
        self._holds, is_done = False, False
        while not is_done:
            try:
                for number, previous in self._previous.items():
                    if signal.getsignal(number) == self._on_signal:  # nobody set another one
                        signal.signal(number, previous)
                is_done = True
            except BaseException as error:
                self.lost = self.lost or error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._holds or not called_from(self.user, sys._getframe()):
            self._previous[number](number, frame)
        elif number == signal.SIGINT:
            self.pending = True
            self._abort.set()
        else:
            try:
                self._previous[number](number, frame)
            except BaseException as error:
                self.lose(error)


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
    error = report.exc_value if "ctypes callback" in (report.err_msg or "") else None
    if guard and error is not None and called_from(guard.user, sys._getframe()):
        guard.lose(error)
    else:
        _report_elsewhere(report)
