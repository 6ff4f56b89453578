"""Figures about routing: load, purity, churn, active set, reuse distance, LRU hits, agreement.

Every function takes a routing table as `RouteTrace.table` gives it, of which it reads the columns
`step`, `layer`, `slot` and `expert` (and `weight` where it says so), and `turn` if it is there.
A table covers one run: (turn, step) names a token. Figures over several texts average the runs.

What routing repeats and what it could be predicted from is in `labkit.routing_patterns`; the token
cycle, the bytes of a token's choices in all layers, is `labkit.demand.Demand.cycle_bytes`.

None of these figures means anything alone. Put each beside the same figure of `uniform_routing`
and of an untrained model: token identity by itself already makes routing look meaningful.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from labkit.stack_distance import stack_distance

_TOKEN = ["turn", "step"]


def expert_load(table: pd.DataFrame, n_expert: int) -> pd.DataFrame:
    """How often each expert of each layer was chosen.

    load = choices of the expert / choices in its layer; times_fair = load x n_expert, so 1 is an
    even share. Unused experts have rows of 0.

    Returns columns layer, expert, choices, load, times_fair; one row per layer and expert.
    """
    layers, counts = _counts(table, n_expert)
    load = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return pd.DataFrame(
        {
            "layer": np.repeat(layers, n_expert),
            "expert": np.tile(np.arange(n_expert), len(layers)),
            "choices": counts.ravel(),
            "load": load.ravel(),
            "times_fair": load.ravel() * n_expert,
        }
    )


def domain_purity(tables: Mapping[str, pd.DataFrame], n_expert: int) -> pd.DataFrame:
    """How much each expert belongs to one domain.

    rate(d, e) = choices of expert e in domain d / all choices of d in that layer, so that long
    texts weigh no more than short ones; purity(e) = max over d of rate(d, e) / sum over d of
    rate(d, e). It lies between 1 / domains (used alike by all) and 1. The headline figure is the
    mean over experts that were used at all: `domain_purity(...)["purity"].mean()`.

    Args:
        tables: one routing table (or several concatenated) per domain.

    Returns columns layer, expert, domain (the largest; missing if unused), purity (NaN if unused),
    total_rate.
    """
    names, layers, rates = _rates(tables, n_expert)
    total = rates.sum(0)
    used = total > 0
    purity = np.where(used, rates.max(0) / np.where(used, total, 1), np.nan)
    domain = np.array(names, dtype=object)[rates.argmax(0)]
    return pd.DataFrame(
        {
            "layer": np.repeat(layers, n_expert),
            "expert": np.tile(np.arange(n_expert), len(layers)),
            "domain": pd.Series(domain.ravel()).where(used.ravel()),
            "purity": purity.ravel(),
            "total_rate": total.ravel(),
        }
    )


def domain_distance(tables: Mapping[str, pd.DataFrame], n_expert: int) -> pd.DataFrame:
    """Total variation between the expert use of each two domains, averaged over layers.

    TV(a, b) = 1/2 x sum over e of |rate(a, e) - rate(b, e)|: 0 is the same use, 1 no common expert.

    Returns columns first, second, total_variation.
    """
    names, layers, rates = _rates(tables, n_expert)
    rows = [
        (names[i], names[j], float(np.abs(rates[i] - rates[j]).sum() / 2 / (len(layers) or np.nan)))
        for i in range(len(names))
        for j in range(i + 1, len(names))
    ]
    return pd.DataFrame(rows, columns=["first", "second", "total_variation"])


def churn(table: pd.DataFrame) -> pd.DataFrame:
    """How much of a token's expert set the token before it did not use, layer by layer.

    churn(t) = 1 - |chosen(t) and chosen(t-1)| / |chosen(t)|; 0 repeats the set, 1 shares nothing.
    Uniform routing gives 1 - k / n_expert on average. Tokens whose predecessor is not in the
    table (the first, or after a gap) have no row.

    Returns columns turn, step, layer, churn.
    """
    keyed = _keyed(table)
    chosen = keyed.groupby([*_TOKEN, "layer"], sort=True).size().rename("chosen").reset_index()
    before = keyed[[*_TOKEN, "layer", "expert"]].copy()
    before["step"] += 1
    repeated = keyed.merge(before, on=[*_TOKEN, "layer", "expert"])
    kept = repeated.groupby([*_TOKEN, "layer"]).size().rename("kept").reset_index()
    preceded = before[[*_TOKEN, "layer"]].drop_duplicates()
    result = chosen.merge(preceded, on=[*_TOKEN, "layer"])
    result = result.merge(kept, on=[*_TOKEN, "layer"], how="left")
    result["churn"] = 1 - result["kept"].fillna(0) / result["chosen"]
    return result[[*_TOKEN, "layer", "churn"]].sort_values([*_TOKEN, "layer"], ignore_index=True)


def active_set(table: pd.DataFrame, window: int) -> pd.DataFrame:
    """How many different experts the last `window` tokens used in each layer.

    active(t) = |chosen(t - window + 1) or ... or chosen(t)|, between k and window x k. A token with
    fewer than `window` - 1 predecessors in its turn has no row.

    Returns columns turn, step, layer, active.
    """
    if window < 1:
        raise ValueError(f"a window of {window} tokens is empty; use 1 or more")
    parts = []
    for (turn, layer), rows in _keyed(table).groupby(["turn", "layer"], sort=True):
        tokens, at = np.unique(rows["step"].to_numpy(), return_inverse=True)
        used = np.zeros((len(tokens) + 1, int(rows["expert"].max()) + 1), np.int64)
        used[at + 1, rows["expert"].to_numpy()] = 1
        running = used.cumsum(0)
        active = ((running[window:] - running[:-window]) > 0).sum(1)
        names = {"turn": turn, "step": tokens[window - 1 :], "layer": layer, "active": active}
        parts.append(pd.DataFrame(names))
    columns = [*_TOKEN, "layer", "active"]
    if not parts:
        return pd.DataFrame(columns=columns)
    return pd.concat(parts).sort_values([*_TOKEN, "layer"], ignore_index=True)


def routing_entropy(table: pd.DataFrame) -> pd.DataFrame:
    """How evenly a token's weight is spread over its chosen experts, in bits.

    With w the weights of a token in a layer, divided by their sum: -sum of w x log2 w. 0 is all
    on one expert, log2 k an even spread. Weights that the run could not see (NaN) give NaN.

    Returns columns turn, step, layer, entropy_bits.
    """
    keyed = _keyed(table)
    keys = [keyed[name] for name in (*_TOKEN, "layer")]
    weight = keyed["weight"].astype(float)
    share = weight / weight.groupby(keys).transform("sum", skipna=False)
    bits = -share * np.log2(share.where(share > 0, 1.0).where(share.notna()))
    total = bits.groupby(keys).sum(min_count=1).rename("entropy_bits")
    unseen = weight.isna().groupby(keys).any()
    return total.mask(unseen).reset_index()


def reuse_distance(table: pd.DataFrame) -> pd.Series:
    """For each choice: how many different entries were used since this entry was used last.

    distance(i) = |{entries used at j : last use of entry(i) < j < i}|, where i, j number choices.
    An entry is a (layer, expert); choices are taken in the order turn, step, layer, slot. A cache
    of C entries that drops the least recently used one hits exactly where the distance is below C.

    Returns a nullable integer series with the table's index; <NA> where an entry comes first.
    """
    ordered = _keyed(table)
    layers, experts = ordered["layer"].to_numpy(), ordered["expert"].to_numpy()
    entries = layers.astype(np.int64) * (int(experts.max(initial=0)) + 1) + experts
    distances = pd.Series(stack_distance(entries), index=ordered.index, dtype="Int64")
    return distances.mask(distances < 0).rename("reuse_distance").reindex(table.index)


def lru_hit_rate(table: pd.DataFrame, fraction: float, n_expert: int) -> float:
    """Hit rate of one LRU cache over all layers with room for `fraction` of all entries.

    Room is floor(fraction x layers in the table x n_expert) entries; hit rate = choices that found
    their entry / all choices, starting empty, in the order turn, step, layer, slot.
    """
    if not len(table):
        return float("nan")
    room = int(np.floor(fraction * table["layer"].nunique() * n_expert + 1e-9))
    return float((reuse_distance(table) < room).fillna(False).mean())


def agreement(table: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Share of choices that two runs over the same tokens have in common, layer by layer.

    |chosen here and chosen there| / |chosen here|, the order of slots not mattering.

    Returns columns layer, agreement.
    """
    keys = [*_TOKEN, "layer", "expert"]
    here, there = _keyed(table)[keys], _keyed(other)[keys].drop_duplicates()
    found = here.merge(there, on=keys, how="left", indicator="side")
    found["agreement"] = (found["side"] == "both").astype(float)
    return found.groupby("layer")["agreement"].mean().reset_index()


