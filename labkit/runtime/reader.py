"""`FileReader`: bytes of the model's files into memory, over several lanes.

With direct I/O the reads are widened to whole blocks, which land in place because memory keeps the
file's alignment. The widened edges hold the neighbours' true bytes, so a block that two slices
share may be read twice and is the same each time: no bounce buffer is needed.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from labkit.errors import OptionError, ReadError, ResourceError
from labkit.runtime.direct_io import choose_direct_io
from labkit.runtime.home import Home
from labkit.runtime.memory import BLOCK, PAGE
from labkit.runtime.scheduling import run_soon_and_briefly
from labkit.runtime.threads import start_thread

SLOW_READ_S = 5.0
"""A read that takes longer counts as one that will not end."""


class Target(Protocol):
    """Where a read lands."""

    whole_pages: bool

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Writable memory for file bytes [start, stop), in pieces, released after the read."""
        ...

    def landed(self, whole: bool) -> None:
        """The read ended, on a lane; `whole` if all bytes are there."""
        ...


@dataclass(slots=True, eq=False)
class ReadRequest:
    """File bytes [start, stop) of a shard, into the target; `str(what)` names them in an error."""

    shard: int
    start: int
    stop: int
    target: Target
    what: object


class Batch:
    """Reads that were submitted together.

    Attributes:
        bytes_read: bytes read from the files so far, widened edges included.
        error: the first failure; other reads of the batch may still be under way.
        began_s, ended_s: `time.perf_counter` when the first read began and the last ended.
    """

    def __init__(self, n: int) -> None:
        self._left = n
        self._gate = threading.Lock()
        if n:
            self._gate.acquire()
        self.bytes_read = 0
        self.error: ReadError | None = None
        self.began_s = self.ended_s = 0.0
        self._begun = self._withdrawn = False

    @property
    def done(self) -> bool:
        """Whether every read has ended."""
        return self._left == 0

    def wait(self, timeout_s: float) -> bool:
        """Return when all reads have ended, or False after so many seconds."""
        if not self._gate.acquire(timeout=timeout_s):
            return False
        self._gate.release()
        return True

    def _withdraw(self) -> bool:
        # Under the reader's lock.
        if self._begun or self._withdrawn:
            return False
        self._withdrawn, self._left = True, 0
        self._gate.release()
        return True

    def _one_ended(self, got: int, error: ReadError | None, began_s: float) -> None:
        # Under the reader's lock.
        self.began_s = min(self.began_s, began_s) if self.began_s else began_s
        self.bytes_read += got
        self.error = self.error or error
        self._left -= 1
        if self._left == 0:
            self.ended_s = time.perf_counter()
            self._gate.release()


