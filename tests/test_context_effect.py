"""The same tokens after different texts: that they are the same, and that the text matters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from labkit import charts
from labkit.bundled import model_path, prompts
from labkit.context_effect import same_tokens
from labkit.errors import SessionError
from labkit.runtime import Session

TEXT = "\nthe name of the first"


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(model_path()) as opened:
        yield opened


def test_all_tables_hold_the_same_tokens_in_all_layers(session: Session) -> None:
    texts = prompts()
    contexts = {"short": texts["english"][0], "long": texts["python"][0] * 2}
    tables = same_tokens(session, contexts, TEXT)
    # the session still holds the last prompt: its end is the text
    count = tables["short"]["step"].nunique()
    ends = [text for *_, text in session.trace.tokens if text][-count - 1 :]
    assert TEXT.strip() in "".join(ends)
    for table in tables.values():
        assert table["step"].nunique() == count
        assert sorted(table["layer"].unique()) == session.map.moe_layers
        assert len(table) == count * len(session.map.moe_layers) * session.map.n_expert_used
    assert tables["short"]["step"].min() < tables["long"]["step"].min()
    assert not session.all_logits


def test_the_same_context_gives_the_same_routing_and_another_domain_does_not(
    session: Session,
) -> None:
    texts = prompts()
    contexts = {"a": texts["english"][0], "again": texts["english"][0], "b": texts["python"][0]}
    tables = same_tokens(session, contexts, TEXT)
    assert (charts.overlap_table(tables["a"], tables["again"])["overlap_pct"] == 100).all()
    across = charts.overlap_table(tables["a"], tables["b"])["overlap_pct"].mean()
    random = 100 * session.map.n_expert_used / session.map.n_expert
    assert random < across < 95


def test_a_text_without_tokens_of_its_own_is_refused(session: Session) -> None:
    with pytest.raises(SessionError, match="line break"):
        same_tokens(session, {"a": "x", "b": "y"}, "")
