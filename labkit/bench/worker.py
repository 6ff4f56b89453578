"""The process in which one case is measured.

`python -m labkit.bench.worker` waits for one JSON job on its standard input, so that its parent can
move it into a memory cgroup while it is still small, and answers with one JSON line on its standard
output: `{"ok": true, ...}` with the figures of `runner.measure` (for a job with a `text`, its
tokens as `prompt`), or `{"ok": false, "kind": class name,
"reason": message}` for an error of labkit. When the parent goes away, it goes as well.
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
    # Ctrl-C reaches the whole group; the parent ends this process when it wants to.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    from labkit.bench.runner import (
        measure,
        prompt_tokens,
    )  # after joining the cgroup: imports take memory
    from labkit.errors import LabkitError

    answer: dict[str, Any]
    try:
        if "text" in job:
            answer = {"prompt": prompt_tokens(job["model"], job["text"], job["seed"])}
        else:
            answer = measure(job)
        answer["ok"] = True
    except LabkitError as error:
        answer = {"ok": False, "kind": type(error).__name__, "reason": str(error)}
    except MemoryError:
        answer = {"ok": False, "kind": "MemoryError", "reason": "Python got no more memory."}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # what a library does at exit is not worth waiting for


def _leave_with_the_parent() -> None:
    while sys.stdin.readline():
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
