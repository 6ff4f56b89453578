"""Running one generation for a view: in the calling thread or in a worker, one at a time."""

from __future__ import annotations

import atexit
import contextvars
import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from labkit.errors import LabkitError, SessionError

if TYPE_CHECKING:
    from labkit.runtime import Session, TokenStep

log = logging.getLogger(__name__)

#: How the run ended: "finished", "stopped" or "error", and a sentence about it.
Ending = tuple[str, str]

_STOP_POLL_S = 0.1
_players: weakref.WeakSet[Player] = weakref.WeakSet()


class Player:
    """Feeds the steps of a session's generation to a callback, from a worker thread or in place.

    `on_step` gets every `TokenStep` (those of the prompt first, then each generated one) and
    `on_end` the ending. Both are called in the thread that generates; neither after `stop` has
    returned. Two runs at once raise `SessionError`.
    """

    def __init__(
        self,
        session: Session,
        on_step: Callable[[TokenStep], None],
        on_end: Callable[[Ending], None],
    ) -> None:
        self._session = session
        self._on_step = on_step
        self._on_end = on_end
        self._busy = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        _players.add(self)

    @property
    def playing(self) -> bool:
        """True from the start of a run until its ending was reported."""
        return self._busy.locked()

    def start(self, prompt: str, n_tokens: int) -> None:
        """Generate in a worker thread; returns at once."""
        self._take()
        # the context says which cell output belongs to: what the callbacks print lands there
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run,
            args=(self._run, prompt, n_tokens),
            name="labkit-live-routing",
            daemon=True,
        )
        self._thread.start()

    def run(self, prompt: str, n_tokens: int) -> None:
        """Generate in this thread; raises what the generation raised, after reporting it."""
        self._take()
        error = self._run(prompt, n_tokens)
        if error is not None:
            raise error

    def stop(self) -> None:
        """End a run within a token (a layer of prefill) and wait for its thread."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        self._stop.set()
        while thread.is_alive():
            # again and again: an interrupt that comes before the first decode may be lost
            self._session.interrupt()
            thread.join(_STOP_POLL_S)
        self._thread = None

    def _take(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise SessionError(
                "This view is generating already. Press Stop, or wait until it has finished."
            )
        self._stop.clear()

    def _run(self, prompt: str, n_tokens: int) -> BaseException | None:
        error: BaseException | None = None
        try:
            self._generate(prompt, n_tokens)
            ending: Ending = ("finished", "")
        except KeyboardInterrupt as interrupt:
            ending, error = ("stopped", "Stopped."), interrupt
        except LabkitError as known:
            ending, error = ("error", str(known)), known
        except Exception as unknown:  # in a worker nobody else would see it
            log.exception("live routing: the generation failed")
            ending, error = ("error", f"{type(unknown).__name__}: {unknown}"), unknown
        try:
            self._on_end(ending)
        finally:
            self._busy.release()
        return error

    def _generate(self, prompt: str, n_tokens: int) -> None:
        self._session.reset()
        for number, step in enumerate(self._session.stream(prompt, n_tokens)):
            if number == 0:
                for before in self._session.prefill_steps:
                    self._on_step(before)
            self._on_step(step)
            if self._stop.is_set():
                raise KeyboardInterrupt


def stop_all() -> None:
    """Stop every run of this process, so that a new view has the machine to itself."""
    for player in list(_players):
        player.stop()


atexit.register(stop_all)  # a thread inside llama.cpp while Python goes down would crash
