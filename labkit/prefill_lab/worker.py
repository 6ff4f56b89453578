"""The process in which one path is measured.

`python -m labkit.prefill_lab.worker` reads one JSON job from its standard input, so that its parent
can move it into a memory cgroup while it is still small, and answers with one JSON line: the
figures of `measure`, or for a job with a `text` its token ids. An error of labkit is an answer as
well. Whatever happens to this process, its parent lives on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any


def main() -> None:
    """Read the job, measure, answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process when it wants to
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    answer = {"ok": True}
    from labkit.errors import LabkitError

    try:
        answer |= _answer(job)
    except LabkitError as error:
        answer = {"ok": False, "reason": str(error)}
    except MemoryError:
        answer = {"ok": False, "reason": "Python got no more memory"}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # what a library does at exit is not worth waiting for


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    if "text" in job:
        from labkit.bench.runner import prompt_tokens

        return {"prompt": prompt_tokens(job["model"], job["text"], 0)}
    from labkit.prefill_lab.measure import measure

    return measure(job)


def _leave_with_the_parent() -> None:
    while sys.stdin.readline():
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
