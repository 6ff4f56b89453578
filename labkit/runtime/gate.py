"""`Gate`: one thread at a time, in one process, until it is closed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from labkit.errors import SessionError


class Gate:
    """Guards what llama.cpp does not: two threads in one context, or use after it was freed.

    Attributes:
        closed: nobody gets in any more.
        closing: somebody waits to close; whoever is inside should leave.
    """

    def __init__(self) -> None:
        self.closed = self.closing = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._inside: int | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Be the only one inside.

        Raises:
            SessionError: closed, another thread is inside, or another process made the gate.
        """
        self.check_open()
        if not self._lock.acquire(blocking=False):
            raise SessionError(
                "This session is at work in another thread. Wait for it, or open a second session."
            )
        try:
            self._inside = threading.get_ident()
            self.check_open()
            yield
        finally:
            self._inside = None
            self._lock.release()

    def check_open(self) -> None:
        """Raise SessionError where nobody can get in."""
        if self._pid != os.getpid():
            raise SessionError(
                "This session was opened by the process that this one was forked from, and its "
                "threads stayed there. Open a session in this process."
            )
        if self.closed:
            raise SessionError("This session is closed. Open a new one.")

    def close(self, stop: Callable[[], None], give_back: Callable[[], None]) -> None:
        """Have whoever is inside leave by `stop`, then `give_back` once. Elsewhere it does nothing.

        Raises:
            SessionError: called from inside.
        """
        if self.closed or self._pid != os.getpid():
            return
        if self._inside == threading.get_ident():
            raise SessionError(
                "This session is inside a step of this very thread (a callback or a signal "
                "handler calls close). Close it when the step is over."
            )
        self.closing = True
        stop()
        with self._lock:
            if not self.closed:
                self.closed = True
                give_back()
