"""A model's hyperparameters, read from GGUF metadata with llama.cpp's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labkit.errors import ModelFileError

MAX_LAYERS = 512
_LARGEST = 1 << 31


@dataclass(frozen=True)
class Keys:
    """Typed access to the keys of one architecture.

    Attributes:
        metadata: all keys, those of the architecture with its prefix (`qwen3moe.block_count`).
        architecture: the prefix.
        where: the file or shape, for messages.
    """

    metadata: Mapping[str, object]
    architecture: str
    where: str

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        return f"{self.architecture}.{key}" in self.metadata

    def count(self, key: str, default: int = 0) -> int:
        """The key as a count.

        Raises:
            ModelFileError: it is no whole number from 0 to 2^31.
        """
        return self._whole(key, self.metadata.get(f"{self.architecture}.{key}", default))

    def by_layer(self, key: str, n_layers: int, default: int | list[int] = 0) -> list[int]:
        """A value for each of `n_layers` layers; one number holds for all of them.

        Raises:
            ModelFileError: a list shorter than the model, or not of counts.
        """
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, list):
            return [self._whole(key, value)] * n_layers
        if len(value) < n_layers:
            raise ModelFileError(
                f"{self.where}: {self.architecture}.{key} lists {len(value)} layers, but the model"
                f" has {n_layers}. The metadata is damaged or made for another model."
            )
        return [self._whole(key, v) for v in value[:n_layers]]

    def listed(self, key: str) -> list[int]:
        """The key as a list of counts, empty if it is missing.

        Raises:
            ModelFileError: it is no list of whole numbers.
        """
        value = self.metadata.get(f"{self.architecture}.{key}", [])
        return [self._whole(key, v) for v in (value if isinstance(value, list) else [value])]

    def is_list(self, key: str) -> bool:
        """Whether the key holds a list by layer."""
        return isinstance(self.metadata.get(f"{self.architecture}.{key}"), list)

    def _whole(self, key: str, value: object) -> int:
        if not isinstance(value, int) or not 0 <= value < _LARGEST:  # booleans are 0 and 1
            raise ModelFileError(
                f"{self.where}: {self.architecture}.{key} is {value!r}; it must be a whole number"
                " from 0 to 2147483647."
            )
        return int(value)

    @property
    def n_layers(self) -> int:
        """All layers, multi-token heads too."""
        n_layers = self.count("block_count")
        if not 0 < n_layers <= MAX_LAYERS:
            raise ModelFileError(
                f"{self.where}: {self.architecture}.block_count is {n_layers};"
                f" a model has 1 to {MAX_LAYERS} layers."
            )
        return n_layers

    @property
    def n_trunk_layers(self) -> int:
        """Layers that computing a token runs through: without multi-token heads at the end."""
        heads = self.count("nextn_predict_layers")
        if heads > self.n_layers:
            raise ModelFileError(
                f"{self.where}: {self.architecture}.nextn_predict_layers is {heads}, more than the"
                f" {self.n_layers} layers (block_count)."
            )
        return self.n_layers - heads

    @property
    def context_length(self) -> int:
        """Tokens that the model was trained for, 0 if it does not say."""
        return self.count("context_length")


@dataclass(frozen=True)
class Heads:
    """Attention heads by layer, and the width of one.

    `key_width` and `value_width` are of layers that attend to everything, the `window_` ones of
    layers with a sliding window; `n_query` and `n_kv` have an entry for each layer.
    """

    n_query: list[int]
    n_kv: list[int]
    key_width: int
    value_width: int
    window_key_width: int
    window_value_width: int


def read_heads(keys: Keys) -> Heads:
    """The attention heads; widths default to an equal share of the model's width, as llama.cpp
    takes them (by the heads of layer 0)."""
    n_query = keys.by_layer("attention.head_count", keys.n_layers)
    n_kv = keys.by_layer("attention.head_count_kv", keys.n_layers, list(n_query))
    share = keys.count("embedding_length") // n_query[0] if n_query[0] else 0
    key = keys.count("attention.key_length", share) if n_query[0] else 0
    value = keys.count("attention.value_length", share) if n_query[0] else 0
    return Heads(
        n_query,
        n_kv,
        key,
        value,
        keys.count("attention.key_length_swa", key),
        keys.count("attention.value_length_swa", value),
    )
