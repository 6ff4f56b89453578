"""`open_gguf` and `GGUFMap`: a model's tensors and expert slices, from metadata alone."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.architectures import PROJECTIONS, parse_expert_tensor
from labkit.errors import ModelFileError, NotMoEError, StreamingRefusedError
from labkit.gguf_map.layout import place_tensors
from labkit.gguf_map.loadable import load_problems
from labkit.gguf_map.shards import read_model_headers
from labkit.gguf_map.types import ExpertSlice, ExpertTensor, TensorInfo
from labkit.gguf_map.vocabulary import can_tokenise

if TYPE_CHECKING:
    from pandas import DataFrame

    from labkit.gguf_map.header import Header


def open_gguf(path: str | Path, *, inspect_only: bool = False) -> GGUFMap:
    """Map a model: a GGUF file, any shard of a split one, or a directory that holds one model.

    Only headers are read, never tensor data. Raises `labkit.errors.ModelFileError` or one of its
    children when the files are no model, incomplete, against the rules of GGUF, or hold metadata on
    which llama.cpp would end the process. ``inspect_only`` leaves out that last check, for a map
    that llama.cpp will not see; `GGUFMap.load_problems` then tells.
    """
    gguf = GGUFMap(read_model_headers(Path(path).expanduser()))
    if not inspect_only:
        for problem in gguf.load_problems():
            raise ModelFileError(f"{gguf.paths[0]}: {problem}")
    return gguf


class GGUFMap:
    """Where every tensor and every expert slice of a model lies.

    `paths` are the model's files in shard order, `metadata` the keys of the first one, `tensors`
    all tensors in file order, `expert_tensors` the routed experts by layer and projection.
    """

    def __init__(self, headers: list[Header]) -> None:
        first = headers[0]
        self.paths: list[Path] = [h.path for h in headers]
        self.sizes: list[int] = [h.size for h in headers]
        self.version: int = first.version
        self.alignment: int = first.alignment
        self.data_offsets: list[int] = [h.data_offset for h in headers]
        self.metadata: dict[str, object] = first.metadata
        self.value_types: dict[str, str] = first.value_types
        self.architecture: str = self._architecture()
        self.tensors: list[TensorInfo] = [
            t for shard, header in enumerate(headers) for t in place_tensors(header, shard)
        ]
        self._by_name: dict[str, TensorInfo] = {}
        for tensor in self.tensors:
            other = self._by_name.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise ModelFileError(
                    f"{self.paths[tensor.shard]}: tensor '{tensor.name}' is also in"
                    f" {self.paths[other.shard].name}. The shards belong to different models."
                )
        self.n_layers: int = self.count("block_count")
        self.n_expert_used: int = self.count("expert_used_count")
        self.expert_tensors: list[ExpertTensor] = self._expert_tensors()
        declared = self.count("expert_count")
        self.n_expert: int = declared or max((e.n_expert for e in self.expert_tensors), default=0)
        self._layers: dict[int, list[ExpertTensor]] = defaultdict(list)
        for expert_tensor in self.expert_tensors:
            self._layers[expert_tensor.layer].append(expert_tensor)
        self.moe_layers: list[int] = sorted(self._layers)

    def __repr__(self) -> str:
        return (
            f"<GGUFMap {self.paths[0].name}: {self.architecture}, {self.n_layers} layers,"
            f" {self.n_expert} experts, {len(self.tensors)} tensors, {self.nbytes} bytes>"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(e.tensor.nbytes for e in self.expert_tensors)

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything that every token may use: all but the routed experts."""
        return self.nbytes - self.expert_bytes

    @property
    def token_cycle_bytes(self) -> int:
        """Bytes of the expert entries that one token uses: all computed MoE layers x top-k."""
        layers = [layer for layer in self.moe_layers if layer < self.n_computed_layers]
        return sum(self.entry_bytes(layer) * self.experts_used(layer) for layer in layers)

    @property
    def n_computed_layers(self) -> int:
        """Layers that computing a token runs through: without the multi-token heads at the end."""
        return self.n_layers - self.count("nextn_predict_layers")

    @cached_property
    def has_tokenizer(self) -> bool:
        """Whether the file carries a vocabulary with which llama.cpp can tokenise any text."""
        return can_tokenise(self.metadata)

    def tensor(self, name: str) -> TensorInfo:
        """The tensor of this exact name, or KeyError."""
        return self._by_name[name]

    def has_tensor(self, name: str) -> bool:
        """Whether the model has a tensor of this exact name."""
        return name in self._by_name

    def layer_tensors(self, layer: int) -> list[ExpertTensor]:
        """The expert tensors of one MoE layer, in order of computation; KeyError for others."""
        if layer not in self._layers:
            raise KeyError(f"layer {layer} has no routed experts; MoE layers: {self.moe_layers}")
        return self._layers[layer]

    def expert(self, layer: int, expert: int) -> list[ExpertSlice]:
        """The slices of one expert entry, in order of computation.

        Raises KeyError for a layer without routed experts, IndexError for an expert out of range.
        """
        slices = []
        for e in self.layer_tensors(layer):
            if not 0 <= expert < e.n_expert:
                raise IndexError(f"layer {layer} has experts 0 to {e.n_expert - 1}, not {expert}")
            offset = e.tensor.offset + expert * e.slice_bytes
            slices.append(
                ExpertSlice(
                    layer,
                    expert,
                    e.projection,
                    e.tensor.shard,
                    offset,
                    e.slice_bytes,
                    e.tensor.type_name,
                )
            )
        return slices

    def experts_used(self, layer: int) -> int:
        """Routed experts that a token uses in this layer (some models have a list by layer)."""
        value = self.metadata.get(f"{self.architecture}.expert_used_count")
        if isinstance(value, list) and layer < len(value):
            return value[layer]
        return self.n_expert_used

    def entry_bytes(self, layer: int) -> int:
        """Bytes of one expert entry (all its projections) of this layer."""
        return sum(e.slice_bytes for e in self.layer_tensors(layer))

    def require_experts(self) -> None:
        """Raise `NotMoEError` for a dense model."""
        if not self.expert_tensors:
            raise NotMoEError(
                f"{self.paths[0]}: a dense model ({self.architecture}) without routed experts:"
                " there is nothing to stream. It can be inspected, and run resident."
            )

    def load_problems(self) -> list[str]:
        """What in the metadata would make llama.cpp end the process, in plain words."""
        return load_problems(self)

    def require_streamable(self) -> None:
        """Raise `NotMoEError` for a dense model, `StreamingRefusedError` for an unfit MoE."""
        self.require_experts()
        for tensor in self.tensors:
            if not tensor.type_known:
                raise StreamingRefusedError(
                    f"{self.paths[tensor.shard]}: tensor '{tensor.name}' has type"
                    f" {tensor.type_id}, which this version does not know, so the size of its data"
                    " is unknown. Use a file quantised to a known type, or update moe-labkit."
                )
        for problem in self._streaming_problems():
            raise StreamingRefusedError(f"{self.paths[0]}: {problem}")

    def tensors_table(self) -> DataFrame:
        """One row per tensor; see `labkit.gguf_map.tables.tensors_table`."""
        from labkit.gguf_map.tables import tensors_table

        return tensors_table(self)

    def slices_table(self) -> DataFrame:
        """One row per expert slice; see `labkit.gguf_map.tables.slices_table`."""
        from labkit.gguf_map.tables import slices_table

        return slices_table(self)

    def _architecture(self) -> str:
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value.isprintable() or not value:
            raise ModelFileError(
                f"{self.paths[0]}: no general.architecture in the metadata, so this GGUF file is"
                " not a language model (perhaps an importance matrix, or not the first shard)."
            )
        return value

    def count(self, key: str) -> int:
        """The architecture's key as a count, 0 if it is missing; of a list by layer the largest."""
        value = self.metadata.get(f"{self.architecture}.{key}", 0)
        numbers = value if isinstance(value, list) else [value]
        good = [v for v in numbers if isinstance(v, int) and 0 <= v < 1 << 31]
        if not numbers or len(good) != len(numbers):
            raise ModelFileError(
                f"{self.paths[0]}: {self.architecture}.{key} is {value!r}; it must be a count."
            )
        return max(good)

    def _expert_tensors(self) -> list[ExpertTensor]:
        found = []
        for tensor in self.tensors:
            parsed = parse_expert_tensor(tensor.name)
            if parsed is None:
                continue
            layer, projection = parsed
            if len(tensor.shape) < 3 or tensor.shape[3:] not in ((), (1,)):
                raise ModelFileError(
                    f"{self.paths[tensor.shard]}: tensor '{tensor.name}' has the shape"
                    f" {tensor.shape}; routed experts need three dimensions, the last by expert."
                )
            n_expert = tensor.shape[2]
            found.append(
                ExpertTensor(layer, projection, tensor, n_expert, tensor.nbytes // n_expert)
            )
        found.sort(key=lambda e: (e.layer, PROJECTIONS.index(e.projection)))
        for one, other in pairwise(found):
            if one.layer == other.layer and one.n_expert != other.n_expert:
                raise ModelFileError(
                    f"{self.paths[other.tensor.shard]}: layer {one.layer} has {one.n_expert}"
                    f" experts in '{one.tensor.name}' but {other.n_expert} in"
                    f" '{other.tensor.name}'. The file is damaged."
                )
        return found

    def _streaming_problems(self):
        for e in self.expert_tensors:
            if e.n_expert != self.n_expert:
                yield (
                    f"tensor '{e.tensor.name}' holds {e.n_expert} experts, but the model declares"
                    f" {self.n_expert}. llama.cpp would refuse the file."
                )
        if not 0 < self.n_expert_used <= self.n_expert:
            yield (
                f"{self.architecture}.expert_used_count is {self.n_expert_used}, which is not"
                f" between 1 and the {self.n_expert} experts of the model."
            )
