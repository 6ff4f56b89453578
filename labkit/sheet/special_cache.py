"""Caches of architectures that keep more than keys, values and recurrent states.

Each function takes the layers and a look into the tensor names, and gives the rows; None where
this model of the architecture has an ordinary cache after all.
"""

from __future__ import annotations

from collections.abc import Callable

from labkit.sheet.cache_layout import Layers
from labkit.sheet.cache_rows import COMPRESSED, INDEXER, RECURRENT, WINDOW, CacheRows
from labkit.sheet.keys import Keys

_FINE, _COARSE = 4, 128
"""DeepSeek-V4 keeps one compressed row for so many tokens, by layer."""

HasTensor = Callable[[str], bool]


def _sparse(layers: Layers, _: HasTensor) -> list[CacheRows]:
    """DeepSeek-V3.2, GLM: latent attention over tokens that a lightning indexer chose."""
    with_indexer = [layer for layer in layers.trunk if _owns_indexer(layers, layer)]
    width = layers.keys.count("attention.indexer.key_length")
    return layers.attention(layers.trunk) + layers.indexer(with_indexer, width)


def _owns_indexer(layers: Layers, layer: int) -> bool:
    """Whether the layer chooses for itself instead of taking over an earlier layer's choice."""
    keys = layers.keys
    if keys.architecture == "deepseek32":
        return True
    if keys.has("attention.indexer.types"):
        return bool(keys.by_layer("attention.indexer.types", keys.n_trunk_layers)[layer])
    if keys.architecture == "glm-dsa" and keys.context_length >= 1 << 20:
        # GLM-5.2 files do not list it: two layers, then every fourth. The list has 78 layers.
        return (layer < 2 or layer % 4 == 2) and layer < 78
    return keys.architecture in ("glm-dsa", "glm5-next")


def _hy_v4(layers: Layers, has_tensor: HasTensor) -> list[CacheRows] | None:
    if not layers.keys.count("attention.indexer.top_k"):
        return layers.attention(layers.all)
    width = layers.keys.count("attention.indexer.key_length")
    with_indexer = [layer for layer in layers.trunk if _owns_indexer(layers, layer)]
    return layers.attention(layers.all) + layers.indexer(with_indexer, width)


def _minimax_m3(layers: Layers, _: HasTensor) -> list[CacheRows]:
    """Sparse layers have an indexer, leading dense ones do not."""
    keys = layers.keys
    dense = keys.count("leading_dense_block_count")
    width = keys.count("attention.indexer.key_length")
    return layers.attention(layers.all) + layers.indexer(list(layers.all)[dense:], width)


def _hybrid_with_indexer(layers: Layers, has_tensor: HasTensor) -> list[CacheRows] | None:
    """GLM-5-next, Qwen4: recurrent layers, and an indexer on those that attend."""
    keys = layers.keys
    attends = [layer for layer in layers.trunk if not layers.recurrent[layer]]
    glm = keys.architecture == "glm5-next"
    owners = [layer for layer in attends if not glm or _owns_indexer(layers, layer)]
    width = keys.count("attention.indexer.key_length")
    if width:
        # Pooled indexers keep a key, a gate and a pooled value for each token.
        pooled = 3 if keys.count("attention.indexer.kpool") else 1
        rows = [CacheRows(layer, INDEXER, "key", pooled * width) for layer in owners]
    else:
        rows = []
    return layers.attention(attends) + rows + layers.recurrent_states() + _ngram_history(keys)


def _ngram_history(keys: Keys) -> list[CacheRows]:
    """Qwen4's n-gram embeddings run through a convolution, whose last inputs are kept."""
    steps = max(1, keys.count("ple.conv_kernel")) - 1
    width = steps * keys.count("ple.ngram_size") * keys.count("embedding_length")
    width *= keys.count("hyper_connection.count")
    chosen = keys.listed("ple.layers") if width else []
    return [CacheRows(layer, RECURRENT, "state", width, fixed=1) for layer in chosen]


def _deepseek4(layers: Layers, has_tensor: HasTensor) -> list[CacheRows]:
    """A window of exact keys in every layer, and compressed ones of all that came before.

    A layer of ratio 4 also has an indexer over its compressed rows; both ratios have a state in
    which the row under way is put together. Keys serve as values.
    """
    keys, heads = layers.keys, layers.heads
    n_trunk = keys.n_layers if not _has_draft_head(keys, has_tensor) else keys.n_trunk_layers
    ratios = keys.by_layer("attention.compress_ratios", keys.n_layers)
    indexer = keys.count("attention.indexer.key_length")
    rows = []
    for layer in layers.all:
        width = heads.window_key_width * heads.n_kv[layer]
        rows.append(CacheRows(layer, WINDOW, "key", width, layers.window[layer]))
        ratio = ratios[layer]
        if ratio not in (_FINE, _COARSE):
            continue
        rows.append(CacheRows(layer, COMPRESSED, "key", width, ratio=ratio))
        if ratio == _FINE:
            rows.append(CacheRows(layer, INDEXER, "key", indexer, ratio=ratio))
        if layer < n_trunk:
            rows += _states(layer, ratio, heads.window_key_width, indexer)
    return rows


def _states(layer: int, ratio: int, key_width: int, indexer: int) -> list[CacheRows]:
    """Keys and scores of the compressed row under way; ratio 4 overlaps with the row before."""
    if ratio == _COARSE:
        return [CacheRows(layer, RECURRENT, "state", key_width, fixed=_COARSE)] * 2
    widths = (key_width, key_width, indexer, indexer)
    return [CacheRows(layer, RECURRENT, "state", 2 * w, fixed=2 * _FINE) for w in widths]


def _has_draft_head(keys: Keys, has_tensor: HasTensor) -> bool:
    return has_tensor(f"blk.{keys.n_trunk_layers}.nextn.eh_proj.weight")


def _gemma4(layers: Layers, _: HasTensor) -> list[CacheRows]:
    """The last layers use the keys and values of earlier ones."""
    keys = layers.keys
    own = keys.n_layers - keys.count("attention.shared_kv_layers")
    return layers.attention([layer for layer in layers.trunk if layer < own])


def _dflash(layers: Layers, _: HasTensor) -> list[CacheRows] | None:
    """A draft of DeepSeek-V4 is a whole model: it has no multi-token heads to leave out."""
    return layers.attention(layers.all) if layers.keys.count("hyper_connection.count") else None


def _nemotron(layers: Layers, _: HasTensor) -> list[CacheRows]:
    """A layer attends, is recurrent, or has a feed-forward part: one of the three."""
    keys = layers.keys
    n_ff = keys.by_layer("feed_forward_length", keys.n_layers)
    for layer in layers.all:
        layers.recurrent[layer] = layers.recurrent[layer] and not n_ff[layer]
    attends = [i for i in layers.all if not layers.recurrent[i] and not n_ff[i]]
    return layers.attention(attends) + layers.recurrent_states()


SPECIAL: dict[str, Callable[[Layers, HasTensor], list[CacheRows] | None]] = {
    "deepseek32": _sparse,
    "deepseek4": _deepseek4,
    "dflash": _dflash,
    "dots3note": _sparse,
    "gemma4": _gemma4,
    "glm-dsa": _sparse,
    "glm5-next": _hybrid_with_indexer,
    "hy_v4": _hy_v4,
    "minimax-m3": _minimax_m3,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron,
    "qwen4exp": _hybrid_with_indexer,
}
