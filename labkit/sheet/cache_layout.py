"""Which rows llama.cpp keeps for each layer of a model, from its metadata.

Most architectures differ in three things only: which layers have a sliding window, which are
recurrent, and whether a layer caches a latent key alone. Those are tables here, in the order in
which llama.cpp looks at them. A few have a cache of their own kind: `special_cache`.

Learned from llama.cpp's `create_memory`, its caches and the hyperparameters of each architecture,
and checked byte by byte against its own count for every architecture that `labkit.synth` makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from labkit.sheet.cache_rows import ATTENTION, INDEXER, LATENT, RECURRENT, WINDOW, CacheRows
from labkit.sheet.keys import Heads, Keys, read_heads
from labkit.sheet.known_caches import NO_CACHE

_PATTERN = "attention.sliding_window_pattern"


@dataclass(frozen=True)
class WindowRule:
    """Which layers have a sliding window, where the file does not list them.

    Of every `period` layers one attends to everything: the last, or the first if `full_first`.
    `width` replaces what the file says; `required` architectures have windows even when the file
    names none.
    """

    period: int = 0
    full_first: bool = False
    width: int = 0
    required: bool = False


WINDOWS: dict[str, WindowRule] = {
    "afmoe": WindowRule(4),
    "cohere2moe": WindowRule(4, full_first=True, required=True),
    "deepseek4": WindowRule(required=True),
    "dflash": WindowRule(),
    "dots3note": WindowRule(required=True),
    "exaone-moe": WindowRule(4, required=True),
    "gemma4": WindowRule(required=True),
    "gpt-oss": WindowRule(2, required=True),
    "granite_swa": WindowRule(required=True),
    "laguna": WindowRule(4, full_first=True),
    "llama4": WindowRule(4, width=8192, required=True),
    "maple": WindowRule(required=True),
    "mellum": WindowRule(4),
    "mimo2": WindowRule(required=True),
    "smallthinker": WindowRule(4, full_first=True, width=4096),
    "step35": WindowRule(required=True),
}
"""Architectures with sliding windows; others ignore the key, as llama.cpp does."""

EVERY_LAYER = frozenset({"deepseek4", "dflash"})
"""With hyper-connections, all layers have a window, whatever a pattern says."""

RECURRENT_WITHOUT_KEYS = frozenset(
    {"bailingmoe3", "glm5-next", "granitehybrid", "jamba", "kimi-k3", "kimi-linear"}
    | {"lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"}
)
"""A layer is recurrent where the file gives it 0 key heads."""

RECURRENT_BY_INTERVAL = {"minimax-01": 8, "qwen3next": 4, "qwen35moe": 4, "qwen4exp": 4}
"""All layers are recurrent but every n-th, n being `full_attention_interval` or this."""

SHORT_CONVOLUTION = frozenset({"lfm2", "lfm2moe"})
"""Recurrent layers that keep the last few inputs of a convolution, and no state."""

DELTA_ATTENTION = frozenset({"bailingmoe3", "glm5-next", "kimi-k3", "kimi-linear"})
"""Recurrent layers with a square state for each query head (Kimi delta attention)."""

TRUNK_ONLY_HYBRIDS = frozenset(RECURRENT_BY_INTERVAL) | {"glm5-next"}
"""Hybrids whose multi-token heads have no rows in the main context's cache."""


@dataclass(frozen=True)
class Layers:
    """What `cache_layout` found about a model's layers, for the special caches.

    `window[i]` is the sliding window of layer i or 0, `recurrent[i]` whether it is recurrent.
    """

    keys: Keys
    heads: Heads
    window: list[int]
    recurrent: list[bool]
    latent: bool

    @property
    def trunk(self) -> range:
        return range(self.keys.n_trunk_layers)

    @property
    def all(self) -> range:
        return range(self.keys.n_layers)

    def attention(self, layers: list[int] | range) -> list[CacheRows]:
        """Keys, and values unless attention is latent, of these layers."""
        rows = []
        for layer in layers:
            window, n_kv = self.window[layer], self.heads.n_kv[layer]
            key = self.heads.window_key_width if window else self.heads.key_width
            value = self.heads.window_value_width if window else self.heads.value_width
            kind = WINDOW if window else LATENT if self.latent else ATTENTION
            rows.append(CacheRows(layer, kind, "key", key * n_kv, window))
            if not self.latent:
                rows.append(CacheRows(layer, kind, "value", value * n_kv, window))
        return rows

    def indexer(self, layers: list[int], width: int) -> list[CacheRows]:
        """One key head a layer, by which sparse attention finds the tokens that matter.

        llama.cpp makes it with its ordinary cache: without latent attention there is a value of
        the model's own head width too, and a layer with a window keeps its own key width.
        """
        rows = []
        for layer in layers:
            window = self.window[layer]
            key = self.heads.window_key_width if window else width
            rows.append(CacheRows(layer, INDEXER, "key", key))
            if not self.latent:
                value = self.heads.window_value_width if window else self.heads.value_width
                rows.append(CacheRows(layer, INDEXER, "value", value))
        return rows

    def recurrent_states(self) -> list[CacheRows]:
        """Convolution history and state of the recurrent layers, one row for the one sequence."""
        history, state = _state_widths(self.keys, self.heads)
        rows = []
        for layer in self.trunk:
            if self.recurrent[layer]:
                rows.append(CacheRows(layer, RECURRENT, "state", history, fixed=1))
                rows.append(CacheRows(layer, RECURRENT, "state", state, fixed=1))
        return rows


