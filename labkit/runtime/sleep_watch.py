"""Who sleeps on memory that is not there, for how long, and whether anybody will bring it.

A thread that computes with a slice nobody reads would sleep for ever: after an error inside the
callback, say, a graph still computes one node before it ends. So a thread of our own looks at each
sleep, and fills what nobody will bring.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable

from labkit.runtime.memory import PAGE
from labkit.runtime.threads import start_thread
from labkit.runtime.userfault import UserFault

_LOOK_S = 0.25


class SleepWatch:
    """Watches the sleeps on registered memory.

    Args:
        userfault: where they are told.
        is_coming: whether a read that will bring an address is under way.
        look: called with the page's address at a sleep on what does not come, or is gone again.
        tick: called while somebody may sleep, a few times a second; returns whether one may.

    Raises:
        ResourceError: the system starts no thread for it.
    """

    def __init__(
        self,
        userfault: UserFault,
        is_coming: Callable[[int], bool],
        look: Callable[[int], None],
        tick: Callable[[], bool],
    ) -> None:
        self._userfault = userfault
        self._is_coming, self._look, self._tick = is_coming, look, tick
        self._sleeps: list[tuple[float, int]] = []
        self._arrivals: list[tuple[int, int, float]] = []
        self._asked: set[int] = set()
        # A sleep that is long over may still be told of, when its page may be gone again. So all
        # that was told is looked at before arrivals are forgotten, by one thread at a time.
        self._lock = threading.Lock()
        self._thread = start_thread("labkit-sleeps", self._run)

    def arrived(self, start: int, stop: int) -> None:
        """Memory [start, stop) is there now."""
        self._arrivals.append((start, stop, time.perf_counter()))

    def slept_s(self) -> float:
        """Seconds since the last call in which at least one thread slept. No graph runs now.

        Our thread notes when a sleep begins, so short ones are late by what it takes to run.
        """
        with self._lock:
            self._look_at_sleeps()
            arrivals, self._arrivals = sorted(self._arrivals), []
            sleeps, self._sleeps = self._sleeps, []
            self._asked.clear()
        starts = [start for start, _, _ in arrivals]
        spans = []
        for began_s, address in sleeps:
            at = bisect.bisect_right(starts, address) - 1
            if at >= 0 and address < arrivals[at][1]:
                spans.append((began_s, max(began_s, arrivals[at][2])))
        return _union_s(spans)

    def close(self) -> None:
        """End the thread."""
        self._userfault.stop()
        self._thread.join()

    def _run(self) -> None:
        timeout_s = None
        while self._userfault.wait(timeout_s):
            with self._lock:
                self._look_at_sleeps()
            timeout_s = _LOOK_S if self._tick() else None

    def _look_at_sleeps(self) -> None:
        """Look at each sleep on what did not come; ask again where it came, and may be gone.

        What came in this graph may have been taken away since, after a failed read. A sleep on it
        that is long over and one that lasts look alike, so its page's sleepers are woken: only one
        that is still there goes to sleep again, and is told of anew.
        """
        doubtful = set()
        while addresses := self._userfault.take_sleeps():
            now = time.perf_counter()
            for address in addresses:
                self._sleeps.append((now, address))
                if self._is_coming(address):
                    continue  # as nearly all of them are
                if address in self._asked or not self._has_arrived(address):
                    self._look(address)
                else:
                    doubtful.add(address)
        for address in doubtful:
            self._asked.add(address)
            self._userfault.wake(address - address % PAGE, PAGE)

    def _has_arrived(self, address: int) -> bool:
        return any(start <= address < stop for start, stop, _ in list(self._arrivals))


def _union_s(spans: list[tuple[float, float]]) -> float:
    """Length of the union of (begin, end) spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
