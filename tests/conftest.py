"""Fixtures that several test modules share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from labkit import synth

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every process that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# What a command prints is looked at as a terminal of usual width shows it.
os.environ["COLUMNS"] = "80"


@pytest.fixture(scope="session")
def synth_worker() -> Iterator[synth.LlamaWorker]:
    """One llama.cpp process for all synthetic models of the test run."""
    with synth.LlamaWorker() as worker:
        yield worker


@pytest.fixture(scope="session")
def synth_model(
    tmp_path_factory: pytest.TempPathFactory, synth_worker: synth.LlamaWorker
) -> Callable[..., Path]:
    """`synth_model(arch, **options) -> Path`: a tiny model, made once per test run.

    Options are those of `labkit.synth.make`. Tests must not write to the files.
    """
    folder = tmp_path_factory.mktemp("synth")
    made: dict[tuple, Path] = {}

    def model(arch: str, **options) -> Path:
        key = (arch, *sorted(options.items()))
        if key not in made:
            path = folder / f"{arch}-{len(made)}.gguf"
            made[key] = synth.make(arch, path, worker=synth_worker, **options)
        return made[key]

    return model


@pytest.fixture(scope="session", autouse=True)
def _close_what_llama_cpp_python_leaves_open() -> Iterator[None]:
    """It opens the null device twice when imported; at exit Python would warn of both."""
    yield
    utils = sys.modules.get("llama_cpp._utils")
    for name in ("outnull_file", "errnull_file"):
        if file := getattr(utils, name, None):
            file.close()
