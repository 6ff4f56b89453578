"""`NodeCounter`: counts the nodes that llama.cpp computes, in C, and calls Python at chosen ones.

After each node llama.cpp calls its abort callback, on the thread that runs the graph, while the
others wait for it before the next node. libc's `fgetc` can be that callback: it takes a byte from
a stream's buffer, and zero means "go on". Only when the buffer is used up is the stream's reader
called, and that reader is Python. So a buffer of n zeros is n nodes at a nanosecond each, and then
Python runs between two nodes of a graph that knows nothing of it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

_BUFFER_BYTES = 4096
_FULLY_BUFFERED = 0  # _IOFBF of setvbuf(3)

_Reader = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class _Functions(ctypes.Structure):
    """`cookie_io_functions_t` of fopencookie(3)."""

    _fields_ = [
        ("read", _Reader),
        ("write", ctypes.c_void_p),
        ("seek", ctypes.c_void_p),
        ("close", ctypes.c_void_p),
    ]


class NodeCounter:
    """An abort flag that can also count. Check `is_available` first.

    Args:
        on_count: called with the index of a stop, on the thread that runs the graph, after its
            node. What it raises ends the graph.

    Attributes:
        function, data: what to give llama.cpp as its abort callback.
        count: nodes computed since `begin`, where each one is counted.
        failure: what was raised since `begin`, at any place; it ended the graph.
    """

    def __init__(self, on_count: Callable[[int], None]) -> None:
        self._on_count = on_count
        self._libc = libc = _libc()
        self._buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
        self._address = ctypes.addressof(self._buffer)
        self._reader = _Reader(self._refill)  # libc keeps a pointer to it
        stream = libc.fopencookie(None, b"r", _Functions(self._reader))
        if not stream:
            raise MemoryError("fopencookie failed")
        libc.setvbuf(stream, self._address, _FULLY_BUFFERED, _BUFFER_BYTES)
        self._stream: int | None = stream
        self.function = ctypes.cast(libc.fgetc_unlocked, ctypes.c_void_p)
        self.data = ctypes.c_void_p(stream)
        self._is_empty = True
        self.begin()

    def begin(self, stops: Sequence[int] | None = None) -> None:
        """Call before a graph.

        Args:
            stops: after how many nodes to call `on_count`, in ascending order from 1; the last is
                one more than the graph has nodes, and only `end` gets there. None counts each
                node, and calls nothing.
        """
        if not self._is_empty:
            self._libc.purge(self._stream)
            self._libc.clearerr(self._stream)
        self._is_empty = False
        self._stops = stops
        self._next = 0
        self._ending = False
        self.count = 0
        self.failure: BaseException | None = None

    def end(self) -> bool:
        """Call after a graph that ran to its end: whether it had as many nodes as `stops` told."""
        assert self._stops
        self._ending = True
        self._libc.fgetc_unlocked(self._stream)
        self._is_empty = self._next == len(self._stops)
        return self._is_empty

    @property
    def overran(self) -> bool:
        """Whether the graph had more nodes than told; it was stopped then."""
        return self._stops is not None and self._next == len(self._stops) and not self._ending

    def set(self) -> None:
        """Ask llama.cpp to stop at the next node. Safe from any thread and signal handler."""
        ctypes.memset(self._address, 1, _BUFFER_BYTES)

    def clear(self) -> None:
        """Let graphs run again."""
        ctypes.memset(self._address, 0, _BUFFER_BYTES)

    def close(self) -> None:
        """Nothing calls `function` any more. A second call does nothing."""
        stream, self._stream = self._stream, None
        if stream:
            self._libc.fclose(stream)

    def _refill(self, _cookie: int, _buffer: int, size: int) -> int:
        """A node was computed and the buffer is used up; how many of its bytes are there again.

        The buffer is ours and holds what `set` or `clear` left there, so nothing is copied. 0 is
        the end of the stream, which is not zero for llama.cpp, so the graph stops.
        """
        try:
            if self._stops is None:
                self.count += 1
                return 1
            n_more = min(self._nodes_to_next(self._stops), size)
            self.count += n_more
            return n_more
        except BaseException as error:
            # As another thread may have it raised here: it would be lost in C.
            self.failure = self.failure or error
            self.set()
            return 0

    def _nodes_to_next(self, stops: Sequence[int]) -> int:
        """How many nodes may pass, this one included, until Python must run again."""
        number, index = self.count + 1, self._next
        if index == len(stops):
            return 0
        if number == stops[index]:
            self._next = index = index + 1
            if index == len(stops):
                return 1 if self._ending else 0
            self._on_count(index - 1)
        return stops[index] - number


@functools.cache
def is_available() -> bool:
    """Whether this libc has what counting needs (Linux), and whether it counts right."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        _libc()
    except AttributeError:
        return False
    reached: list[int] = []
    counter = NodeCounter(reached.append)
    tick = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(counter.function.value or 0)
    counter.begin([1, 3, 6])
    told = [tick(counter.data) for _ in range(5)]
    counted = reached == [0, 1] and not any(told) and counter.end()
    counter.set()
    stopped = tick(counter.data)
    counter.close()
    return counted and stopped


@functools.cache
def _libc() -> Any:
    libc: Any = ctypes.CDLL(None)
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    libc.fopencookie.restype = pointer
    libc.fopencookie.argtypes = [pointer, ctypes.c_char_p, _Functions]
    libc.setvbuf.argtypes = [pointer, pointer, integer, ctypes.c_size_t]
    libc.purge = getattr(libc, "__fpurge")  # a class would mangle the name
    for function in (libc.fgetc_unlocked, libc.clearerr, libc.purge, libc.fclose):
        function.argtypes = [pointer]
    return libc
