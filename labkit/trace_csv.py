"""Reading the rows of a trace's CSV: fast when all is well, line by line when something is not."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from labkit.errors import TraceError

CSV_COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
TWO_COLUMNS = ["layer", "expert"]

Body = list[tuple[int, str]]
"""Lines that are neither comments nor blank, with their numbers."""


class TraceWarning(UserWarning):
    """A trace was read, but something in the file was left out, or may mean something else."""


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, without a last one that was cut while it was written."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise TraceError(f"{path}: the trace cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path}: no trace: a trace is text, comma-separated, or a .parquet file, and the byte "
            f"at {error.start} is part of no text. `labkit trace MODEL` writes a trace."
        ) from error
    if not text.strip():
        raise TraceError(f"{path}: the file is empty, so it holds no trace.")
    lines = text.splitlines()
    if lines and not text.endswith(("\n", "\r")):
        warnings.warn(
            f"{path}: line {len(lines)} has no line end, so it was cut while it was written; "
            "it is left out",
            TraceWarning,
            stacklevel=3,
        )
        lines.pop()
    return lines


def parse_rows(path: Path, body: Body, n_expert_used: int | None) -> pd.DataFrame:
    """The columns of a trace, `phase` as a number, in the order of the file.

    `body` begins with the header line. `n_expert_used` is for files of two columns.
    """
    header = [name.strip() for name in body[0][1].split(",")] if body else []
    if header == TWO_COLUMNS:
        return _tokens_of_choices(path, _columns(path, header, body[1:], header), n_expert_used)
    missing = [name for name in CSV_COLUMNS.split(",") if name not in header]
    if missing:
        raise TraceError(
            f"{path}: no route_trace v1 CSV: the column {missing[0]} is missing. "
            f"The header line should read {CSV_COLUMNS} (or layer,expert for bare choices)"
        )
    found = _columns(path, header, body[1:], CSV_COLUMNS.split(","))
    if (found["phase"] > 1).any():
        number = body[1:][int(np.argmax(found["phase"] > 1))][0]
        raise TraceError(f"{path}:{number}: phase is neither 0 (prefill) nor 1 (decode)")
    found["resident"] = found.pop("residency") > 0
    found["read_bytes"] = found.pop("expert_bytes")
    found["weight"] = found["weight"].astype(np.float32)
    return pd.DataFrame(found)


def _columns(
    path: Path, header: list[str], body: Body, names: Sequence[str]
) -> dict[str, np.ndarray]:
    """The named columns: int64, but float64 for the weight."""
    kinds = {name: np.float64 if name == "weight" else np.int64 for name in names}
    found = _fast(header, body, kinds)
    if found is None:
        found = _line_by_line(path, header, body, kinds)
    for name, values in found.items():
        if name != "weight" and (values < 0).any():
            number = body[int(np.argmax(values < 0))][0]
            raise TraceError(f"{path}:{number}: {name} is negative")
    return found


def _fast(header: list[str], body: Body, kinds: dict[str, type]) -> dict[str, np.ndarray] | None:
    """By pandas' parser, which knows no line numbers; None if anything is odd."""
    text = "\n".join(line for _, line in body)
    if not body or '"' in text or text.count(",") != (len(header) - 1) * len(body):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            table = pd.read_csv(
                io.StringIO(text),
                names=header,
                usecols=list(kinds),
                dtype=kinds,
                index_col=False,
                na_values={"weight": ["nan", "NaN"]},
                keep_default_na=False,
            )
    except (ValueError, OverflowError, Warning):  # a ParserError is a ValueError
        return None
    return {name: table[name].to_numpy() for name in kinds} if len(table) == len(body) else None


def _line_by_line(
    path: Path, header: list[str], body: Body, kinds: dict[str, type]
) -> dict[str, np.ndarray]:
    rows = [line.split(",") for _, line in body]
    for (number, _), row in zip(body, rows, strict=True):
        if len(row) != len(header):
            raise TraceError(f"{path}:{number}: {len(row)} values for {len(header)} columns")
    texts = zip(*rows, strict=True) if rows else [()] * len(header)
    columns = dict(zip(header, texts, strict=True))
    found: dict[str, np.ndarray] = {}
    for name, kind in kinds.items():
        try:
            found[name] = np.array(columns[name], dtype=kind)
        except (ValueError, OverflowError):
            number, text = _first_bad(body, columns[name], kind)
            raise TraceError(f"{path}:{number}: {name} is {text!r}, not a number") from None
    return found


