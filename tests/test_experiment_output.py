"""Nothing that runs beside a cell writes into another: lanes and llama.cpp are silent."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.runtime import Session


def test_lanes_and_llama_cpp_write_nothing(
    synth_model: Callable[..., Path],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    path = synth_model("qwen3moe")
    capfd.readouterr()
    with caplog.at_level(logging.DEBUG), Session(path, cache_mib=0, lanes=4) as session:
        generation = session.generate([1, 2, 3], 4)
    assert generation.bytes_read > 0
    assert capfd.readouterr() == ("", "")
    assert not [r for r in caplog.records if r.threadName != "MainThread"]
