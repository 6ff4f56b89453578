"""The weights of a model: what each is for, how large, and how much of it one token uses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from labkit.architectures import (
    EMBEDDING,
    NORM,
    OUTPUT,
    ROUTED_EXPERT,
    ROUTER,
    SHARED_EXPERT,
    layer_of,
    role_of,
)
from labkit.errors import OptionError
from labkit.gguf_map import GGUFMap
from labkit.gguf_map.types import GGML_TYPES
from labkit.sheet.shape import ModelShape

ROUTED, SHARED, EMBEDDINGS, DENSE = "routed experts", "shared experts", "embeddings", "dense"

PARTS: tuple[str, ...] = (ROUTED, SHARED, DENSE, EMBEDDINGS)
"""Every weight is in exactly one part; embeddings hold the output matrix too."""

_PART_OF_ROLE = {
    ROUTED_EXPERT: ROUTED,
    SHARED_EXPERT: SHARED,
    EMBEDDING: EMBEDDINGS,
    OUTPUT: EMBEDDINGS,
}
_TOKEN_EMBEDDING = "token_embd.weight"
_IDS = ("tid2eid", "ordering", "d2t")
_TYPES = {name: (block, nbytes) for name, block, nbytes in GGML_TYPES.values()}

Bits = float | str | Mapping[str, float | str]
"""Bits of a weight, or a ggml type such as "Q4_0", for all weights or by role of
`labkit.architectures.ROLES`, "*" standing for the roles that are not named."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the model.

    Attributes:
        name, role, layer: as in the file; `layer` is None outside the layers.
        shape: elements by dimension, the contiguous one first.
        nbytes: its size as stored.
        token_share: the part of it that computing one token uses, 0 to 1.
    """

    name: str
    role: str
    layer: int | None
    shape: tuple[int, ...]
    nbytes: int
    token_share: float

    @property
    def part(self) -> str:
        """Which of `PARTS` it is counted in."""
        return _PART_OF_ROLE.get(self.role, DENSE)

    @property
    def n_params(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def n_experts(self) -> int:
        """Routed experts that it holds; 0 for every other tensor."""
        return self.shape[2] if self.role == ROUTED_EXPERT else 0

    @property
    def token_params(self) -> float:
        """Parameters of it that computing one token uses."""
        return self.n_params * self.token_share

    @property
    def token_bytes(self) -> float:
        """Bytes of it that computing one token reads."""
        return self.nbytes * self.token_share

    @property
    def multiplies(self) -> bool:
        """Whether tokens are multiplied with it: a matrix, not a table of rows to look up."""
        return len(self.shape) > 1 and (self.role != EMBEDDING or self.token_share == 1)


def token_share(
    name: str, shape: tuple[int, ...], *, n_used: int, n_computed_layers: int, tied: bool
) -> float:
    """The part of a tensor that computing one token uses.

    Top-k of the routed experts; one row of an embedding, but all of it where it doubles as the
    output matrix (`tied`); nothing of multi-token heads; all of the rest.
    """
    layer = layer_of(name)
    if layer is not None and layer >= n_computed_layers:
        return 0.0
    role = role_of(name)
    if role == ROUTED_EXPERT:
        return n_used / shape[2]
    if role == EMBEDDING and len(shape) > 1 and not (tied and name == _TOKEN_EMBEDDING):
        return 1 / shape[1]
    return 1.0


def weights_of_file(gguf: GGUFMap) -> list[Weight]:
    """All tensors of a file, in its order."""
    tied = not gguf.has_tensor("output.weight")
    weights = []
    for t in gguf.tensors:
        layer = layer_of(t.name)
        share = token_share(
            t.name,
            t.shape,
            n_used=gguf.experts_used(layer or 0),
            n_computed_layers=gguf.n_computed_layers,
            tied=tied,
        )
        weights.append(Weight(t.name, t.role, layer, t.shape, t.nbytes, share))
    return weights


def weights_of_shape(shape: ModelShape) -> list[Weight]:
    """The tensors of a shape, at 32 bits."""
    keys = shape.keys
    used = keys.by_layer("expert_used_count", keys.n_layers)
    tied = all(name != "output.weight" for name, _ in shape.tensors)
    weights = []
    for name, dimensions in shape.tensors:
        layer = layer_of(name)
        share = token_share(
            name,
            dimensions,
            n_used=used[layer] if layer is not None else 0,
            n_computed_layers=keys.n_trunk_layers,
            tied=tied,
        )
        nbytes = 4 * math.prod(dimensions)
        weights.append(Weight(name, role_of(name), layer, dimensions, nbytes, share))
    return weights


def at_bits(weights: Iterable[Weight], bits: Bits) -> list[Weight]:
    """The same weights at another width.

    A number counts for every element. A type of ggml is used as quantised files use it, see
    `type_for`.

    Raises:
        OptionError: not 0.5 to 32 bits, or no type of ggml.
    """
    by_role = bits if isinstance(bits, Mapping) else {"*": bits}
    for width in by_role.values():
        _check_bits(width)
    if "*" not in by_role:
        raise OptionError(f"bits by role need '*' for the roles that are not named: {by_role}")
    return [
        Weight(
            w.name,
            w.role,
            w.layer,
            w.shape,
            _size(w, by_role.get(w.role, by_role["*"])),
            w.token_share,
        )
        for w in weights
    ]


def _check_bits(bits: object) -> None:
    if isinstance(bits, str):
        if bits not in _TYPES:
            raise OptionError(f"'{bits}' is no type of ggml; usual ones: Q4_0, Q4_K, MXFP4, F16")
    elif not isinstance(bits, (int, float)) or not 0.5 <= bits <= 32:  # false for NaN
        raise OptionError(f"{bits!r} bits a weight; give a number from 0.5 to 32, or a ggml type")


def type_for(weight: Weight, name: str) -> str:
    """The ggml type that a file quantised to `name` gives a tensor.

    Vectors, norms and routers stay F32, tables of ids I32; rows that do not fit into blocks
    become F16.
    """
    if any(word in weight.name for word in _IDS):
        return "I32"
    if len(weight.shape) < 2 or weight.role in (NORM, ROUTER):
        return "F32"
    return "F16" if weight.shape[0] % _TYPES[name][0] else name


def _size(weight: Weight, bits: float | str) -> int:
    if not isinstance(bits, str):
        return round(weight.n_params * bits / 8)
    block, nbytes = _TYPES[type_for(weight, bits)]
    return weight.n_params // block * nbytes
