"""What a notebook may be given, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from labkit.errors import ParameterError
from labkit.experiment.parameters import checked, declared_parameters, from_text

CELL = """
model = ""  # empty: the bundled model
cache_mib: float | None = None  # None: a default
n_tokens = 64
ratio = 0.5
direct = False
budgets = [1, 2]
anything = None
"""


@pytest.fixture(name="declared")
def _declared():
    return declared_parameters(CELL, "a.ipynb")


def test_names_defaults_and_types_are_read(declared):
    assert list(declared) == [
        "model",
        "cache_mib",
        "n_tokens",
        "ratio",
        "direct",
        "budgets",
        "anything",
    ]
    assert declared["n_tokens"].default == 64
    assert declared["cache_mib"].types == {float, type(None)}
    assert declared["anything"].types == frozenset()


def test_unknown_name_names_the_nearest(declared):
    with pytest.raises(ParameterError, match=r"`cache_mbb`.*nearest is `cache_mib`"):
        checked({"cache_mbb": 64}, declared, "a.ipynb")


def test_notebook_without_parameters_says_how_to_declare_them():
    with pytest.raises(ParameterError, match="tag `parameters`"):
        checked({"seed": 1}, {}, "a.ipynb")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_tokens", 2.5),
        ("n_tokens", True),
        ("n_tokens", "many"),
        ("n_tokens", None),
        ("direct", 1),
        ("model", 3),
        ("budgets", 3),
        ("cache_mib", "all"),
    ],
)
def test_value_of_another_type_is_refused(declared, name, value):
    with pytest.raises(ParameterError, match=f"`{name}` takes"):
        checked({name: value}, declared, "a.ipynb")


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("ratio", 1, 1),
        ("n_tokens", np.int64(3), 3),
        ("cache_mib", None, None),
        ("cache_mib", 3, 3),
        ("budgets", (1, 2), [1, 2]),
        ("model", Path("a.gguf"), "a.gguf"),
        ("anything", {"a": 1}, {"a": 1}),
    ],
)
def test_fitting_values_become_plain(declared, name, value, plain):
    assert checked({name: value}, declared, "a.ipynb") == {name: plain}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("model", "12", "12"),
        ("n_tokens", "12", 12),
        ("n_tokens", "-1", -1),
        ("ratio", "1e-3", 0.001),
        ("cache_mib", "none", None),
        ("direct", "true", True),
        ("budgets", "[3, 4]", [3, 4]),
        ("anything", "word", "word"),
    ],
)
def test_text_of_a_command_line_takes_the_declared_type(declared, name, text, value):
    assert from_text(name, text, declared, "a.ipynb") == value


def test_text_that_is_no_number_is_refused(declared):
    with pytest.raises(ParameterError, match="`n_tokens` takes int"):
        from_text("n_tokens", "many", declared, "a.ipynb")


def test_broken_parameters_cell_is_named():
    with pytest.raises(ParameterError, match=r"a\.ipynb.*line 2"):
        declared_parameters("a = 1\nb = = 2", "a.ipynb")
