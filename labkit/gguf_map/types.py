"""The records of a GGUF map, and the sizes of ggml's tensor types."""

from __future__ import annotations

from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES

_Q2_0 = 42  # newer than some releases of the gguf package that llama.cpp is paired with

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    _Q2_0: ("Q2_0", 64, 18),
    **{int(t): (t.name, block, nbytes) for t, (block, nbytes) in GGML_QUANT_SIZES.items()},
}
"""Type id -> (name, elements per block, bytes per block)."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the model and where its bytes lie.

    ``shard`` indexes `GGUFMap.paths`, ``offset`` counts bytes from the start of that file, and
    ``shape`` is in ggml order: ``shape[0]`` is the contiguous dimension. For a type that labkit
    does not know, ``nbytes`` is the room up to the next tensor, padding included.
    """

    name: str
    shard: int
    offset: int
    nbytes: int
    type_id: int
    type_name: str
    shape: tuple[int, ...]
    role: str

    @property
    def type_known(self) -> bool:
        """Whether labkit knows the size of this tensor's type."""
        return self.type_id in GGML_TYPES


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """The matrices of one projection of all routed experts of a layer, stored back to back."""

    layer: int
    projection: str
    tensor: TensorInfo
    n_expert: int
    slice_bytes: int


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """The bytes of one projection of one expert: ``nbytes`` at ``offset`` of file ``shard``."""

    layer: int
    expert: int
    projection: str
    shard: int
    offset: int
    nbytes: int
    type_name: str


def type_name(type_id: int) -> str:
    """Name of a ggml tensor type, or ``unknown (<id>)``."""
    known = GGML_TYPES.get(type_id)
    return known[0] if known else f"unknown ({type_id})"
