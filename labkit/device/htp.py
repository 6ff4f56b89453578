"""Which tensors of a GGUF file a Hexagon tensor processor (HTP) could take, and what that needs.

llama.cpp's Hexagon backend multiplies weights of a few quantisation types only, keeps them in a
layout of its own, and sees memory through a session of 2 to 3.5 GiB. What is said here follows from
a file's types and shapes by the rules of the llama.cpp that labkit is tested with (its
`ggml-hexagon`, read in version 0.25.3 of ggml). On a phone the backend decides for each operation,
and may refuse for reasons that no file shows, such as scratch memory: this is what it *could* take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from labkit.architectures import (
    ATTENTION,
    DENSE_FFN,
    EMBEDDING,
    OUTPUT,
    ROUTED_EXPERT,
    ROUTER,
    SHARED_EXPERT,
    layer_of,
)
from labkit.errors import OptionError

if TYPE_CHECKING:
    from labkit.gguf_map import GGUFMap, TensorInfo

#: Type -> bytes of a 32 x 32 tile in the device's layout. Larger than the file for Q4_K (0.63
#: bytes a weight instead of 0.56), Q5_K and Q6_K: their scales are stored unpacked.
TILE_BYTES = {
    "Q4_0": 576,
    "Q4_1": 640,
    "Q4_K": 640,
    "Q5_K": 768,
    "Q6_K": 896,
    "Q8_0": 1088,
    "IQ4_NL": 576,
    "MXFP4": 544,
}
_PLAIN = ("F16", "F32")
#: Types that a matrix which every token uses may have.
MATRIX_TYPES = (*TILE_BYTES, *_PLAIN)
#: Types that routed experts may have: the backend has no product by expert id for F16 and F32.
EXPERT_TYPES = tuple(TILE_BYTES)
_TILE = 32
_SUPER_BLOCK = 256

#: Between these limits lies what a session maps: 2 GiB is what the backend reports as memory, 3.5
#: GiB its documented address window; it takes 3000 MiB of that up to v73, 3200 MiB from v75 on.
SESSION_MIB = (2048, 3584)

HTP, CPU = "HTP", "CPU"
_MIB = 2**20


def placement(gguf: GGUFMap) -> pd.DataFrame:
    """Say for each tensor where it could go.

    Returns a row per tensor: tensor, layer (NA outside the layers), role, type, on ("HTP" or
    "CPU"), why (the reason for the CPU, else ""), file_mib, device_mib (in the device's layout,
    padded to its tiles; 0 on the CPU). A token embedding that doubles as the output matrix is on
    the CPU for its first use, and `device_mib` counts the copy for its second.
    """
    tied = not any(t.role == OUTPUT and len(t.shape) > 1 for t in gguf.tensors)
    rows = []
    for tensor in gguf.tensors:
        why = _refusal(tensor)
        takes = not why
        copied = tied and tensor.name == "token_embd.weight" and not _type_refusal(tensor)
        if copied:
            why += "; a copy on the HTP serves as the output matrix"
        rows.append(
            (
                tensor.name,
                layer_of(tensor.name),
                tensor.role,
                tensor.type_name,
                HTP if takes else CPU,
                why,
                tensor.nbytes / _MIB,
                device_bytes(tensor) / _MIB if takes or copied else 0.0,
            )
        )
    names = ["tensor", "layer", "role", "type", "on", "why", "file_mib", "device_mib"]
    table = pd.DataFrame(rows, columns=names)
    return table.astype({"layer": "Int64"})


def device_bytes(tensor: TensorInfo) -> int:
    """Bytes of a tensor in the device's layout: tiles of 32 x 32, or as in the file if not tiled.

    Only for types that the backend knows.
    """
    tile = TILE_BYTES.get(tensor.type_name)
    if tile is None:
        return tensor.nbytes
    columns, rows, *more = (*tensor.shape, 1)
    tiles = -(-columns // _TILE) * -(-rows // _TILE)
    for dimension in more:
        tiles *= dimension
    return tiles * tile


def by_role(table: pd.DataFrame) -> pd.DataFrame:
    """Sum a `placement` by role and type: role, type, on, why, tensors, file_mib, device_mib."""
    return (
        table.groupby(["role", "type", "on", "why"], as_index=False, sort=False)
        .agg(
            tensors=("tensor", "size"),
            file_mib=("file_mib", "sum"),
            device_mib=("device_mib", "sum"),
        )
        .sort_values("file_mib", ascending=False, ignore_index=True)
    )


def handovers(table: pd.DataFrame) -> pd.Series:
    """Count by layer how often the device must stop for the CPU, from a `placement`.

    A count for each part of a layer (attention, router, dense, shared and routed experts) that has
    a weight which stays on the CPU: its operations run there in one go. Index: all layers.
    """
    parts = (ATTENTION, ROUTER, DENSE_FFN, SHARED_EXPERT, ROUTED_EXPERT)
    inside = table[table["layer"].notna() & table["role"].isin(parts)]
    left = inside[inside["on"] == CPU].groupby("layer")["role"].nunique()
    layers = sorted(int(layer) for layer in table["layer"].dropna().unique())
    return left.reindex(layers, fill_value=0).astype(int).rename("handovers")


@dataclass(frozen=True)
class Sessions:
    """How weights spread over sessions of one size.

    Attributes:
        limit_mib: what a session can map.
        table: session, first_layer, last_layer, mib; whole layers in order, what lies outside the
            layers with the first (embeddings) or the last (output).
        too_large: layers that do not fit in a session by themselves.
    """

    limit_mib: float
    table: pd.DataFrame
    too_large: tuple[int, ...]

    @property
    def count(self) -> int | None:
        """Sessions needed; None if a layer is too large for any."""
        return None if self.too_large else len(self.table)


def sessions(table: pd.DataFrame, limit_mib: float) -> Sessions:
    """Spread the HTP's part of a `placement` over sessions, whole layers in order.

    Weights only: KV cache and compute buffers come on top. `OptionError` for a limit that is none.
    """
    if not limit_mib > 0:
        raise OptionError(f"a session of {limit_mib} MiB holds nothing; give a size above 0")
    layers = sorted(int(layer) for layer in table["layer"].dropna().unique())
    sizes = table.groupby("layer")["device_mib"].sum()
    outside = float(table.loc[table["layer"].isna(), "device_mib"].sum())
    rows: list[list[float]] = []
    for layer in layers:
        size = float(sizes[layer])
        if rows and rows[-1][2] + size <= limit_mib:
            rows[-1][1:] = [layer, rows[-1][2] + size]
        else:
            rows.append([layer, layer, size])
    if rows and rows[-1][2] + outside <= limit_mib:
        rows[-1][2] += outside
    elif outside:
        last = layers[-1] if layers else 0
        rows.append([last, last, outside])
    found = pd.DataFrame(rows, columns=["first_layer", "last_layer", "mib"])
    found.insert(0, "session", range(len(found)))
    found = found.astype({"first_layer": int, "last_layer": int})
    return Sessions(limit_mib, found, tuple(n for n in layers if sizes[n] > limit_mib))


@dataclass(frozen=True)
class Arena:
    """Two slots of a whole layer's routed experts, beside the weights that stay.

    Attributes:
        slot_mib: the largest layer's routed experts in the device's layout.
        fixed_mib: everything else that the device takes.
        need_mib: slots and fixed weights together.
    """

    slot_mib: float
    fixed_mib: float
    slots: int = 2

    @property
    def need_mib(self) -> float:
        """Both slots and the fixed weights."""
        return self.slots * self.slot_mib + self.fixed_mib


def arena(table: pd.DataFrame, slots: int = 2) -> Arena:
    """What a device that streams whole layers must map, from a `placement`."""
    routed = table["role"] == ROUTED_EXPERT
    by_layer = table[routed].groupby("layer")["device_mib"].sum()
    return Arena(
        slot_mib=float(by_layer.max()) if len(by_layer) else 0.0,
        fixed_mib=float(table.loc[~routed, "device_mib"].sum()),
        slots=slots,
    )


def memory_table(
    table: pd.DataFrame, limits_mib: Sequence[float] = SESSION_MIB, slots: int = 2
) -> pd.DataFrame:
    """What the HTP must map by the way of using it, from a `placement`: weights only.

    Columns: way, need_mib, handovers (of a chunk, all layers), and for each limit the sessions that
    it takes: NA where a layer, or the slots together, are larger than a session.
    """
    two, stops = arena(table, slots).need_mib, int(handovers(table).sum())
    whole = float(table["device_mib"].sum())
    found = pd.DataFrame(
        {
            "way": ["all at once", f"{slots} slots and what stays"],
            "need_mib": [whole, two],
            "handovers": [stops, stops],
        }
    )
    for limit in limits_mib:
        counts = [sessions(table, limit).count, 1 if two <= limit else None]
        found[f"sessions_of_{limit:.0f}_mib"] = pd.array(counts, dtype="Int64")
    return found


def _refusal(tensor: TensorInfo) -> str:
    """Why a tensor stays on the CPU, or ""."""
    if tensor.role == EMBEDDING:
        return "llama.cpp looks tokens up on the CPU"
    return _type_refusal(tensor)


def _type_refusal(tensor: TensorInfo) -> str:
    if len(tensor.shape) == 1:  # a norm, a bias: an element-wise operation
        return "" if tensor.type_name in _PLAIN else f"no element-wise {tensor.type_name}"
    experts = tensor.role == ROUTED_EXPERT
    known = EXPERT_TYPES if experts else MATRIX_TYPES
    if tensor.type_name not in known:
        if tensor.type_name in _PLAIN:
            return f"no product by expert id for {tensor.type_name}"
        return f"type {tensor.type_name} is not among the backend's"
    block = _SUPER_BLOCK if tensor.type_name.endswith("_K") else _TILE
    if tensor.type_name in TILE_BYTES and tensor.shape[0] % block:
        return f"rows of {tensor.shape[0]} are no multiple of {block}"
    return ""