def read_layers(keys: Keys) -> Layers:
    """What of `Layers` the metadata tells, without a special cache's own rules."""
    latent = bool(
        keys.count("attention.key_length_mla") and keys.count("attention.value_length_mla")
    )
    return Layers(keys, read_heads(keys), _windows(keys), _recurrent(keys), latent)


def cache_layout(keys: Keys, has_tensor: Callable[[str], bool]) -> list[CacheRows]:
    """The rows of one sequence's cache, by layer.

    Args:
        keys: the model's metadata.
        has_tensor: whether the model has a tensor of this name.
    """
    from labkit.sheet.special_cache import SPECIAL

    arch = keys.architecture
    if arch in NO_CACHE:
        return []
    layers = read_layers(keys)
    if arch in SPECIAL and (rows := SPECIAL[arch](layers, has_tensor)) is not None:
        return rows
    if any(layers.recurrent) or arch in RECURRENT_BY_INTERVAL or arch in RECURRENT_WITHOUT_KEYS:
        candidates = layers.trunk if arch in TRUNK_ONLY_HYBRIDS else layers.all
        attends = [layer for layer in candidates if not layers.recurrent[layer]]
        return layers.attention(attends) + layers.recurrent_states()
    return layers.attention(layers.trunk or layers.all)


def _windows(keys: Keys) -> list[int]:
    n_layers, n_trunk = keys.n_layers, keys.n_trunk_layers
    rule = WINDOWS.get(keys.architecture)
    if rule is None:
        return [0] * n_layers
    width = keys.count("attention.sliding_window")
    named = keys.has("attention.sliding_window")
    if not (rule.required or width) or (rule.required and named and not width):
        return [0] * n_layers
    width = rule.width or width
    if keys.architecture in EVERY_LAYER and keys.count("hyper_connection.count"):
        return [width] * n_layers
    if keys.is_list(_PATTERN):
        return [width if has else 0 for has in keys.by_layer(_PATTERN, n_layers)]
    period = keys.count(_PATTERN, rule.period)
    full = 0 if rule.full_first else period - 1
    layers = [period == 0 or layer % period != full for layer in range(n_trunk)]
    return [width if has else 0 for has in layers] + [0] * (n_layers - n_trunk)


def _recurrent(keys: Keys) -> list[bool]:
    n_layers, n_trunk = keys.n_layers, keys.n_trunk_layers
    arch = keys.architecture
    if arch in RECURRENT_BY_INTERVAL:
        if keys.has("attention.recurrent_layers"):
            return [bool(v) for v in keys.by_layer("attention.recurrent_layers", n_layers)]
        interval = keys.count("full_attention_interval", RECURRENT_BY_INTERVAL[arch])
        return [
            layer < n_trunk and (not interval or (layer + 1) % interval != 0)
            for layer in range(n_layers)
        ]
    if arch in RECURRENT_WITHOUT_KEYS:
        n_kv = read_heads(keys).n_kv
        return [layer < n_trunk and n_kv[layer] == 0 for layer in range(n_layers)]
    return [False] * n_layers


def _state_widths(keys: Keys, heads: Heads) -> tuple[int, int]:
    """Elements of a recurrent layer's (convolution history, state)."""
    arch = keys.architecture
    if arch in SHORT_CONVOLUTION:
        return keys.count("embedding_length") * (keys.count("shortconv.l_cache") - 1), 0
    if arch in DELTA_ATTENTION:
        width = keys.count("kda.head_dim")
        steps = max(1, keys.count("ssm.conv_kernel", 4)) - 1
        return 3 * steps * heads.n_query[0] * width, heads.n_query[0] * width * width
    if arch == "minimax-01":
        return 0, heads.n_query[0] * heads.key_width**2
    inner, state = keys.count("ssm.inner_size"), keys.count("ssm.state_size")
    groups = 0 if arch == "jamba" else keys.count("ssm.group_count")
    steps = max(1, keys.count("ssm.conv_kernel")) - 1
    return steps * (inner + 2 * groups * state), state * inner
