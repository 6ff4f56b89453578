"""Random sessions with interrupts end, and end right. LABKIT_SOAK_S makes it longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SECONDS = float(os.environ.get("LABKIT_SOAK_S", "15"))


def test_random_sessions_never_hang_and_never_differ() -> None:
    script = Path(__file__).with_name("soak.py")
    run = subprocess.run(
        [sys.executable, str(script), "--seconds", str(SECONDS), "--seed", "5"],
        capture_output=True,
        text=True,
        timeout=SECONDS + 240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads(run.stdout)
    assert summary["ok"]
    assert summary["outputs"] > summary["sessions"] > 0
    assert sum(count for name, count in summary.items() if name.startswith("fault: ")) > 0
