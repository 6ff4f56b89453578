"""`FileReader`: expert slices from the model's files into memory, over several lanes.

With direct I/O the reads are widened to whole blocks, which land in place because a window keeps
the file's alignment. The widened edges hold the neighbours' true bytes, so a block that two slices
share may be read twice and is the same each time: no bounce buffer is needed.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import OptionError, ReadError
from labkit.runtime.memory import BLOCK, FileWindow


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """File bytes [start, stop) of a shard, into the window; `what` names them in an error."""

    shard: int
    start: int
    stop: int
    window: FileWindow
    what: str


class FileReader:
    """Reads slices of the files `paths`, `lanes` at a time.

    Args:
        paths: the model's shards; a request names one by its index.
        lanes: how many reads are under way at once.
        direct_io: True past the page cache, False through it, None direct where the file system
            can. `self.direct_io` says what is done, `self.direct_io_note` why.

    Raises:
        ReadError: a file cannot be opened, or direct I/O was asked for and cannot be had.
    """

    def __init__(
        self, paths: Sequence[Path], *, lanes: int = 4, direct_io: bool | None = None
    ) -> None:
        if lanes < 1:
            raise OptionError(f"lanes is {lanes}; at least one read must be able to run")
        self.paths = list(paths)
        self.lanes = lanes
        self._files: list[int] = []
        self.direct_io, self.direct_io_note = _choose_direct_io(self.paths, direct_io)
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
        if self.direct_io:
            flags |= os.O_DIRECT
        try:
            for path in self.paths:
                self._files.append(os.open(path, flags))
        except OSError as error:
            self.close()
            raise ReadError(f"{error.filename}: cannot be opened: {error.strerror}") from error
        self._sizes = [os.fstat(file).st_size for file in self._files]
        self._pool: ThreadPoolExecutor | None = None
        self._pool_lock = threading.Lock()

    def read(self, requests: Sequence[ReadRequest]) -> int:
        """Do all reads and return when the last is in place.

        Returns:
            Bytes that were read from the files, widened edges included.

        Raises:
            ReadError: the first failure, after every other read of this call has ended.
        """
        if len(requests) < 2 or self.lanes == 1:
            return sum(map(self._read_one, requests))
        shares = [requests[lane :: self.lanes] for lane in range(min(self.lanes, len(requests)))]
        pool = self._lanes_pool()
        futures = [pool.submit(self._read_share, share) for share in shares]
        wait(futures)
        errors = [error for future in futures if (error := future.exception())]
        if errors:
            raise errors[0]
        return sum(future.result() for future in futures)

    def close(self) -> None:
        """End the lanes and close the files. A second call does nothing."""
        pool, self._pool = getattr(self, "_pool", None), None
        if pool:
            pool.shutdown()
        while self._files:
            os.close(self._files.pop())

    def _lanes_pool(self) -> ThreadPoolExecutor:
        with self._pool_lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.lanes, thread_name_prefix="labkit-lane")
            return self._pool

    def _read_share(self, share: Sequence[ReadRequest]) -> int:
        return sum(map(self._read_one, share))

    def _read_one(self, request: ReadRequest) -> int:
        start, stop = request.start, request.stop
        if self.direct_io:
            start -= start % BLOCK
            # The last block of a file is cut by the file's end, which the kernel allows.
            stop = -(-stop // BLOCK) * BLOCK
        # A view that an error's traceback kept alive would keep the window from being unmapped.
        with request.window.view(start, stop) as target:
            return self._fill(request, target, start)

    def _fill(self, request: ReadRequest, target: memoryview, start: int) -> int:
        """Read from `start` until all that was asked for is there; bytes read."""
        done = 0
        while start + done < request.stop:
            try:
                with target[done:] as rest:
                    got = os.preadv(self._files[request.shard], [rest], start + done)
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


def _choose_direct_io(paths: Sequence[Path], wanted: bool | None) -> tuple[bool, str]:
    if wanted is False:
        return False, "buffered reads were asked for"
    problem = next(filter(None, map(direct_io_problem, paths)), None)
    if problem is None:
        return True, "the file system takes direct reads"
    if wanted:
        raise ReadError(f"{problem} Open the model with direct_io=False or None.")
    return False, problem


def direct_io_problem(path: Path) -> str | None:
    """Why direct I/O cannot be used on `path`, or None where a direct read of it worked."""
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
        return "This platform has no direct I/O (O_DIRECT); reads go through the page cache."
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return f"{path}: this file system has no direct I/O; reads go through the page cache."
        raise ReadError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        with mmap.mmap(-1, BLOCK) as block, memoryview(block) as view:
            os.preadv(file, [view], 0)
    except OSError as error:
        return f"{path}: a direct read of {BLOCK} bytes fails ({error.strerror})."
    finally:
        os.close(file)
    return None
