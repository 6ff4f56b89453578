"""Altair charts of labkit's tables.

Importing this package enables labkit's renderer (interactive in JupyterLab and VS Code, a picture
everywhere else, no network) and its theme. Every chart function takes DataFrames and returns an
Altair chart whose title is the finding, computed from the data.
"""

from labkit.charts.renderer import bundle, enable, finding, png, show, still
from labkit.charts.routing import (
    active_set_and_churn,
    expert_load,
    same_tokens_two_contexts,
)
from labkit.charts.routing_tables import load_table, over_time_table, overlap_table
from labkit.charts.theme import (
    CATEGORICAL,
    DIVERGING,
    FAINT_INK,
    GRID,
    INK,
    ROLE_COLOURS,
    SEQUENTIAL,
    title,
)

__all__ = [
    "CATEGORICAL",
    "DIVERGING",
    "FAINT_INK",
    "GRID",
    "INK",
    "ROLE_COLOURS",
    "SEQUENTIAL",
    "active_set_and_churn",
    "bundle",
    "enable",
    "expert_load",
    "finding",
    "load_table",
    "over_time_table",
    "overlap_table",
    "png",
    "same_tokens_two_contexts",
    "show",
    "still",
    "title",
]

enable()
