"""A thread asks for short slices of time, and for nothing else."""

from __future__ import annotations

import os
import platform
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from labkit.runtime.scheduling import run_soon_and_briefly

GETATTR = {"x86_64": 315, "aarch64": 275, "riscv64": 275, "ppc64le": 356}.get(platform.machine())


def attributes() -> tuple[int, int, int]:
    """Policy, niceness and slice in nanoseconds of the calling thread, as the kernel tells."""
    import ctypes

    answer = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(ctypes.c_long(GETATTR or 0), 0, answer, 48, 0) == 0
    _, policy, _, nice, _, slice_ns, _, _ = struct.unpack("IIQiIQQQ", answer.raw)
    return policy, nice, slice_ns


def test_only_the_slice_of_the_calling_thread_changes() -> None:
    def ask() -> tuple:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own_nice)
        before = attributes()
        if not run_soon_and_briefly():
            pytest.skip("this system does not take the wish")
        return before, attributes()

    if GETATTR is None or not hasattr(os, "getpriority"):
        pytest.skip("no sched_getattr here")
    main = attributes()
    own_nice = min(19, main[1] + 1)
    with ThreadPoolExecutor(1) as pool:
        before, after = pool.submit(ask).result()
    assert after[:2] == before[:2] == (main[0], own_nice)
    if before[2]:  # Linux 6.12 and later
        assert after[2] == 100_000 < before[2]
    assert attributes() == main