def uniform_routing(table: pd.DataFrame, n_expert: int, seed: int = 0) -> pd.DataFrame:
    """The same tokens and layers routed at random, k different experts each: the baseline.

    Returns columns turn, step, layer, slot, expert.
    """
    rng = np.random.default_rng(seed)
    tokens = _keyed(table).groupby([*_TOKEN, "layer"], sort=True).size().reset_index(name="k")
    ranks = rng.random((len(tokens), n_expert)).argsort(1)
    k = tokens["k"].to_numpy()
    slot = np.concatenate([np.arange(n) for n in k]) if len(k) else np.zeros(0, int)
    row = np.repeat(np.arange(len(tokens)), k)
    result = tokens.loc[row, [*_TOKEN, "layer"]].reset_index(drop=True)
    return result.assign(slot=slot, expert=ranks[row, slot])


def _keyed(table: pd.DataFrame) -> pd.DataFrame:
    """The table in order of use, with a `turn` column."""
    if "turn" not in table.columns:
        table = table.assign(turn=0)
    order = [*_TOKEN, "layer", "slot"]
    return table.sort_values([name for name in order if name in table.columns], kind="stable")


def _counts(table: pd.DataFrame, n_expert: int) -> tuple[np.ndarray, np.ndarray]:
    """Layers (L,) and choices (L, n_expert)."""
    layers, at = np.unique(table["layer"].to_numpy(), return_inverse=True)
    experts = table["expert"].to_numpy()
    if len(experts) and experts.max() >= n_expert:
        raise ValueError(f"the table holds expert {experts.max()}, but n_expert is {n_expert}")
    flat = np.bincount(at * n_expert + experts, minlength=len(layers) * n_expert)
    return layers, flat.reshape(len(layers), n_expert)


def _rates(
    tables: Mapping[str, pd.DataFrame], n_expert: int
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Domains, layers (L,) and rates (D, L, n_expert); every domain must have the same layers."""
    counted = {name: _counts(table, n_expert) for name, table in tables.items()}
    layers = next(iter(counted.values()))[0]
    for name, (own, _) in counted.items():
        if not np.array_equal(own, layers):
            raise ValueError(f"domain {name!r} has layers {own.tolist()}, not {layers.tolist()}")
    rates = np.stack([c / np.maximum(c.sum(1, keepdims=True), 1) for _, c in counted.values()])
    return list(counted), layers, rates