def _first_bad(body: Body, values: Iterable[str], kind: type) -> tuple[int, str]:
    for (number, _), text in zip(body, values, strict=True):
        try:
            np.array(text, dtype=kind)
        except (ValueError, OverflowError):
            return number, text
    return body[-1][0], "?"


def _tokens_of_choices(
    path: Path, found: dict[str, np.ndarray], n_expert_used: int | None
) -> pd.DataFrame:
    """Tokens out of bare (layer, expert) choices in the order in which they were made.

    A pass through the model is over when the layer number falls. In a pass every layer has k rows
    for each token; k is `n_expert_used`, or the fewest rows that any layer of any pass has. A pass
    with more than k rows in a layer was a prompt.
    """
    layer, expert = found["layer"], found["expert"]
    n = len(layer)
    run = np.cumsum(np.diff(layer, prepend=layer[:1]) < 0)
    group = np.cumsum(np.diff(layer, prepend=layer[:1]) != 0)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    lengths = np.diff(np.r_[starts, n])
    k = n_expert_used or int(lengths.min(initial=n or 1))
    if (lengths % k).any():
        bad = int(np.argmax(lengths % k != 0))
        raise TraceError(
            f"{path}: layer {layer[starts[bad]]} has {lengths[bad]} choices in a row, which is no "
            f"multiple of {k} experts per token. Give the right n_expert_used (`labkit replay "
            "--n-expert-used`)."
        )
    place = np.arange(n) - np.repeat(starts, lengths)
    # A layer may route the last tokens of its pass only, so tokens are counted from the end.
    tokens = lengths // k
    runs = run[starts]
    _warn_of_layers_that_differ(path, layer[starts], lengths, runs, k, guessed=not n_expert_used)
    most = np.zeros(int(runs.max(initial=0)) + 1, np.int64)
    np.maximum.at(most, runs, tokens)
    first = np.r_[0, np.cumsum(most)]
    step = first[run] + np.repeat(most[runs] - tokens, lengths) + place // k
    return pd.DataFrame(
        {
            "turn": np.zeros(n, np.int64),
            "phase": (most[run] == 1).astype(np.int64),
            "step": step,
            "layer": layer,
            "slot": place % k,
            "expert": expert,
            "weight": np.full(n, np.nan, np.float32),
            "resident": np.zeros(n, bool),
            "read_bytes": np.zeros(n, np.int64),
        }
    )


def _warn_of_layers_that_differ(
    path: Path, layer: np.ndarray, lengths: np.ndarray, run: np.ndarray, k: int, *, guessed: bool
) -> None:
    """Warn if the choices of a pass look less like a prompt than like layers of different k.

    `layer`, `lengths`, `run`: of each group of choices in one layer, its layer, how many there are,
    and its pass. In a prompt all layers have k choices of every token; only the last one of a pass
    may have fewer tokens, because no later layer needs them.
    """
    inner = np.diff(run, append=-1) == 0  # not the last layer of its pass
    odd = np.flatnonzero(inner[:-1] & inner[1:] & (lengths[:-1] != lengths[1:]))
    all_prompts = guessed and len(lengths) and not _single(lengths // k, run).any()
    if len(odd):
        one, other = odd[0], odd[0] + 1
    elif all_prompts and (lengths != lengths[0]).any():
        one, other = 0, int(np.argmax(lengths != lengths[0]))
    else:
        return
    warnings.warn(
        f"{path}: layer {layer[one]} has {lengths[one]} choices in a row and layer {layer[other]} "
        f"has {lengths[other]}. That is read as a prompt of several tokens with {k} experts each. "
        "If the layers use different numbers of experts, a layer,expert file cannot say so, and "
        "every figure is wrong: record a route_trace v1 instead (`labkit trace`).",
        TraceWarning,
        stacklevel=5,
    )


def _single(tokens: np.ndarray, run: np.ndarray) -> np.ndarray:
    """Whether each pass is of one token; `tokens` and `run` of each group of choices."""
    most = np.zeros(int(run.max(initial=0)) + 1, np.int64)
    np.maximum.at(most, run, tokens)
    return most == 1
