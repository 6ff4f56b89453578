"""What attending to the tokens before costs a layer: operations, and bytes of the cache."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.sheet.cache_layout import read_layers
from labkit.sheet.keys import Keys

_F16_BYTES = 2

SPARSE = frozenset({"deepseek32", "dots3note", "glm-dsa", "glm5-next", "hy_v4", "qwen4exp"})
"""Architectures whose indexer picks the tokens to attend to."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer that attends.

    Attributes:
        layer: which one.
        n_query: query heads.
        key_width, value_width: of one head, as cached (of latent attention, its compressed key).
        row_width: elements that the cache holds for one token, keys and values of all heads.
        reach: the most tokens it looks at (a window, or what an indexer picks); 0 is all.
    """

    layer: int
    n_query: int
    key_width: int
    value_width: int
    row_width: int
    reach: int

    def n_seen(self, n_past: int) -> int:
        """Tokens that a token after `n_past` others looks at, itself included."""
        seen = n_past + 1
        return min(seen, self.reach) if self.reach else seen

    def flops(self, n_past: int) -> float:
        """Operations of scores and of weighted values."""
        width = self.key_width + self.value_width
        return 2.0 * self.n_query * width * self.n_seen(n_past)

    def read_bytes(self, n_past: int) -> float:
        """Bytes of an F16 cache that are read."""
        return float(_F16_BYTES * self.row_width * self.n_seen(n_past))


def attention_layers(keys: Keys) -> list[Attention]:
    """The layers of the trunk that attend, from metadata."""
    layers = read_layers(keys)
    chosen = keys.count("attention.indexer.top_k") if keys.architecture in SPARSE else 0
    n_ff = keys.by_layer("feed_forward_length", keys.n_layers)
    found = []
    for layer in layers.trunk:
        no_attention = layers.recurrent[layer] or not layers.heads.n_query[layer]
        feed_forward_alone = keys.architecture.startswith("nemotron_h") and n_ff[layer]
        if no_attention or feed_forward_alone:
            continue
        window = layers.window[layer]
        heads, n_kv = layers.heads, layers.heads.n_kv[layer]
        key = heads.window_key_width if window else heads.key_width
        value = heads.window_value_width if window else heads.value_width
        row = n_kv * key if layers.latent else n_kv * (key + value)
        found.append(Attention(layer, heads.n_query[layer], key, value, row, window or chosen))
    return found
