"""`AbortFlag`: how a running graph is stopped, from any thread, without a call into Python."""

from __future__ import annotations

import ctypes
import sys


class AbortFlag:
    """A byte that llama.cpp looks at after every node.

    llama.cpp calls a function with a pointer and stops if it returns true; libc's `strlen` on
    this buffer is such a function: the string is empty until the flag is set.

    Attributes:
        function, data: what to give llama.cpp as its abort callback.
    """

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(2)
        libc = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        self.function = ctypes.cast(libc.strlen, ctypes.c_void_p)
        self.data = ctypes.cast(self._buffer, ctypes.c_void_p)

    def set(self) -> None:
        """Ask llama.cpp to stop at the next node. Safe from any thread and signal handler."""
        self._buffer[0] = b"x"

    def clear(self) -> None:
        """Let graphs run again."""
        self._buffer[0] = b"\0"

    def close(self) -> None:
        """Nothing calls `function` any more."""
