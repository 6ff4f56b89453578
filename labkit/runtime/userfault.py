"""`userfaultfd`: a thread that touches a page which is not there sleeps until somebody fills it.

So compute can begin while reads are under way, and waits exactly where it must, with llama.cpp
unchanged. The kernel's calls are used by number, as its headers fix them.
"""

from __future__ import annotations

import errno
import os
import select
import struct
from collections.abc import Callable

from labkit import host
from labkit.runtime.memory import PAGE

_IOC_REGISTER = 0xC020AA00
_IOC_UNREGISTER = 0x8010AA01
_IOC_WAKE = 0x8010AA02
_IOC_COPY = 0xC028AA03
_IOC_ZEROPAGE = 0xC020AA04
_REGISTER_MISSING = 1
_PAGE_FAULT = 0x12
_MESSAGE_BYTES = 32
# Their arguments.
_REGISTER = struct.Struct("QQQQ")  # address, length, mode, what the range can do
_RANGE = struct.Struct("QQ")  # address, length
_COPY = struct.Struct("QQQQq")  # target, source, length, mode, how much was done or an error
_ZEROPAGE = struct.Struct("QQQq")  # target, length, mode, the same
_ANSWER = struct.Struct("q")


class UserFault:
    """Memory in which missing pages are waited for.

    Raises:
        OSError: the system does not offer it; `labkit.host.userfaultfd_problem` says so before.
    """

    def __init__(self) -> None:
        import fcntl  # some systems have none, and no userfaultfd

        self._ioctl = fcntl.ioctl
        self._fd = host.open_userfaultfd()
        self._open = [self._fd]
        try:
            self._wake_reader, self._waker = os.pipe()
        except OSError:
            self.close()
            raise
        self._open += [self._wake_reader, self._waker]
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._poll.register(self._wake_reader, select.POLLIN)

    def register(self, address: int, length: int) -> None:
        """From now on a thread that touches a missing page of this range sleeps."""
        self._call(_IOC_REGISTER, _REGISTER.pack(address, length, _REGISTER_MISSING, 0))

    def unregister(self, address: int, length: int) -> None:
        """A missing page of this range is an ordinary one again, which comes as zeros."""
        self._call(_IOC_UNREGISTER, _RANGE.pack(address, length))

    def wake(self, address: int, length: int) -> None:
        """Have threads that sleep on this range look again."""
        self._call(_IOC_WAKE, _RANGE.pack(address, length))

    def fill(self, target: int, source: int, length: int) -> None:
        """Copy pages from `source` to those pages of `target` that are missing, and wake."""
        self._fill(
            _IOC_COPY, target, length, lambda at, n: _COPY.pack(at, source + at - target, n, 0, 0)
        )

    def fill_zero(self, target: int, length: int) -> int:
        """Fill the missing pages with zeros: for a graph that is to end, not to be right.

        Returns how many bytes were missing.
        """
        return self._fill(_IOC_ZEROPAGE, target, length, lambda at, n: _ZEROPAGE.pack(at, n, 0, 0))

    def wait(self, timeout_s: float | None) -> bool:
        """Return when a thread sleeps, or after so long; False once `stop` was called."""
        ready = dict(self._poll.poll(None if timeout_s is None else timeout_s * 1e3))
        return self._wake_reader not in ready

    def take_sleeps(self) -> list[int]:
        """Addresses of the pages that threads went to sleep on since the last call."""
        try:
            messages = os.read(self._fd, 256 * _MESSAGE_BYTES)
        except BlockingIOError:  # there are none, or the pages came before we looked
            return []
        return [
            struct.unpack_from("Q", messages, at + 16)[0]
            for at in range(0, len(messages), _MESSAGE_BYTES)
            if messages[at] == _PAGE_FAULT
        ]

    def stop(self) -> None:
        """Have `wait` return False."""
        os.write(self._waker, b"x")

    def close(self) -> None:
        """Give the descriptors back; registered memory is ordinary memory again.

        A second call does nothing: the numbers may be somebody else's files by then.
        """
        while self._open:
            os.close(self._open.pop())

    def _fill(
        self, request: int, target: int, length: int, pack: Callable[[int, int], bytes]
    ) -> int:
        at, end, filled = target, target + length, 0
        piece = length
        while at < end:
            argument = bytearray(pack(at, min(piece, end - at)))
            error = self._try(request, argument)
            if error in (0, errno.EAGAIN):
                done = max(0, _ANSWER.unpack_from(argument, len(argument) - _ANSWER.size)[0])
                at += done
                filled += done
            elif error == errno.ENOENT and piece > PAGE:
                piece = PAGE  # one call fills within one mapping, and moved pages divide them
            elif error in (errno.EEXIST, errno.ENOENT):
                # The page is there (a neighbour's read brought it, with the same bytes), or nobody
                # can sleep on it, since it was moved in whole.
                if error == errno.EEXIST:
                    self.wake(at, PAGE)
                at += PAGE
            else:
                raise OSError(error, f"filling memory: {os.strerror(error)}")
        return filled

    def _call(self, request: int, argument: bytes) -> None:
        if error := self._try(request, bytearray(argument)):
            raise OSError(error, f"userfaultfd: {os.strerror(error)}")

    def _try(self, request: int, argument: bytearray) -> int:
        """errno of an ioctl, which answers into the argument; the GIL is free meanwhile."""
        try:
            self._ioctl(self._fd, request, argument)
        except OSError as failure:
            return failure.errno or 0
        return 0
