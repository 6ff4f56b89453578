"""Asking a worker process: what runs in it may run out of memory, or abort, without harm."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from labkit.bench.cgroup import MemoryCgroup, memory_cgroup
from labkit.errors import BenchError

_LAST_WORDS = 400


def ask(job: dict[str, Any], *, limit_mib: float | None = None) -> dict[str, Any]:
    """Run `job` in a process of its own, under a memory limit if one is given.

    Returns:
        the worker's answer: "ok" and its figures, or "ok" False and a "reason". With a limit also
        "cgroup_peak_bytes".

    Raises:
        BenchError: no process can be started, or no cgroup made.
    """
    with contextlib.ExitStack() as stack:
        group = None
        if limit_mib is not None:
            group = stack.enter_context(memory_cgroup(int(limit_mib * 2**20)))
        process = stack.enter_context(_worker())
        if group:
            group.add(process.pid)
        line = _talk(process, job)
        answer = json.loads(line) if line else {"ok": False, "reason": _end_of(process, group)}
        if group:
            answer["cgroup_peak_bytes"] = group.peak_bytes()
        return answer


@contextlib.contextmanager
def _worker() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "labkit.prefill_lab.worker"]
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    except OSError as error:
        raise BenchError(f"no process can be started to measure in: {error}") from error
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _talk(process: subprocess.Popen[str], job: dict[str, Any]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        return process.stdout.readline()
    except BrokenPipeError:
        return ""


def _end_of(process: subprocess.Popen[str], group: MemoryCgroup | None) -> str:
    """Why a worker went away without an answer."""
    code = process.wait()
    if group and group.oom_kills():
        limit = group.limit_bytes / 2**20
        return f"out of memory: the limit of {limit:,.0f} MiB is too small for this path"
    words = process.stderr.read().strip()[-_LAST_WORDS:] if process.stderr else ""
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return f"llama.cpp ended the process ({name}){': ' + words if words else ''}"
    return f"the process ended with code {code}{': ' + words if words else ''}"
