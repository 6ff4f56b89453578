"""Counters of the process: they move with what they count, and say None where nobody counts."""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path

import pytest

from labkit.runtime import usage as usage_module
from labkit.runtime.usage import EnergyMeter, device_read_bytes, peak_resident_bytes, usage

linux = pytest.mark.skipif(sys.platform != "linux", reason="counters of Linux")


def test_processor_time_moves_with_work_and_not_with_sleep() -> None:
    before = usage()
    time.sleep(0.05)
    slept = usage()
    total = sum(i * i for i in range(400_000))
    worked = usage()
    assert total > 0
    assert worked.cpu_s - slept.cpu_s > slept.cpu_s - before.cpu_s


def test_it_is_cheap_enough_for_every_token() -> None:
    usage()
    rounds = 2_000
    begin = time.process_time()  # of this process: others on the machine do not count
    for _ in range(rounds):
        usage()
    assert (time.process_time() - begin) / rounds < 100e-6  # some 2 us on an idle machine


@linux
def test_major_faults_and_bytes_read_count_a_cold_file(tmp_path: Path) -> None:
    path = tmp_path / "cold.bin"
    path.write_bytes(os.urandom(4 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before, read_before = usage(), device_read_bytes()
        assert before.major_faults is not None
        assert read_before is not None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            assert sum(view[i] for i in range(0, len(view), 4096)) >= 0
        faults = (usage().major_faults or 0) - before.major_faults
        read = (device_read_bytes() or 0) - read_before
    if not read:
        pytest.skip("this file system cannot drop its pages (a memory file system?)")
    assert faults > 0
    assert read == 4 << 20


@linux
def test_the_peak_of_memory_is_at_least_what_was_filled() -> None:
    block = bytearray(64 << 20)
    block[:: mmap.PAGESIZE] = b"x" * (len(block) // mmap.PAGESIZE)
    peak = peak_resident_bytes()
    assert peak is not None
    assert peak > 64 << 20


def zone(root: Path, name: str, label: str, energy: int, span: int = 1_000_000) -> Path:
    path = root / name
    path.mkdir(parents=True)
    (path / "name").write_text(label + "\n")
    (path / "max_energy_range_uj").write_text(f"{span}\n")
    (path / "energy_uj").write_text(f"{energy}\n")
    return path


def test_energy_sums_packages_and_survives_a_wrap(tmp_path: Path) -> None:
    one = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    two = zone(tmp_path, "intel-rapl:1", "package-1", 10)
    zone(tmp_path, "intel-rapl:0:0", "core", 5)
    zone(tmp_path, "intel-rapl:2", "psys", 5)
    meter = EnergyMeter(tmp_path)
    (one / "energy_uj").write_text("100000\n")  # 200 mJ later, past the end of its range
    (two / "energy_uj").write_text("300010\n")
    assert meter.read() == pytest.approx(0.5)
    (two / "energy_uj").write_text("400010\n")
    assert meter.read() == pytest.approx(0.6)
    (two / "energy_uj").write_text("nonsense\n")
    assert meter.read() is None
    meter.close()


@pytest.mark.parametrize("broken", ["absent", "empty", "no number"])
def test_energy_without_a_readable_counter_is_an_error_of_the_meter(
    tmp_path: Path, broken: str
) -> None:
    if broken != "absent":
        path = zone(tmp_path, "intel-rapl:0", "package-0", 1)
        (path / "energy_uj").write_text("" if broken == "empty" else "x")
    with pytest.raises((OSError, ValueError)):
        EnergyMeter(tmp_path)


def test_what_the_platform_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_module, "resource", None)
    monkeypatch.setattr(usage_module, "_meter", lambda: None)
    found = usage()
    assert found.cpu_s > 0
    assert found.major_faults is None
    assert found.energy_j is None
