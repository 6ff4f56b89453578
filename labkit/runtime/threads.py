"""Threads of the runtime, which the system may refuse to start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from labkit.errors import ResourceError


def start_thread(name: str, work: Callable[..., object], *arguments: Any) -> threading.Thread:
    """Begin `work(*arguments)` on a thread that does not keep the program from ending.

    Raises:
        ResourceError: the system starts no more threads.
    """
    thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ResourceError(
            f"The system does not start the thread {name}: {error}. Look at the limits on processes"
            " (`ulimit -u`, pids.max of a container), end other programs, or open the model with "
            "fewer lanes and threads."
        ) from error
    return thread


def check_threads(n: int) -> None:
    """Refuse where `n` more threads cannot run at once: llama.cpp's would end the process.

    Raises:
        ResourceError: the system starts fewer.
    """
    enough = threading.Event()
    started = []
    try:
        for number in range(n):
            started.append(start_thread(f"labkit-compute-{number}", enough.wait))
    finally:
        enough.set()
        for thread in started:
            thread.join()
