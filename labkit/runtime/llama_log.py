"""llama.cpp's log in Python logging, and the reason that it gave when something failed."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Iterator
from types import ModuleType

logger = logging.getLogger("labkit.llama")
logger.addHandler(logging.NullHandler())

# enum ggml_log_level; 5 continues the line before it.
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUE = 5

_local = threading.local()
_partial: dict[int, tuple[int, str]] = {}
_keep_alive: list = []


def install(llama: ModuleType) -> None:
    """Send llama.cpp's log to the logger `labkit.llama`, a record a line. Nothing is printed."""
    callback = llama.llama_log_callback(_on_log)
    _keep_alive.append(callback)
    llama.llama_log_set(callback, None)


def _on_log(level: int, text: bytes | None, _user_data: object) -> None:
    thread = threading.get_ident()
    old_level, line = _partial.pop(thread, (logging.INFO, ""))
    line += (text or b"").decode("utf-8", "replace")
    number = old_level if level == _CONTINUE else _LEVELS.get(level, logging.INFO)
    *whole, rest = line.split("\n")
    for one in whole:
        _emit(number, one)
    if rest:
        _partial[thread] = (number, rest)


def _emit(level: int, line: str) -> None:
    if not line.strip():
        return
    if level >= logging.WARNING:
        _kept().append((level, line.strip()))
    logger.log(min(level, getattr(_local, "highest", level)), line)


def forget() -> None:
    """Drop what was kept, before a call whose failure is to be explained."""
    _kept().clear()


def reason() -> str:
    """The errors since `forget`, or the warnings if there were none, for an exception's message."""
    for least in (logging.ERROR, logging.WARNING):
        if lines := [line for level, line in _kept() if level >= least]:
            return "; ".join(lines)
    return "llama.cpp gave no reason"


@contextlib.contextmanager
def failure_expected() -> Iterator[None]:
    """Log at debug level what llama.cpp says in this block, where an aborted graph is the aim."""
    _local.highest = logging.DEBUG
    try:
        yield
    finally:
        del _local.highest


def _kept() -> collections.deque[tuple[int, str]]:
    """Recent warnings and errors (level, line) of this thread: two sessions do not mix."""
    if not hasattr(_local, "recent"):
        _local.recent = collections.deque(maxlen=64)
    return _local.recent
