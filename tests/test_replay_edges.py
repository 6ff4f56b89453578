"""What a student may try: each case answers or says what is wrong, in `labkit replay` as well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.cli import main
from labkit.demand import demand
from labkit.errors import BudgetError, TraceError
from labkit.policy import POLICIES
from labkit.replay import budget_grid, lru_curve, replay, replay_batches
from labkit.trace import RouteTrace

MIB = 2**20


@pytest.fixture
def trace_file(tmp_path: Path):
    def write(pairs: list[tuple[int, int]]) -> Path:
        path = tmp_path / "trace.csv"
        path.write_text("layer,expert\n" + "".join(f"{a},{b}\n" for a, b in pairs))
        return path

    return write


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `labkit replay`; gives its exit code and what it wrote to stdout and stderr."""

    def run(*args: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["labkit", "replay", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        return int(ended.value.code or 0), written.out, " ".join(written.err.split())

    return run


def rates(out: str) -> dict[tuple[float, str], float]:
    return {(row["budget_mib"], row["policy"]): row["hit_pct"] for row in json.loads(out)}


def test_an_empty_trace(trace_file, command) -> None:
    path = trace_file([])
    table = replay(RouteTrace.open(path), [1, 2])
    assert table["hit_pct"].isna().all()
    assert table["read_mib"].eq(0).all()
    code, _, error = command(path)
    assert code == 1
    assert error.endswith("no token is in this trace, so there is nothing to replay.")


def test_one_layer(trace_file, command) -> None:
    path = trace_file([(0, 1), (0, 2), (0, 1), (0, 2)])
    asked = demand(RouteTrace.open(path, n_expert_used=4), entry_bytes=MIB)
    assert asked.counts.tolist() == [2]  # four choices of one token, two of them again
    code, out, _ = command(path, "--entry-bytes", str(MIB), "--budgets", "2", "--json")
    assert code == 0
    assert set(rates(out)) == {(2, name) for name in POLICIES}


def test_one_token(trace_file, command) -> None:
    path = trace_file([(0, 1), (1, 5)])
    asked = demand(RouteTrace.open(path), entry_bytes=MIB)
    assert asked.cycle_bytes == 2 * MIB
    assert (replay(asked, budget_grid(asked, 3))["hit_pct"] == 0).all()
    assert lru_curve(asked)["hit_pct"].tolist() == [0]
    assert replay_batches(asked, 2)["misses"].tolist() == [1, 1]
    code, out, _ = command(path, "--entry-bytes", str(MIB))
    assert code == 0
    assert "Token cycle 2.0 MiB" in " ".join(out.split())


def test_unknown_sizes(trace_file, command) -> None:
    path = trace_file([(0, 1), (1, 5)])
    with pytest.raises(TraceError, match="how many bytes an expert of layer 0 has"):
        replay(RouteTrace.open(path), [1])
    code, _, error = command(path)
    assert code == 1
    assert "--entry-bytes" in error
    for size in ("0", "-4"):
        assert command(path, f"--entry-bytes={size}")[0] == 2


@pytest.mark.parametrize("budget", ["-5", "-0.001", "nan"])
def test_a_budget_that_cannot_be(budget: str, trace_file, command) -> None:
    path = trace_file([(0, 1), (1, 5)])
    with pytest.raises(BudgetError, match="makes no sense; 0 turns it off"):
        replay(demand(RouteTrace.open(path), entry_bytes=MIB), [float(budget)])
    code, _, error = command(path, "--entry-bytes", "1024", f"--budgets={budget}")
    assert code == 1
    assert "makes no sense; 0 turns it off" in error
    for text in ("x", "1,", "inf"):
        code, _, error = command(path, "--entry-bytes", "1024", f"--budgets={text}")
        assert code == 2
        assert "not a list of MiB such as 100,200" in error


def test_no_budget_and_more_than_the_model(trace_file, command) -> None:
    pairs = [(layer, token % 2) for token in range(8) for layer in range(3)]
    path = trace_file(pairs)
    code, out, _ = command(path, "--entry-bytes", str(MIB), "--budgets", "0,6,100000", "--json")
    assert code == 0
    found = rates(out)
    for name in POLICIES:
        assert found[0, name] == 0
        # 6 entries are read once, of 24 lookups; more room than that buys nothing.
        assert found[6, name] == found[100_000, name] == 75
    asked = demand(RouteTrace.open(path), entry_bytes=MIB)
    assert (replay(asked, [float("inf")])["hit_pct"] == 75).all()
