"""What a replay predicts is what the live cache does, batch by batch, under every policy."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import pytest

from labkit.bundled import model_path
from labkit.policy import ONLINE, Lookup
from labkit.replay import demand, replay_batches
from labkit.runtime import Session

PROMPT = "In the beginning the list was empty, and the first of the names was written in it."


# With the larger budget whole tokens find all that they want, of which a policy is told late.
@pytest.mark.parametrize(("cache_mib", "evicts"), [(1.5, 100), (2.75, 0)])
@pytest.mark.parametrize("policy", ONLINE)
def test_live_and_replay_agree_exactly(
    policy: str, cache_mib: float, evicts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[Lookup] = []
    with Session(
        model_path(), cache_mib=cache_mib, policy=policy, prefill="experts", trial=False
    ) as session:
        streaming = session._engine.streaming
        assert streaming is not None
        source = streaming.source
        ask = source.policy.request

        def note(layer: int, experts: Iterable[int], entry_bytes: int) -> Lookup:
            decided.append(ask(layer, experts, entry_bytes))
            return decided[-1]

        monkeypatch.setattr(source.policy, "request", note)
        told_late: list[bool] = []
        has_all = source.has_all
        monkeypatch.setattr(
            source, "has_all", lambda *asked: told_late.append(has_all(*asked)) or told_late[-1]
        )
        session.generate(PROMPT, 40)
        session.generate(" And then", 10)
        trace = session.trace
    replayed = replay_batches(trace, cache_mib, policy)
    assert replayed["evicted"].sum() > evicts
    assert cache_mib < 2 or sum(told_late) > 5
    assert replayed["hits"].sum() > 100
    live = pd.DataFrame(
        [(len(f.hits), len(f.misses), len(f.evicted)) for f in decided],
        columns=["hits", "misses", "evicted"],
    )
    pd.testing.assert_frame_equal(replayed[["hits", "misses", "evicted"]], live)
    # The bytes, as the session's own trace has them, batch by batch.
    batches = demand(trace).keys
    table = trace.table
    read = table.groupby(["turn", "phase", "layer"], observed=True)["read_bytes"].sum()
    same = replayed.groupby(["turn", "phase", "layer"])["read_bytes"].sum()
    pd.testing.assert_series_equal(
        same, read.rename(index=str, level="phase").reindex(same.index), check_dtype=False
    )
    assert len(batches) == len(replayed)
    # And token by token.
    decode = table[table["phase"] == "decode"].groupby(["turn", "step"])["read_bytes"].sum()
    again = replayed[replayed["phase"] == "decode"].groupby(["turn", "step"])["read_bytes"].sum()
    assert decode.tolist() == again.tolist()


def test_an_unknown_policy_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(ValueError, match="no cache policy 'mru'"):
        Session(model_path(), policy="mru")
