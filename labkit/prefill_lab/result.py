"""`PrefillResult`: what was measured, as tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.bench.statistics import spread_pct
from labkit.errors import BenchError

_MIB = 2**20
_RUNS = ["round", "path", "status", "reason", "limit_mib", "cached_pct", "open_s"]
_RUNS += ["first_token_s", "cold_storage_mib", "peak_rss_mib", "grown_mib", "cgroup_peak_mib"]
_PREFILLS = ["round", "path", "tokens", "ttft_s", "tok_s", "cpu_s", "major_faults"]
_PREFILLS += ["storage_mib", "read_mib", "wait_s", "read_s"]
_REQUESTS = ["round", "path", "tokens", "outputs", "request_s"]
_LAYERS = ["round", "path", "tokens", "layer", "chunk", "prepare_s", "compute_s", "wait_s"]
_LAYERS += ["read_bytes"]
_TEXT = ("path", "status", "reason")
_FACTS = "prefill.json"


@dataclass(frozen=True)
class PrefillResult:
    """Tables of measurements; NaN is what was not measured.

    Attributes:
        facts: model, paths with their description, devices, conditions, `notes`.
        runs: a row a process: round, path, status ("ok", "failed", "left out"), reason; its cold
            start (open_s; first_token_s, from before opening to the first token of the answer to
            the longest prompt; cold_storage_mib read from storage meanwhile); memory (peak_rss_mib;
            grown_mib, what came on top since before the model was opened; cgroup_peak_mib).
        prefills: a row a prompt, in a process that is warm: round, path, tokens, ttft_s (prompt to
            first token), tok_s, cpu_s, major_faults, storage_mib (as the kernel counts),
            and for streamed paths read_mib (by labkit), wait_s (exposed) and read_s (a read was
            under way).
        requests: a row an answer length: round, path, tokens, outputs, request_s.
        layers: a row a layer and chunk of the two-slot path: round, tokens, layer, chunk,
            prepare_s, compute_s, wait_s, read_bytes.
    """

    facts: dict[str, Any]
    runs: pd.DataFrame
    prefills: pd.DataFrame
    requests: pd.DataFrame
    layers: pd.DataFrame

    @classmethod
    def of(
        cls,
        facts: dict[str, Any],
        runs: list[dict[str, Any]],
        prefills: list[dict[str, Any]],
        requests: list[dict[str, Any]],
        layers: list[dict[str, Any]],
    ) -> PrefillResult:
        """From rows as `labkit.prefill_lab.lab` makes them."""
        found = _table(prefills, [*_PREFILLS, "storage_bytes"])
        found["tok_s"] = found["tokens"] / found["ttft_s"]
        found["storage_mib"] = found["storage_bytes"] / _MIB
        return cls(
            facts,
            _table(runs, _RUNS),
            found[_PREFILLS],
            _table(requests, _REQUESTS),
            _table(layers, _LAYERS),
        )

    @property
    def paths(self) -> list[str]:
        """Paths that were measured, in the order in which they were asked for."""
        measured = set(self.prefills["path"])
        return [path for path in self.facts["paths"] if path in measured]

    @property
    def base(self) -> str | None:
        """The path that others are compared with: mmap, or the first; None if all failed."""
        return "mmap" if "mmap" in self.paths else next(iter(self.paths), None)

    def rates(self) -> pd.DataFrame:
        """Prefill by path and prompt length over the rounds.

        Columns: path, tokens, tok_s (median), low_tok_s, high_tok_s (extremes), spread_pct,
        ttft_s (median), speed_ratio (times as fast as the base path: the median of the rounds' own
        ratios, for what slowed the machine in a round slowed both), storage_mib, read_mib, wait_s
        (medians).
        """
        rows = []
        base = self.prefills[self.prefills["path"] == self.base]
        theirs = {(r, n): s for r, n, s in base[["round", "tokens", "ttft_s"]].itertuples(False)}
        for path in self.paths:
            own = self.prefills[self.prefills["path"] == path]
            for tokens, part in own.groupby("tokens"):
                as_fast = [
                    theirs.get((r, n), float("nan")) / s
                    for r, n, s in part[["round", "tokens", "ttft_s"]].itertuples(False)
                ]
                rows.append(
                    {
                        "path": path,
                        "tokens": tokens,
                        "tok_s": part["tok_s"].median(),
                        "low_tok_s": part["tok_s"].min(),
                        "high_tok_s": part["tok_s"].max(),
                        "spread_pct": spread_pct(part["tok_s"].to_numpy()),
                        "ttft_s": part["ttft_s"].median(),
                        "speed_ratio": pd.Series(as_fast).median(),
                        **{n: part[n].median() for n in ("storage_mib", "read_mib", "wait_s")},
                    }
                )
        return pd.DataFrame(rows)

    def request_table(self) -> pd.DataFrame:
        """Whole requests by path and answer length: medians, extremes and the prompt's part.

        Columns: path, tokens, outputs, request_s, low_s, high_s, prefill_pct, decode_tok_s (of the
        tokens after the first; NaN for an answer of one).
        """
        rows = []
        for path in self.paths:
            own = self.requests[self.requests["path"] == path]
            first = own[own["outputs"] == own["outputs"].min()]["request_s"].median()
            for outputs, part in own.groupby("outputs"):
                whole = part["request_s"].median()
                more = int(outputs) - int(own["outputs"].min())  # type: ignore[call-overload]
                rows.append(
                    {
                        "path": path,
                        "tokens": int(part["tokens"].iloc[0]),
                        "outputs": outputs,
                        "request_s": whole,
                        "low_s": part["request_s"].min(),
                        "high_s": part["request_s"].max(),
                        "prefill_pct": 100 * first / whole,
                        "decode_tok_s": more / (whole - first) if more else float("nan"),
                    }
                )
        return pd.DataFrame(rows)

    def starts(self) -> pd.DataFrame:
        """Cold starts and memory by path: medians of open_s, first_token_s, cold_storage_mib,
        peak_rss_mib, grown_mib and cgroup_peak_mib; `runs` counts rounds that worked, `failed`
        the others, `reason` says why the first of them did.
        """
        numbers = _RUNS[_RUNS.index("open_s") :]
        rows = []
        for path in self.facts["paths"]:
            own = self.runs[self.runs["path"] == path]
            good = own[own["status"] == "ok"]
            reasons = own["reason"].dropna()
            rows.append(
                {
                    "path": path,
                    **{name: good[name].median() for name in numbers},
                    "runs": len(good),
                    "failed": len(own) - len(good),
                    "reason": reasons.iloc[0] if len(reasons) else None,
                }
            )
        return pd.DataFrame(rows)

    def save(self, directory: Path) -> None:
        """Write the tables as CSV and the facts as JSON into `directory`, made if needed.

        Raises:
            BenchError: it cannot be written.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.facts, indent=2, ensure_ascii=False)
            (directory / _FACTS).write_text(text + "\n", encoding="utf-8")
            for name in ("runs", "prefills", "requests", "layers"):
                table: pd.DataFrame = getattr(self, name)
                table.to_csv(directory / f"{name}.csv", index=False, lineterminator="\n")
        except OSError as error:
            raise BenchError(f"{directory}: cannot be written: {error.strerror}") from error

    def to_json(self) -> dict[str, Any]:
        """Facts and tables of medians as plain values, None for what was not measured."""
        return {
            **self.facts,
            "prefill": records(self.rates()),
            "requests": records(self.request_table()),
            "starts": records(self.starts()),
            "layers": records(self.layers),
        }


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as plain values."""
    return table.astype(object).where(table.notna(), None).to_dict("records")  # type: ignore[return-value]


def _table(rows: list[dict[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Rows as a table with these columns: text, or numbers with NaN."""
    table = pd.DataFrame(rows, columns=list(columns))
    numbers = [name for name in columns if name not in _TEXT]
    return table.astype(dict.fromkeys(numbers, float)).astype(
        {n: int for n in ("round", "tokens", "outputs", "layer", "chunk") if n in columns}
    )
