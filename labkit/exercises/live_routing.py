"""Exercises of `02_live_routing`: load, misses, churn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.exercises.check import Verdict, check

if TYPE_CHECKING:
    import pandas as pd

    from labkit.gguf_map import GGUFMap
    from labkit.runtime import Session

#: Points of churn by which a prompt must be calmer than the run: less is chance.
_CALMER_PCT = 2
_TOKENS = 48


def busiest_expert(answer: Any, load: pd.DataFrame) -> Verdict:
    """An expert that most tokens chose in the first MoE layer; `load` as of `charts.load_table`."""
    tokens = load[load["layer"] == load["layer"].min()].set_index("expert")["tokens"]
    return check(
        answer,
        lambda expert: tokens.get(expert) == tokens.max(),
        hint="Click along the first row of the heatmap, or look at that layer's rows of `load`.",
    )


def cold_token(answer: Any, gguf: GGUFMap, last_read_mib: float) -> Verdict:
    """MiB to read for a token that finds nothing; `last_read_mib` is what the last one read."""
    cold = gguf.token_cycle_bytes / 2**20
    return check(
        answer,
        cold,
        tolerance=0.02 * cold,
        hint="Every layer needs its top-k experts: sum over the layers, in units of 2**20 bytes.",
        because=f"The run read {last_read_mib:.2f} MiB for its last token.",
    )


def churn_of_chance(answer: Any, gguf: GGUFMap) -> Verdict:
    """Churn of random routing, in percent."""
    return check(
        answer,
        100 * (1 - gguf.n_expert_used / gguf.n_expert),
        tolerance=0.6,
        hint="An expert of this token was also chosen by the one before with probability k / E.",
    )


def calmer_prompt(answer: Any, session: Session, over_time: pd.DataFrame) -> Verdict:
    """A prompt with less churn than the run that `over_time` shows; it is run to see."""

    def calmer(prompt: str) -> bool:
        return _churn_pct(session, prompt) < over_time["churn_pct"].mean() - _CALMER_PCT

    return check(
        answer, calmer, hint="Text that repeats itself, or digits, repeats its experts too."
    )


def _churn_pct(session: Session, prompt: str) -> float:
    from labkit.charts import over_time_table

    session.reset()
    session.generate(prompt, _TOKENS)
    routing = session.trace.table
    decode = routing[routing["phase"] == "decode"]
    return float(over_time_table(decode, session.map.n_expert)["churn_pct"].mean())
