"""`Home`: the process that something was made in. A forked child has its memory, not its threads.

So whatever waits for a thread would wait for ever in a child, and what a child changes its parent
never sees.
"""

from __future__ import annotations

import os

from labkit.errors import SessionError


class Home:
    """The process that made this object."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and no child that was forked from it."""
        return self._pid == os.getpid()

    def check(self, what: str) -> None:
        """Raise SessionError in a child: `what` cannot be used there."""
        if not self.is_here:
            raise SessionError(
                f"{what} was opened by the process that this one was forked from, and its threads "
                "stayed there. Start processes with the method 'spawn' instead of 'fork', and open "
                "a session in each."
            )
