"""Figures about what routing repeats and what it could be predicted from.

Tables, turns and baselines as in `labkit.routing_metrics`: `step`, `layer`, `slot`, `expert`, and
`turn` if it is there. Each figure means something only beside that of `uniform_routing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from labkit.routing_metrics import expert_load

_TOKEN = ["turn", "step"]
_CHOICE = [*_TOKEN, "layer", "expert"]


def imbalance(table: pd.DataFrame, n_expert: int) -> pd.DataFrame:
    """How uneven the load of each layer is.

    cv = standard deviation / mean of the experts' loads; max_times_fair = the largest load over an
    even share; entropy_bits = -sum of load x log2 load, at most log2 n_expert.

    Returns columns layer, cv, max_times_fair, entropy_bits.
    """
    load = expert_load(table, n_expert)
    share = load["load"]
    bits = (-share * np.log2(share.where(share > 0, 1.0))).groupby(load["layer"]).sum()
    times = load.groupby("layer")["times_fair"]
    result = {"cv": times.std(ddof=0), "max_times_fair": times.max(), "entropy_bits": bits}
    return pd.DataFrame(result).reset_index()


def overlap_by_lag(table: pd.DataFrame, lags: Sequence[int]) -> pd.DataFrame:
    """How much of a token's expert set the token `lag` steps before it had chosen too.

    overlap(lag) = mean over tokens and layers of |chosen(t) and chosen(t - lag)| / |chosen(t)|, for
    tokens whose t - lag is in the same turn of the table. At lag 1 it is 1 - churn.

    Returns columns lag, overlap (NaN where no two tokens are that far apart).
    """
    chosen = _choices(table)
    sizes = chosen.groupby([*_TOKEN, "layer"]).size().rename("chosen").reset_index()
    rows = []
    for lag in lags:
        before = chosen.assign(step=chosen["step"] + lag)
        kept = chosen.merge(before, on=_CHOICE).groupby([*_TOKEN, "layer"]).size().rename("kept")
        pairs = sizes.merge(before[[*_TOKEN, "layer"]].drop_duplicates(), on=[*_TOKEN, "layer"])
        pairs = pairs.merge(kept.reset_index(), on=[*_TOKEN, "layer"], how="left")
        rows.append((lag, (pairs["kept"].fillna(0) / pairs["chosen"]).mean()))
    return pd.DataFrame(rows, columns=["lag", "overlap"])


def working_set(table: pd.DataFrame) -> pd.DataFrame:
    """How many different (layer, expert) entries the run has used so far, token by token.

    entries(t) = |chosen(0) or ... or chosen(t)| over all layers; new(t) is its growth at t.

    Returns columns turn, step, entries (used at least once up to this token), new (first used
    there). Bytes are entries x their size; where the curve flattens, a cache that size is enough.
    """
    chosen = _choices(table).sort_values(_TOKEN, kind="stable")
    first = ~chosen.duplicated(["layer", "expert"])
    new = first.groupby([chosen["turn"], chosen["step"]]).sum().rename("new").reset_index()
    return new.assign(entries=new["new"].cumsum())[[*_TOKEN, "entries", "new"]]


def domain_information(tables: Mapping[str, pd.DataFrame], n_expert: int) -> pd.DataFrame:
    """How many bits one choice of an expert tells about the domain of the text, layer by layer.

    I = sum over d, e of p(d, e) x log2(p(d, e) / (p(d) p(e))), every domain weighing the same:
    p(d, e) = load of e in d / number of domains. 0: same use everywhere; log2 of the number of
    domains: the expert names the domain.

    Returns columns layer, information_bits, for the layers that all domains have.
    """
    loads = [
        expert_load(table, n_expert).set_index(["layer", "expert"])["load"]
        for table in tables.values()
    ]
    joint = pd.concat(loads, axis=1, join="inner").to_numpy() / max(len(loads), 1)
    index = pd.concat(loads, axis=1, join="inner").index
    apart = joint.sum(1, keepdims=True) / max(len(loads), 1)
    ratio = np.divide(joint, apart, out=np.ones_like(joint), where=joint > 0)
    bits = pd.Series((joint * np.log2(ratio)).sum(1), index=index)
    return bits.groupby("layer").sum().rename("information_bits").reset_index()


def co_activation(table: pd.DataFrame, layer: int, other: int, n_expert: int) -> np.ndarray:
    """How often tokens that chose expert i in `layer` chose expert j in `other`, against chance.

    lift[i, j] = P(j in other | i in layer) / P(j in other), over the tokens routed in both layers:
    1 is independence, above it the two go together.

    Returns an (n_expert, n_expert) array; NaN for experts that were not chosen.
    """
    chosen = _choices(table)
    sets = []
    for number in (layer, other):
        rows = chosen[chosen["layer"] == number].assign(used=1)
        used = rows.pivot_table(index=_TOKEN, columns="expert", values="used", fill_value=0)
        sets.append(used.reindex(columns=range(n_expert), fill_value=0))
    one, two = sets[0].align(sets[1], join="inner", axis=0)
    first, second = one.to_numpy(float), two.to_numpy(float)
    expected = np.outer(first.sum(0), second.sum(0)) / max(len(first), 1)
    return np.divide(
        first.T @ second, expected, out=np.full_like(expected, np.nan), where=expected > 0
    )


def predictor_accuracy(table: pd.DataFrame, hot: int | None = None) -> pd.DataFrame:
    """How much of each generated token's choice simple predictors name before its layer is reached.

    recall = |chosen and predicted| / |chosen|, averaged over generated tokens (all, without a
    `phase` column) and layers. The predictors: "previous token", what the token before chose in
    the layer; "hot list", the `hot` experts of the layer used most so far; "hot list of the
    prompt", those used most in the turn's own prompt. `hot` None is the layer's own k, so that all
    three name equally many. Where a predictor has seen nothing it names nothing.

    Returns columns predictor, recall.
    """
    chosen = _choices(table)
    in_prompt = (
        (table["phase"] == "prefill").to_numpy() if "phase" in table else np.zeros(len(table), bool)
    )
    prompts = set(
        map(tuple, _choices(table[in_prompt])[_TOKEN].drop_duplicates().to_numpy().tolist())
    )
    found: dict[str, list[float]] = {
        "previous token": [], "hot list": [], "hot list of the prompt": [],
    }  # fmt: skip
    for _, rows in chosen.groupby("layer", sort=True):
        counts: dict[int, int] = {}
        asked: dict[int, int] = {}
        last: tuple[int, int, set[int]] | None = None
        in_turn: int | None = None
        tokens: dict[tuple[int, int], set[int]] = {}
        named = (rows[name].tolist() for name in ("turn", "step", "expert"))
        for turn, step, expert in zip(*named, strict=True):
            tokens.setdefault((turn, step), set()).add(expert)
        for (turn, step), now in sorted(tokens.items()):
            if turn != in_turn:
                in_turn, asked = turn, {}
            if (turn, step) in prompts:
                _add(asked, now)
            else:
                near = last is not None and last[:2] == (turn, step - 1)
                before = last[2] if near and last else set()
                size = hot or len(now)
                for name, guess in (
                    ("previous token", before),
                    ("hot list", _top(counts, size)),
                    ("hot list of the prompt", _top(asked, size)),
                ):
                    found[name].append(len(now & guess) / len(now))
            _add(counts, now)
            last = (turn, step, now)
    means = [float(np.mean(values)) if values else float("nan") for values in found.values()]
    return pd.DataFrame({"predictor": list(found), "recall": means})


def _choices(table: pd.DataFrame) -> pd.DataFrame:
    """Distinct choices: turn, step, layer, expert."""
    if "turn" not in table.columns:
        table = table.assign(turn=0)
    return table[_CHOICE].drop_duplicates()


def _add(counts: dict[int, int], experts: set[int]) -> None:
    for expert in experts:
        counts[expert] = counts.get(expert, 0) + 1


def _top(counts: dict[int, int], size: int) -> set[int]:
    """The `size` experts with the most uses; among equals the lower number."""
    return set(sorted(counts, key=lambda expert: (-counts[expert], expert))[:size])
