"""`Gate`: one thread at a time, in one process, until it is closed; and out by the door."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TypeVar

from labkit.errors import LabkitError, SessionError
from labkit.runtime.home import Home
from labkit.runtime.running import called_from, is_running

Error = TypeVar("Error", bound=BaseException)

_LOOK_S = 0.001


class Gate:
    """Guards what llama.cpp does not: two threads in one context, or use after it was freed.

    Be the only one inside by `with gate:`, which raises SessionError where that cannot be. Who
    leaves by an error of labkit, or by one that was `excuse`d, has left everything in order. Any
    other exception came from elsewhere (a timeout that another thread throws, a debugger, no
    memory), at any place, perhaps between two lines that belong together. Then nobody gets in
    again, and closing is all that is left.

    Attributes:
        closed: nobody gets in any more.
        closing: somebody waits to close; whoever is inside should leave.
        home: the process in which it opens.
    """

    def __init__(self) -> None:
        self.closed = self.closing = False
        self.home = Home()
        # The frame that is inside. It is put here by one indivisible call: wherever an exception
        # from elsewhere comes, who is inside is known, and whether that still runs as well.
        self._inside: dict[str, FrameType] = {}
        self._lock = threading.Lock()
        self._excused: BaseException | None = None
        self._given_back = False

    def __enter__(self) -> None:
        self.check_open()
        frame = sys._getframe(1)
        if self._inside.setdefault("frame", frame) is not frame:
            raise SessionError(
                "This session is at work in another thread. Wait for it, or open a second session."
            )
        if self.closed:
            self._inside.clear()
            self.check_open()

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self.forgives(error):
            self._excused = None
            self._inside.clear()

    def excuse(self, error: Error) -> Error:
        """`error` may leave: whoever raises it has put everything in order."""
        self._excused = error
        return error

    def forgives(self, error: BaseException | None) -> bool:
        """Whether everything is in order in this process although somebody leaves by `error`."""
        known = error is None or error is self._excused or isinstance(error, LabkitError)
        return known and self.home.is_here

    def check_open(self) -> None:
        """Raise SessionError where nobody can get in."""
        self.home.check("This session")
        if self.closed:
            raise SessionError("This session is closed. Open a new one.")
        holder = self._inside.get("frame")
        if holder and not is_running(holder) and self._inside.get("frame") is holder:
            raise SessionError(
                "A step of this session was torn out of its work by an exception from elsewhere (a "
                "timeout, a debugger, no memory), so what it holds is in doubt. Close it and open "
                "the model again."
            )

    def close(self, stop: Callable[[], None], give_back: Callable[[], None]) -> None:
        """Have whoever is inside leave by `stop`, then `give_back` once. Elsewhere it does nothing.

        Raises:
            SessionError: called from inside.
        """
        if self._given_back or not self.home.is_here:
            return
        frame = sys._getframe()
        if called_from(self._inside.get("frame"), frame):
            raise SessionError(
                "This session is inside a step of this very thread (a callback or a signal "
                "handler calls close). Close it when the step is over."
            )
        self.closing = True
        stop()
        while (holder := self._inside.setdefault("frame", frame)) is not frame:
            if is_running(holder):
                time.sleep(_LOOK_S)
            else:
                self._leave(holder)
        try:
            if not self._given_back:
                self.closed = True
                give_back()
                self._given_back = True
        finally:
            self._leave(frame)

    def _leave(self, frame: FrameType) -> None:
        with self._lock:
            if self._inside.get("frame") is frame:
                self._inside.clear()
