"""What a budget's warning says before memory does."""

from __future__ import annotations

import re

from labkit import bundled
from labkit.gguf_map import open_gguf
from labkit.runtime.budget import budget_warning, layer_floor_bytes, widest_layer_bytes

MIB = 2**20


def test_a_budget_below_one_layer_names_what_a_prompt_takes() -> None:
    gguf = open_gguf(bundled.model_path())
    layer = widest_layer_bytes(gguf)
    sizes = [slices.nbytes for e in range(gguf.n_expert) for slices in gguf.expert(1, e)]
    assert layer == sum(sizes) > layer_floor_bytes(gguf)
    words = re.escape(f"{layer / MIB:.2f} MiB for them, whatever the budget")
    small = min(layer, gguf.token_cycle_bytes) - 1
    assert re.search(words, budget_warning(gguf, small) or "")
    large = max(layer, gguf.token_cycle_bytes)
    assert not re.search(words, budget_warning(gguf, large) or "")
