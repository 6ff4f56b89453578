"""`labkit doctor`: tried, not looked up; and never an exception."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from labkit import doctor, host


def _by_name(checks: list[doctor.Check]) -> dict[str, doctor.Check]:
    return {check.name: check for check in checks}


def test_every_line_has_a_verdict_and_what_is_not_ok_says_what_to_do(tmp_path):
    checks = doctor.examine(runs_dir=tmp_path)
    found = _by_name(checks)
    assert set(found) >= {
        "python",
        "labkit",
        "llama.cpp",
        "cpu features",
        "seam",
        "packages",
        "jupyter",
        "cores",
        "memory",
        "locked memory",
        "graph stops",
        "userfaultfd",
        "model",
        "results",
    }
    assert found["seam"].verdict == "ok"
    assert found["jupyter"].verdict == "ok"
    assert "llama-cpp-python" in found["llama.cpp"].found
    for check in checks:
        assert check.verdict in ("ok", "note", "problem")
        assert check.found
        assert check.verdict == "ok" or check.advice or sys.platform != "linux"


def test_model_that_is_none_is_a_problem_in_the_report(tmp_path):
    bad = tmp_path / "a.gguf"
    bad.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    check = _by_name(doctor.examine(bad))["model"]
    assert check.verdict == "problem"
    assert "LFS" in check.found


def test_unforeseen_failure_is_a_problem_not_an_exception(monkeypatch):
    def broken() -> int:
        raise OSError("no such counter")

    monkeypatch.setattr(doctor.psutil, "virtual_memory", broken)
    check = _by_name(doctor.examine())["memory"]
    assert (check.verdict, check.found) == ("problem", "could not look: OSError: no such counter")


def test_missing_package_is_named_with_its_install_line(monkeypatch):
    real = doctor.version

    def version(name: str) -> str:
        if name == "anywidget":
            raise doctor.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor, "version", version)
    check = _by_name(doctor.examine())["jupyter"]
    assert (check.verdict, check.advice) == ("problem", "pip install anywidget")


def _cgroup_tree(tmp_path: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    for name, content in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "own").write_text(own)
    return tmp_path / "cgroup", tmp_path / "own"


def test_tightest_limit_of_cgroup_v1(tmp_path):
    root, own = _cgroup_tree(
        tmp_path,
        "5:cpu:/a\n4:memory:/a/b\n0::/\n",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/a/memory.limit_in_bytes": "1073741824\n",
            "memory/a/memory.usage_in_bytes": "4096\n",
            "memory/a/b/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    limit = host.cgroup_memory_limit(root, own)
    assert limit is not None
    assert (limit.limit_bytes, limit.used_bytes) == (1 << 30, 4096)
    assert limit.source == root / "memory/a/memory.limit_in_bytes"


def test_tightest_limit_of_cgroup_v2(tmp_path):
    root, own = _cgroup_tree(
        tmp_path,
        "0::/user/app\n",
        {"user/memory.max": "2000", "user/app/memory.max": "max", "user/memory.current": "7"},
    )
    limit = host.cgroup_memory_limit(root, own)
    assert limit is not None
    assert (limit.limit_bytes, limit.used_bytes) == (2000, 7)


def test_limit_in_a_container_that_shows_its_own_root_only(tmp_path):
    root, own = _cgroup_tree(tmp_path, "0::/host/path\n", {"memory.max": "3000"})
    limit = host.cgroup_memory_limit(root, own)
    assert limit is not None
    assert limit.limit_bytes == 3000


def test_no_cgroup_is_no_limit(tmp_path):
    assert host.cgroup_memory_limit(tmp_path, tmp_path / "absent") is None
    root, own = _cgroup_tree(tmp_path, "0::/\n", {"memory.max": "max"})
    assert host.cgroup_memory_limit(root, own) is None
    assert host.usable_memory_bytes() > 0


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_userfaultfd_is_really_asked_for():
    before = len(list(Path("/proc/self/fd").iterdir()))
    reason = host.userfaultfd_problem()
    assert reason is None or "refuses" in reason or "handshake" in reason
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_told_what_they_lack(monkeypatch, system):
    monkeypatch.setattr(host.sys, "platform", system)
    assert "no userfaultfd" in (host.userfaultfd_problem() or "")


def test_json_on_stdout_alone():
    run = subprocess.run(
        [sys.executable, "-c", "from labkit.cli import main; main()", "doctor", "--json"],
        capture_output=True,
        text=True,
    )
    report = json.loads(run.stdout)
    assert report["ok"] == (run.returncode == 0)
    assert {"name", "verdict", "found", "advice"} == set(report["checks"][0])


def test_a_library_that_cannot_count_nodes_is_told(monkeypatch):
    from labkit.runtime import node_counter

    monkeypatch.setattr(node_counter, "is_available", lambda: False)
    check = _by_name(doctor.examine())["graph stops"]
    assert check.verdict == "note"
    assert "cannot count" in check.found
    assert check.advice
