"""The parts of a benchmark: cases, statistics, the page cache, memory cgroups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from labkit.bench import cgroup, file_cache
from labkit.bench.cases import KINDS, default_cases, parse_budget, parse_cases
from labkit.bench.cgroup import memory_cgroup
from labkit.bench.statistics import ratio, spread_pct
from labkit.errors import BenchError, OptionError
from labkit.runtime.metrics_csv import percentiles

linux = pytest.mark.skipif(sys.platform != "linux", reason="page cache and cgroups of Linux")


# cases


def test_streamed_cases_run_once_for_each_budget() -> None:
    cases = parse_cases(["mmap", "stream-serial", "stream:prefetch=router:lanes=8"], [100.0, 200.0])
    assert [case.name for case in cases] == [
        "mmap",
        "stream-serial@100",
        "stream-serial@200",
        "stream:prefetch=router:lanes=8@100",
        "stream:prefetch=router:lanes=8@200",
    ]
    assert [case.cache_mib for case in cases] == [None, 100.0, 200.0, 100.0, 200.0]
    assert cases[-1].options == {"prefetch": "router", "lanes": 8}
    assert cases[-1].streams
    assert not cases[0].streams


def test_a_budget_of_a_case_takes_the_place_of_the_others() -> None:
    (case,) = parse_cases(["stream-serial:cache_mib=0"], [100.0, 200.0])
    assert case.cache_mib == 0
    assert case.options == {}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["mmapp"], "no case 'mmapp'"),
        (["mmap:lanes=4"], "takes no options"),
        (["stream:lane=4"], "'lane' is no option"),
        (["stream:lanes=four"], "whole number"),
        (["stream:lanes=0"], "whole number"),
        (["stream:policy=mru"], r"no policy 'mru'; there are lru, "),
        (["stream:prefetch=next"], r"no prefetch 'next'; there are previous, router"),
        (["stream:dense=disk"], "no dense 'disk'"),
        (["stream:prefill"], "no prefill ''"),
        (["stream:cache_mib=-1"], "no budget"),
        (["mmap", "mmap"], "twice"),
        ([], "at least one"),
    ],
)
def test_a_wrong_case_is_refused_with_what_there_is(texts: list[str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse_cases(texts, [None])


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "many"])
def test_a_budget_is_a_number_of_mib_or_auto(text: str) -> None:
    with pytest.raises(OptionError):
        parse_budget(text)
    assert parse_budget("auto") == "auto"
    assert parse_budget("0") == 0


def test_default_cases_exist_and_leave_out_what_a_limit_forbids() -> None:
    for limited in (True, False):
        assert set(default_cases(limited=limited)) <= KINDS.keys()
    assert "repack" not in default_cases(limited=True)


# statistics


def test_percentiles_of_known_values() -> None:
    found = percentiles(list(range(101)))
    assert found == {"p50": 50, "p95": 95, "p99": 99}
    assert percentiles([float("nan"), 3.0])["p99"] == 3
    assert np.isnan(percentiles([])["p50"])


def test_the_spread_is_from_smallest_to_largest() -> None:
    assert spread_pct([9.0, 10.0, 12.0]) == pytest.approx(30)
    assert np.isnan(spread_pct([5.0]))


def rounds(random: np.random.Generator, mean: float, speed: np.ndarray) -> list[np.ndarray]:
    """Token times of rounds, each slowed by the machine as `speed` says."""
    return [random.gamma(16, mean / 16, size=30) * slow for slow in speed]


def test_a_ratio_of_rounds_takes_out_what_slows_both() -> None:
    random = np.random.default_rng(1)
    slow = np.array([1.0, 8.0, 0.5, 3.0, 1.5])
    found = ratio(rounds(random, 6.0, slow), rounds(random, 2.0, slow))
    assert found is not None
    assert found.value == pytest.approx(3, rel=0.1)
    assert found.low < 3 < found.high
    assert found.high - found.low < 1


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(2)
    held = 0
    for seed in range(120):
        slow = random.uniform(0.5, 4, size=7)
        found = ratio(rounds(random, 5.0, slow), rounds(random, 2.5, slow), draws=400, seed=seed)
        assert found is not None
        held += found.low <= 2 <= found.high
    # A bootstrap over seven rounds is a little too narrow or too wide; far off would be a fault.
    assert 0.88 <= held / 120 <= 1.0


def test_equal_cases_are_one_times_as_fast() -> None:
    times = [np.array([1.0, 2.0, 3.0])] * 3
    found = ratio(times, times)
    assert found is not None
    assert found.value == 1
    assert found.low <= 1 <= found.high
    assert ratio(times, times) == found  # the same draws every time


def test_without_tokens_there_is_no_ratio() -> None:
    assert ratio([], []) is None
    assert ratio([np.array([])], [np.array([1.0])]) is None


# page cache


@linux
def test_dropped_pages_are_seen_to_be_gone(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(os.urandom(3 << 20))
    assert file_cache.cached_pct([path]) == 100
    assert file_cache.drop([path])
    left = file_cache.cached_pct([path])
    if left == 100:
        pytest.skip("a memory file system has nothing but its pages")
    assert left == 0
    with path.open("rb") as file:
        file.read(1 << 20)
    assert 0 < (file_cache.cached_pct([path]) or 0) <= 100


@linux
def test_an_empty_file_has_no_pages(tmp_path: Path) -> None:
    path = tmp_path / "empty.bin"
    path.touch()
    assert file_cache.cached_pct([path]) == 0


# cgroups

HUNGRY = "import sys; sys.stdin.readline(); x = bytearray(200 << 20); x[::4096] = x[::4096]"


def can_limit() -> bool:
    return sys.platform == "linux" and cgroup.why_not() is None


limits = pytest.mark.skipif(not can_limit(), reason="this user cannot make a memory cgroup")


@limits
def test_a_limit_holds_is_seen_and_goes_away() -> None:
    with memory_cgroup(64 << 20) as group:
        with subprocess.Popen([sys.executable, "-c", HUNGRY], stdin=subprocess.PIPE) as child:
            group.add(child.pid)
            child.communicate(b"\n")
        assert child.returncode == -9
        assert group.oom_kills() == 1
        assert (group.peak_bytes() or 0) > 60 << 20
    assert not group.directory.exists()


@limits
def test_a_cgroup_goes_away_after_an_error_and_with_a_process_left_inside() -> None:
    made: list[Path] = []

    def leave_early(child: subprocess.Popen[bytes]) -> None:
        with memory_cgroup(64 << 20) as group:
            made.append(group.directory)
            group.add(child.pid)
            raise RuntimeError

    with subprocess.Popen([sys.executable, "-c", HUNGRY], stdin=subprocess.PIPE) as child:
        with pytest.raises(RuntimeError):
            leave_early(child)
        assert not made[0].exists()
        assert child.wait() == -9


@limits
def test_cgroups_of_killed_benchmarks_are_removed_and_no_others() -> None:
    with memory_cgroup(64 << 20) as group:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        stale = group.directory.with_name(f"labkit-bench-{ended.pid}-0")
        stale.mkdir()
        assert cgroup.remove_stale() == [stale]
        assert group.directory.exists()


def tree(root: Path, version: int, name: str) -> tuple[Path, Path]:
    """A made-up cgroup file system: its root and the file that names the process's own group."""
    base = root / "memory" if version == 1 else root
    group = base / name
    group.mkdir(parents=True)
    for place in (group, *group.parents):
        if place.is_relative_to(base):
            (place / "cgroup.procs").touch()
            if version == 2:
                (place / "cgroup.subtree_control").write_text("cpu memory\n")
    own = root / "own"
    own.write_text(f"4:memory:/{name}\n" if version == 1 else f"0::/{name}\n")
    return root, own


@pytest.mark.parametrize(("version", "file"), [(1, "memory.limit_in_bytes"), (2, "memory.max")])
def test_both_versions_get_their_own_files(tmp_path: Path, version: int, file: str) -> None:
    root, own = tree(tmp_path, version, "user/session")
    context = memory_cgroup(123 << 20, root=root, own=own)
    group = context.__enter__()
    assert group.version == version
    assert group.directory.parent.name == "session"
    assert (group.directory / file).read_text() == str(123 << 20)
    for path in group.directory.iterdir():  # a real cgroup's files vanish with it
        path.unlink()
    context.__exit__(None, None, None)
    assert not group.directory.exists()


def test_where_no_cgroup_can_be_made_the_error_says_what_else_to_do(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("3:cpu:/x\n")
    with pytest.raises(BenchError, match="systemd-run"), memory_cgroup(1, root=tmp_path, own=own):
        pass
    with pytest.raises(BenchError), memory_cgroup(1, root=tmp_path, own=tmp_path / "absent"):
        pass
    assert cgroup.why_not(root=tmp_path, own=own)
