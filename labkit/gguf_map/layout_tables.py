"""Tables behind the charts of a file: where things lie, and what direct I/O adds to a read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from labkit.gguf_map.tables import DIRECT_IO_BLOCK, slices_table, tensors_table, with_direct_io

if TYPE_CHECKING:
    from labkit.gguf_map.model import GGUFMap


def nearest_expert(gguf: GGUFMap, layer: int, expert: int) -> tuple[int, int]:
    """Return (layer, expert) as asked for, or the nearest that the model has.

    Raises `NotMoEError` for a dense model.
    """
    gguf.require_experts()
    layer = min(gguf.moe_layers, key=lambda has: (abs(has - layer), has))
    return layer, min(max(expert, 0), gguf.layer_tensors(layer)[0].n_expert - 1)


def expert_table(
    gguf: GGUFMap, layer: int, expert: int, block_bytes: int = DIRECT_IO_BLOCK
) -> pd.DataFrame:
    """The slices of one expert entry, in order of computation.

    Columns: projection, file, tensor_offset_bytes (where the tensor of all experts begins),
    offset_bytes (= tensor offset + expert x size), size_bytes, type, misaligned_bytes,
    direct_bytes, over_read_bytes.
    """
    slices = gguf.expert(layer, expert)
    table = pd.DataFrame(
        {
            "projection": [s.projection for s in slices],
            "file": [gguf.paths[s.shard].name for s in slices],
            "tensor_offset_bytes": [s.offset - expert * s.nbytes for s in slices],
            "offset_bytes": [s.offset for s in slices],
            "size_bytes": [s.nbytes for s in slices],
            "type": [s.type_name for s in slices],
        }
    )
    return with_direct_io(table, block_bytes)


def over_read_table(gguf: GGUFMap, block_bytes: int = DIRECT_IO_BLOCK) -> pd.DataFrame:
    """What direct I/O reads beyond the slices, by projection, type and slice size.

    Columns: projection, type, n_slices, size_bytes (of one slice), direct_bytes (mean of a read),
    over_read_bytes (mean), over_read_pct (of the slice), aligned_pct (slices that begin a block).
    """
    slices = slices_table(gguf, block_bytes)
    groups = slices.groupby(["projection", "type", "size_bytes"], sort=False, observed=True)
    table = groups.agg(
        n_slices=("offset_bytes", "size"),
        direct_bytes=("direct_bytes", "mean"),
        over_read_bytes=("over_read_bytes", "mean"),
        aligned_pct=("misaligned_bytes", lambda column: 100 * float((column == 0).mean())),
    ).reset_index()
    return table.assign(over_read_pct=100 * table["over_read_bytes"] / table["size_bytes"])


def layer_layout_table(gguf: GGUFMap) -> pd.DataFrame:
    """Tensors of the layers, in file order, each with its place within its layer.

    Columns of `tensors_table`, and layer_start_bytes, layer_end_bytes: the bytes of the same layer
    that lie before it in the file, and those up to its end (gaps and other layers left out).
    """
    table = tensors_table(gguf)
    table = table[table["layer"].notna()].astype({"layer": np.int64}).reset_index(drop=True)
    end = table.groupby("layer")["size_bytes"].cumsum()
    return table.assign(layer_start_bytes=end - table["size_bytes"], layer_end_bytes=end)