class FileReader:
    """Reads from the files `paths`, `lanes` at a time.

    Args:
        paths: the model's shards; a request names one by its index.
        lanes: how many reads are under way at once.
        direct_io: True past the page cache, False through it, None direct where the file system
            can. `self.direct_io` says what is done, `self.direct_io_note` why.
        slow_read_s: a wait for reads gives up when one takes longer.

    Attributes:
        stuck: a read that took too long; the memory that it reads into stays in doubt.
        on_error: called on a lane with the first failure of a read, before its target hears of it.

    Raises:
        ReadError: a file cannot be opened, or direct I/O was asked for and cannot be had.
        ResourceError: the system starts no thread for a lane.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        lanes: int = 4,
        direct_io: bool | None = None,
        slow_read_s: float = SLOW_READ_S,
    ) -> None:
        if lanes < 1:
            raise OptionError(f"lanes is {lanes}; at least one read must be able to run")
        self._home = Home()
        self.paths = list(paths)
        self.lanes = lanes
        self.slow_read_s = slow_read_s
        self.stuck: ReadError | None = None
        self.on_error: Callable[[ReadError], None] | None = None
        self._files: list[int] = []
        self.direct_io, self.direct_io_note = choose_direct_io(self.paths, direct_io)
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
        if self.direct_io:
            flags |= os.O_DIRECT
        self._threads: list[threading.Thread] = []
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._urgent: deque[tuple[ReadRequest, Batch]] = deque()
        self._later: deque[tuple[ReadRequest, Batch]] = deque()
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[float, ReadRequest]] = {}
        self._slow: dict[float, float] = {}  # by when a read began: when it was first seen as slow
        self._busy_since = 0.0
        self._busy_s = 0.0
        try:
            for path in self.paths:
                self._files.append(os.open(path, flags))
            self._sizes = [os.fstat(file).st_size for file in self._files]
            self._start_lanes()
        except OSError as error:
            self.close()
            raise ReadError(f"{error.filename}: cannot be opened: {error.strerror}") from error
        except ResourceError:
            self.close()
            raise

    def submit(self, requests: Sequence[ReadRequest], *, urgent: bool = True) -> Batch:
        """Start reads; those that are not urgent let the others go first.

        Raises:
            SessionError: in a process that was forked from the reader's, where no lanes are.
        """
        self._home.check("This reader")
        batch = Batch(len(requests))
        (self._urgent if urgent else self._later).extend((request, batch) for request in requests)
        for _ in requests:
            self._tokens.put(True)
        return batch

    def withdraw(self, batch: Batch) -> bool:
        """Take a batch back; False if one of its reads has begun, so that all of them will end."""
        with self._lock:
            return batch._withdraw()

    def finish(self, batch: Batch) -> int:
        """Wait for a batch; bytes that it read.

        Raises:
            ReadError: the first failure, after every read of the batch has ended; or a read that
                takes longer than `slow_read_s`, which is then still under way.
        """
        if not self.drain(batch) and self.stuck:
            raise self.stuck
        if batch.error:
            raise batch.error
        return batch.bytes_read

    def read(self, requests: Sequence[ReadRequest]) -> int:
        """Do all reads and return, when the last is in place, the bytes read. See `finish`."""
        return self.finish(self.submit(requests))

    def drain(self, batch: Batch) -> bool:
        """Wait until a batch has ended, well or not; False if a read is stuck."""
        self._home.check("This reader")
        while not batch.wait(self.slow_read_s / 4):
            if self.look_for_stuck():
                return batch.done
        return True

    def look_for_stuck(self) -> ReadError | None:
        """Note in `stuck` a read that takes too long, if there is one, and return it.

        The first look at a slow read only remembers it. In a process that was stopped meanwhile
        (Ctrl-Z) a read looks slow that has long ended in the kernel: it is gone at the second.
        """
        now = time.perf_counter()
        under_way = dict(self._under_way.copy().values())
        slow = [began_s for began_s in under_way if began_s < now - self.slow_read_s]
        self._slow = {began_s: self._slow.get(began_s, now) for began_s in slow}
        for began_s, seen_s in self._slow.items():
            if now - seen_s > self.slow_read_s / 8 and not self.stuck:
                self.stuck = self._error(
                    under_way[began_s],
                    f"the read has not ended after {self.slow_read_s:g} seconds",
                )
        return self.stuck

    @property
    def busy_s(self) -> float:
        """Time in which at least one read was under way, since the reader was opened."""
        with self._lock:
            open_s = time.perf_counter() - self._busy_since if self._under_way else 0.0
            return self._busy_s + open_s

    def close(self) -> bool:
        """End the lanes and close the files. A second call does nothing.

        A forked child closes its own descriptors; it has no lanes.

        Returns:
            False if a read is stuck: its lane and the memory it reads into must stay.
        """
        threads, self._threads = self._threads, []
        if not self._home.is_here:
            threads = []
        for _ in threads:
            self._tokens.put(False)
        for thread in threads:
            thread.join(self.slow_read_s)
        if any(thread.is_alive() for thread in threads):
            return False
        while self._files:
            os.close(self._files.pop())
        return True

    def _start_lanes(self) -> None:
        for lane in range(self.lanes):
            self._threads.append(start_thread(f"labkit-lane-{lane}", self._run_lane, lane))

    def _run_lane(self, lane: int) -> None:
        # A lane works for microseconds between reads that last longer; while it waits for a
        # processor that computes, the disk has one read less to do.
        run_soon_and_briefly()
        while self._tokens.get():
            try:
                request, batch = self._urgent.popleft()
            except IndexError:
                request, batch = self._later.popleft()
            self._serve(lane, request, batch)

    def _serve(self, lane: int, request: ReadRequest, batch: Batch) -> None:
        began_s = time.perf_counter()
        with self._lock:
            if batch._withdrawn:
                return
            batch._begun = True
            if not self._under_way:
                self._busy_since = began_s
            self._under_way[lane] = began_s, request
        got, failure = 0, None
        try:
            got = self._read_one(request)
            request.target.landed(True)
        except BaseException as error:
            failure = error if isinstance(error, ReadError) else self._error(request, str(error))
            failure.__cause__ = error.__cause__
            batch.error = batch.error or failure  # before anybody is told, and looks for it
            if self.on_error:
                self.on_error(failure)
            request.target.landed(False)
        with self._lock:
            del self._under_way[lane]
            if not self._under_way:
                self._busy_s += time.perf_counter() - self._busy_since
            batch._one_ended(got, failure, began_s)

    def _read_one(self, request: ReadRequest) -> int:
        start, stop = request.start, request.stop
        unit = PAGE if request.target.whole_pages else BLOCK if self.direct_io else 1
        start -= start % unit
        # The last block of a file is cut by the file's end, which the kernel allows.
        stop = -(-stop // unit) * unit
        buffers = request.target.buffers(start, stop)
        try:
            return self._fill(request, buffers, start)
        finally:
            _release(buffers)

    def _fill(self, request: ReadRequest, buffers: list[memoryview], start: int) -> int:
        """Read from `start` until all that was asked for is there; bytes read."""
        done = 0
        while start + done < request.stop:
            try:
                got = _read_into(self._files[request.shard], buffers, start, done)
            except OSError as error:
                raise self._error(request, f"the system says: {error.strerror}") from error
            end = start + done + got
            if self.direct_io and end < request.stop:
                got -= got % BLOCK  # a direct read can only go on from a whole block
            if got == 0:
                raise self._error(
                    request,
                    f"the file ends at byte {end}, though it had {self._sizes[request.shard]} "
                    "bytes when it was opened; it was cut or replaced",
                )
            done += got
        return done

    def _error(self, request: ReadRequest, reason: str) -> ReadError:
        return ReadError(
            f"{self.paths[request.shard]}: cannot read {request.what} "
            f"(bytes {request.start} to {request.stop}): {reason}. "
            "No token was computed from it. Check the file and the disk, then open it again."
        )


def _read_into(file: int, buffers: list[memoryview], start: int, done: int) -> int:
    """Read on at `start + done`, where `done` bytes of the buffers are full; bytes read."""
    if not done:
        return os.preadv(file, buffers, start)
    rest, skip = [], done
    for buffer in buffers:
        if skip < len(buffer):
            rest.append(buffer[skip:])
        skip = max(0, skip - len(buffer))
    try:
        return os.preadv(file, rest, start + done)
    finally:
        _release(rest)


def _release(views: Iterable[memoryview]) -> None:
    # One that an error's traceback kept alive would keep its memory from being unmapped.
    for view in views:
        view.release()
