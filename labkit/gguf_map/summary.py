"""What a model weighs: bytes by role, and how many of them one token uses."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from labkit.architectures import EMBEDDING, ROLES, ROUTED_EXPERT, layer_of
from labkit.errors import LabkitError

if TYPE_CHECKING:
    from pandas import DataFrame

    from labkit.gguf_map.model import GGUFMap
    from labkit.gguf_map.types import TensorInfo


@dataclass(frozen=True, slots=True)
class RoleBytes:
    """All tensors of one role: their bytes, and how many of these computing one token uses.

    A token uses top-k of the routed experts, one row of a token embedding (all of it where it
    doubles as the output matrix), nothing of multi-token heads, and all of the rest.
    """

    role: str
    n_tensors: int
    size_bytes: int
    token_bytes: int


def bytes_by_role(gguf: GGUFMap) -> list[RoleBytes]:
    """The roles that the model has, in the order in which a token meets them."""
    found: dict[str, list[TensorInfo]] = defaultdict(list)
    for tensor in gguf.tensors:
        found[tensor.role].append(tensor)
    return [
        RoleBytes(
            role,
            len(found[role]),
            sum(t.nbytes for t in found[role]),
            gguf.token_cycle_bytes
            if role == ROUTED_EXPERT
            else sum(_token_bytes(gguf, t) for t in found[role]),
        )
        for role in ROLES
        if role in found
    ]


def token_bytes(gguf: GGUFMap) -> int:
    """Bytes of weights that computing one token uses, dense and routed."""
    return sum(r.token_bytes for r in bytes_by_role(gguf))


def roles_table(gguf: GGUFMap) -> DataFrame:
    """`bytes_by_role` as a table: role, n_tensors, size_bytes, token_bytes."""
    import pandas as pd

    columns = ["role", "n_tensors", "size_bytes", "token_bytes"]
    return pd.DataFrame([asdict(r) for r in bytes_by_role(gguf)], columns=columns)


def summary(gguf: GGUFMap) -> dict[str, Any]:
    """The map as plain JSON values, for `labkit inspect --json`."""
    refusal = streaming_refusal(gguf)
    return {
        "name": gguf.metadata.get("general.name"),
        "architecture": gguf.architecture,
        "gguf_version": gguf.version,
        "alignment_bytes": gguf.alignment,
        "file_bytes": sum(gguf.sizes),
        "tensor_bytes": gguf.nbytes,
        "dense_bytes": gguf.dense_bytes,
        "expert_bytes": gguf.expert_bytes,
        "token_bytes": token_bytes(gguf),
        "token_cycle_bytes": gguf.token_cycle_bytes,
        "n_layers": gguf.n_layers,
        "n_expert": gguf.n_expert,
        "n_expert_used": gguf.n_expert_used,
        "moe_layers": gguf.moe_layers,
        "entry_bytes": {str(layer): gguf.entry_bytes(layer) for layer in gguf.moe_layers},
        "has_tokenizer": gguf.has_tokenizer,
        "streamable": refusal is None,
        "refusal": refusal,
        "load_problems": gguf.load_problems(),
        "shards": [
            {"path": str(path), "file_bytes": size, "data_offset": offset}
            for path, size, offset in zip(gguf.paths, gguf.sizes, gguf.data_offsets, strict=True)
        ],
        "roles": [asdict(r) for r in bytes_by_role(gguf)],
        "tensors": [asdict(tensor) for tensor in gguf.tensors],
    }


def streaming_refusal(gguf: GGUFMap) -> str | None:
    """Why the model cannot be streamed, or None when it can."""
    try:
        gguf.require_streamable()
    except LabkitError as error:
        return str(error)
    return None


def _token_bytes(gguf: GGUFMap, tensor: TensorInfo) -> int:
    layer = layer_of(tensor.name)
    if layer is not None and layer >= gguf.n_computed_layers:
        return 0
    if tensor.role != EMBEDDING or len(tensor.shape) < 2:
        return tensor.nbytes
    tied = tensor.name == "token_embd.weight" and not gguf.has_tensor("output.weight")
    return tensor.nbytes if tied else tensor.nbytes // tensor.shape[1]
