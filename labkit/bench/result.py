"""`BenchResult`: a benchmark's tables, how they are saved, and how they are read again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.errors import BenchError

FORMAT = "labkit_bench v1"
BENCH_FILE = "bench.json"
TOKENS_FILE = "tokens.csv"

#: Columns of the table of tokens, and whether a number; what a case does not measure is NaN.
TOKEN_COLUMNS = [
    "round", "case", "index", "warmup", "token", "path", "wall_ms", "compute_ms", "wait_ms",
    "manage_ms", "read_ms", "read_mib", "prefetch_mib", "hits", "misses", "prefetch_hits",
    "hit_pct", "cpu_ms", "major_faults", "energy_j", "expert_resident_mib",
]  # fmt: skip
_TEXT_COLUMNS = ("case", "path")
_NEEDED_TOKENS = ("round", "case", "index", "warmup", "wall_ms")

RUN_COLUMNS = [
    "round", "place", "case", "kind", "limit_mib", "cache_mib", "status", "reason",
    "others_pct", "cached_pct",
    "open_s", "prefill_s", "first_token_s", "open_read_mib", "load_read_mib", "load_major_faults",
    "n_tokens", "decode_tok_s", "decode_device_read_mib", "peak_rss_mib",
    "cgroup_peak_mib", "expert_resident_mib", "overlap", "overlap_note", "reads", "swap_note",
]  # fmt: skip
_RUN_TEXT = ("case", "kind", "status", "reason", "overlap", "overlap_note", "reads", "swap_note")
_NEEDED_RUNS = ("round", "case", "kind", "status")


@dataclass(frozen=True)
class BenchResult:
    """What a benchmark measured.

    Attributes:
        facts: model, plan and `notes`, what could not be controlled.
        runs: a row a process: round, case, status ("ok", "failed", "out of memory", "left out"),
            cold start (open_s, prefill_s, first_token_s), bytes read and major faults until the
            first token, decode speed, memory.
        tokens: a row a token, warm-up tokens marked: see `TOKEN_COLUMNS`.
        digests: for each row of `runs` a running sha256 after the prompt and after each token;
            empty for a run that failed.
    """

    facts: dict[str, Any]
    runs: pd.DataFrame
    tokens: pd.DataFrame
    digests: list[list[str]]

    @classmethod
    def of(
        cls, facts: dict[str, Any], runs: list[dict[str, Any]], tokens: list[dict[str, Any]]
    ) -> BenchResult:
        """From rows, `runs` with their `digests`."""
        return cls(
            facts,
            _typed(pd.DataFrame(runs), RUN_COLUMNS, _RUN_TEXT),
            _typed(pd.DataFrame(tokens), TOKEN_COLUMNS, _TEXT_COLUMNS),
            [list(run.get("digests") or []) for run in runs],
        )

    @property
    def cases(self) -> list[str]:
        """Names of the cases, in the order in which they were asked for."""
        return [case["name"] for case in self.facts["cases"]]

    def measured(self) -> pd.DataFrame:
        """The rows of `tokens` after the warm-up."""
        return self.tokens[~self.tokens["warmup"]]

    def records(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rows of runs, with digests, and of tokens, as `of` takes them."""
        runs = _records(self.runs)
        for run, digests in zip(runs, self.digests, strict=True):
            run["digests"] = digests
        return runs, _records(self.tokens)

    def save(self, directory: str | Path) -> Path:
        """Write bench.json (facts and runs) and tokens.csv, which `load` reads; returns it.

        Raises:
            BenchError: the directory cannot be written.
        """
        directory = Path(directory)
        content = {"format": FORMAT, "facts": self.facts, "runs": self.records()[0]}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
            tokens = self.tokens.to_csv(index=False, lineterminator="\n")
            # Each file is whole or the old one, should this be stopped here.
            for name, words in ((TOKENS_FILE, tokens), (BENCH_FILE, text + "\n")):
                new = directory / f"{name}.new"
                new.write_text(words, encoding="utf-8", newline="\n")
                new.replace(directory / name)
        except OSError as error:
            raise BenchError(
                f"{directory}: the tables cannot be written: {error.strerror or error}"
            ) from error
        return directory

    @classmethod
    def load(cls, directory: str | Path) -> BenchResult:
        """Read what `save` wrote.

        Raises:
            BenchError: it is no such directory, or a file in it is damaged.
        """
        directory = Path(directory)
        facts, runs = _read_bench(directory / BENCH_FILE)
        tokens = _read_tokens(directory / TOKENS_FILE)
        try:
            result = cls.of(facts, runs, tokens)
            unknown = set(result.tokens["case"]) - set(result.cases)
        except (TypeError, ValueError, KeyError) as error:
            raise BenchError(f"{directory}: its figures are damaged: {error}") from error
        if unknown:
            raise BenchError(f"{directory}: {TOKENS_FILE} has unknown cases: {sorted(unknown)}")
        return result


def _read_bench(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    advice = "`labkit bench MODEL --out DIR` writes such a directory."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}. {advice}") from error
    except (ValueError, RecursionError) as error:
        raise BenchError(f"{path}: no JSON of a benchmark: {error}. {advice}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BenchError(f"{path}: its format is not {FORMAT!r}. {advice}")
    facts, runs = content.get("facts"), content.get("runs")
    wanted = ("model", "model_mib", "cases", "baseline", "notes", "prompt_tokens")
    if not isinstance(facts, dict) or any(key not in facts for key in wanted):
        raise BenchError(f"{path}: its facts are not those of a benchmark ({', '.join(wanted)})")
    cases = facts["cases"]
    if not isinstance(cases, list) or not all(
        isinstance(case, dict) and isinstance(case.get("name"), str) for case in cases
    ):
        raise BenchError(f"{path}: its list of cases is damaged")
    if not isinstance(runs, list) or not all(
        isinstance(run, dict) and all(key in run for key in _NEEDED_RUNS) for run in runs
    ):
        raise BenchError(f"{path}: its runs lack {', '.join(_NEEDED_RUNS)}")
    return facts, runs


def _read_tokens(path: Path) -> list[dict[str, Any]]:
    try:
        table = pd.read_csv(path, keep_default_na=True)
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, pd.errors.ParserError) as error:  # also text that is not UTF-8
        raise BenchError(f"{path}: no table of tokens: {error}") from error
    for name in _NEEDED_TOKENS:
        if name not in table or table[name].isna().any():
            raise BenchError(f"{path}: the column {name} is missing or has gaps")
    if not table["warmup"].isin([True, False]).all():
        raise BenchError(f"{path}: warmup is neither True nor False in some row")
    return _records(table)


def _typed(table: pd.DataFrame, columns: list[str], texts: tuple[str, ...]) -> pd.DataFrame:
    """All `columns`, and no other; numbers as float64 but whole ones as int64; warmup as bool."""
    table = table.reindex(columns=columns)
    for name in columns:
        if name in texts:
            table[name] = table[name].astype(object).where(table[name].notna(), None)
        elif name == "warmup":
            table[name] = table[name].astype(bool)
        elif name in ("round", "place", "index"):
            table[name] = table[name].fillna(-1).astype(np.int64)
        else:
            table[name] = table[name].astype(np.float64)
    return table


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of plain Python values, None for what is missing."""
    plain = table.astype(object)
    rows = plain.where(plain.notna(), None).to_dict("records")
    return [{str(key): value for key, value in row.items()} for row in rows]
