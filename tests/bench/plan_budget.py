"""The planner against this machine: after a benchmark, what does a budget give that was not in it?

    python tests/bench/plan_budget.py [MODEL] [--rounds 3] [-n 24] [--out DIR] [--work DIR] [--json]

One `labkit bench` measures the model in memory and streamed with three cache budgets, all cases in
turns. The profile is calibrated with the resident case and the outer two budgets; the planner then
predicts the middle one, with the hit rate of a trace that is recorded here, and is compared with
what was measured. Without MODEL a synthetic one of 1.5 GiB is made and removed. With --out the
benchmark is kept, and a second call adds rounds to it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pandas as pd

from labkit.bench.cases import parse_cases
from labkit.bench.result import BENCH_FILE, BenchResult
from labkit.bench.run import Event, Plan, run_bench
from labkit.bench.summary import summary
from labkit.device.calibrate import calibrate, fit_bench
from labkit.device.measure import measure_this_machine
from labkit.device.plan import OVERLAPPED, SERIAL, Request
from labkit.device.planner import plan
from labkit.runtime import Session
from labkit.sheet import sheet
from labkit.synth.large import make_large
from labkit.trace import RouteTrace

MIB = 2**20
KINDS = {"stream-serial": SERIAL, "stream": OVERLAPPED}
SHARES = (0.35, 0.55, 0.75)
PROMPT = list(range(10, 26))


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="labkit-plan-", dir=args.work) as folder:
        path = args.model or make_large(
            "qwen3moe", Path(folder) / "m.gguf", size_gib=1.5, layers=12
        )
        table = compare(path, args.rounds, args.n, args.seed, args.out)
    if args.json:
        json.dump(table.to_dict("records"), sys.stdout, indent=1)
        return
    sys.stdout.write(table.to_string(index=False, float_format="%.2f") + "\n")


def compare(path: Path, rounds: int, n: int, seed: int, out: Path | None) -> pd.DataFrame:
    """One row per streamed kind, of the budget that the calibration did not see."""
    model = sheet(path)
    budgets = [round(share * model.routed_bytes / MIB) for share in SHARES]
    trace = record(path, n, seed)
    cases = parse_cases(["resident", *KINDS], budgets)
    result = run_bench(
        Plan(path, tuple(cases), rounds=rounds, n=n, prompt=PROMPT, seed=seed),
        on_run=tell,
        earlier=BenchResult.load(out) if out and (out / BENCH_FILE).exists() else None,
    )
    if out:
        result.save(out)
    middle = f"@{budgets[1]}"
    seen = only(result, [name for name in result.cases if not name.endswith(middle)])
    profile = calibrate(measure_this_machine(model=path), seen, model)
    sys.stderr.write(fit_bench(profile, seen, model).errors.to_string() + "\n")
    request = Request(n_ctx=256, prompt_tokens=len(PROMPT), output_tokens=n)
    made = plan(model, profile, cache_mib=budgets[1], trace=trace, request=request)
    measured = summary(result).set_index("case")
    rows = []
    for kind, name in KINDS.items():
        got, row = measured.loc[kind + middle], made.path(name)
        rows.append(
            {
                "case": kind + middle,
                "measured_tok_s": got["decode_tok_s"],
                "predicted_tok_s": row.decode_tok_s,
                "error_pct": 100 * (row.decode_tok_s / got["decode_tok_s"] - 1),
                "measured_hit_pct": got["hit_pct"],
                "replayed_hit_pct": row.hit.hit_pct if row.hit else float("nan"),
                "spread_pct": got["spread_pct"],
            }
        )
    return pd.DataFrame(rows)


def tell(event: Event) -> None:
    """Show progress."""
    sys.stderr.write(f"{event.round} {event.case}\n")


def record(path: Path, n: int, seed: int) -> RouteTrace:
    """Routing of as many tokens as a run of the benchmark has, its warm-up included."""
    with Session(path, resident=True, n_ctx=256, temperature=0.8, seed=seed) as session:
        session.generate(PROMPT, n + 8)
        return session.trace


def only(result: BenchResult, cases: list[str]) -> BenchResult:
    """The benchmark as if only these cases had been asked for."""
    facts = result.facts | {"cases": [c for c in result.facts["cases"] if c["name"] in cases]}
    keep = result.runs["case"].isin(cases)
    return replace(
        result,
        facts=facts,
        runs=result.runs[keep].reset_index(drop=True),
        tokens=result.tokens[result.tokens["case"].isin(cases)].reset_index(drop=True),
        digests=[d for d, kept in zip(result.digests, keep, strict=True) if kept],
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-n", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="directory of the benchmark")
    parser.add_argument("--work", type=Path, help="where the synthetic model goes")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
