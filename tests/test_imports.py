"""Every module imports where llama.cpp is absent and the system is no Unix, and does so quietly."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import importlib, pkgutil, sys
# These know how to live without; on this system they load them all the same.
import anywidget, nbclient, nbconvert, papermill, psutil, pyarrow.fs
for name in ("llama_cpp", "resource", "fcntl", "termios", "pwd", "grp"):
    sys.modules[name] = None  # importing it raises ImportError
import labkit
for module in pkgutil.walk_packages(labkit.__path__, "labkit."):
    if not module.name.endswith(("__main__", ".worker")):
        importlib.import_module(module.name)
"""

LIGHT = """
import sys
import labkit.{module}
heavy = [name for name in ("llama_cpp", "altair", "IPython", "papermill") if name in sys.modules]
assert not heavy, heavy
"""


def run(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error:::labkit", "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_without_llama_and_without_unix() -> None:
    run(SCRIPT)


@pytest.mark.parametrize("module", ["trace", "policy", "gguf_map", "routing_metrics", "sheet"])
def test_analysis_loads_neither_llama_nor_a_front_end(module: str) -> None:
    run(LIGHT.format(module=module))
