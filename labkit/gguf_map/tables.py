"""The map as pandas tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from labkit.architectures import layer_of

if TYPE_CHECKING:
    from labkit.gguf_map.model import GGUFMap

DIRECT_IO_BLOCK = 4096
"""Bytes to which direct I/O rounds both ends of a read, on common disks."""


def tensors_table(gguf: GGUFMap) -> pd.DataFrame:
    """One row per tensor in file order.

    Columns: name, role, layer (<NA> outside of blocks), shard, offset_bytes, end_bytes, nbytes
    (bytes), type, shape (text, contiguous dimension first).
    """
    layers = pd.array([layer_of(t.name) for t in gguf.tensors], dtype="Int64")
    return pd.DataFrame(
        {
            "name": [t.name for t in gguf.tensors],
            "role": [t.role for t in gguf.tensors],
            "layer": layers,
            "shard": np.array([t.shard for t in gguf.tensors], dtype=np.int64),
            "offset_bytes": np.array([t.offset for t in gguf.tensors], dtype=np.int64),
            "end_bytes": np.array([t.offset + t.nbytes for t in gguf.tensors], dtype=np.int64),
            "size_bytes": np.array([t.nbytes for t in gguf.tensors], dtype=np.int64),
            "type": [t.type_name for t in gguf.tensors],
            "shape": [" x ".join(map(str, t.shape)) for t in gguf.tensors],
        }
    )


def slices_table(gguf: GGUFMap, block_bytes: int = DIRECT_IO_BLOCK) -> pd.DataFrame:
    """One row per expert slice, by layer, projection, expert.

    Columns: layer, expert, projection, shard, offset_bytes, size_bytes, type, misaligned_bytes
    (offset modulo the block), direct_bytes (what direct I/O reads: both ends rounded out to whole
    blocks) and over_read_bytes (direct_bytes - size_bytes).
    """
    parts = []
    for e in gguf.expert_tensors:
        experts = np.arange(e.n_expert, dtype=np.int64)
        offsets = e.tensor.offset + experts * e.slice_bytes
        parts.append(
            pd.DataFrame(
                {
                    "layer": e.layer,
                    "expert": experts,
                    "projection": e.projection,
                    "shard": e.tensor.shard,
                    "offset_bytes": offsets,
                    "size_bytes": e.slice_bytes,
                    "type": e.tensor.type_name,
                }
            )
        )
    columns = ["layer", "expert", "projection", "shard", "offset_bytes", "size_bytes", "type"]
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)
    return with_direct_io(table, block_bytes)


def with_direct_io(table: pd.DataFrame, block_bytes: int = DIRECT_IO_BLOCK) -> pd.DataFrame:
    """Add misaligned_bytes, direct_bytes and over_read_bytes to a table of byte ranges."""
    start = table["offset_bytes"]
    end = start + table["size_bytes"]
    direct = -(-end // block_bytes) * block_bytes - start // block_bytes * block_bytes
    return table.assign(
        misaligned_bytes=start % block_bytes,
        direct_bytes=direct,
        over_read_bytes=direct - table["size_bytes"],
    )
