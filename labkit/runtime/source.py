"""`ExpertStreamSource`: the experts that a layer has chosen, in memory before it uses them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from labkit.gguf_map import ExpertTensor, GGUFMap
from labkit.policy import CachePolicy
from labkit.runtime import ggml
from labkit.runtime.memory import ExpertWindow
from labkit.runtime.reader import FileReader, ReadRequest


@dataclass(frozen=True, slots=True)
class Fetch:
    """What one layer's request cost.

    Attributes:
        hits: experts that were resident.
        misses: experts that were read.
        read_bytes: bytes that left the files, widened edges included.
        read_s: wall time of the reads, which the graph waited for.
        manage_s: wall time of looking up and giving memory back.
    """

    hits: frozenset[int]
    misses: frozenset[int]
    read_bytes: int
    read_s: float
    manage_s: float


class ExpertStreamSource:
    """Expert weights of one model, streamed into windows that llama.cpp computes from.

    Args:
        gguf: the model's map; `require_streamable` has passed.
        reader: opened on the same files.
        policy: decides what stays; its budget covers expert bytes alone.
    """

    def __init__(self, gguf: GGUFMap, reader: FileReader, policy: CachePolicy) -> None:
        self.policy = policy
        self._reader = reader
        self._layers: dict[int, list[tuple[ExpertTensor, ExpertWindow]]] = {}
        self._entry_bytes: dict[int, int] = {}
        try:
            for expert_tensor in gguf.expert_tensors:
                window = ExpertWindow(
                    expert_tensor.tensor.offset, expert_tensor.slice_bytes, expert_tensor.n_expert
                )
                self._layers.setdefault(expert_tensor.layer, []).append((expert_tensor, window))
        except BaseException:
            self.close()
            raise
        for layer in self._layers:
            self._entry_bytes[layer] = gguf.entry_bytes(layer)

    def bind(self, addresses: dict[str, int]) -> None:
        """Point llama.cpp's expert tensors, by name, at the windows.

        Tensors that no graph uses (a second head that is not run) are in the file but not in
        `addresses`; they stay as they are.
        """
        for parts in self._layers.values():
            for expert_tensor, window in parts:
                if address := addresses.get(expert_tensor.tensor.name):
                    ggml.tensor_at(address).data = window.address(window.offset)

    def fetch(self, layer: int, experts: Iterable[int]) -> Fetch:
        """Make the distinct `experts` of `layer` resident; returns when they are.

        Raises:
            ReadError: a slice could not be read. None of the missing entries counts as resident.
        """
        begin = time.perf_counter()
        lookup = self.policy.request(layer, experts, self._entry_bytes[layer])
        for entry in lookup.evicted:
            self._release(*entry)
        read_begin = time.perf_counter()
        read_bytes = 0
        if lookup.misses:
            try:
                read_bytes = self._reader.read(self._requests(layer, lookup.misses))
            except BaseException:
                for entry in lookup.misses:
                    self.policy.discard(entry)
                for entry in lookup.misses:
                    self._release(*entry)
                raise
        read_s = time.perf_counter() - read_begin if lookup.misses else 0.0
        return Fetch(
            frozenset(expert for _, expert in lookup.hits),
            frozenset(expert for _, expert in lookup.misses),
            read_bytes,
            read_s,
            read_begin - begin,
        )

    def resident_bytes(self) -> int:
        """Bytes of expert memory that the kernel holds for this source (not our own sum)."""
        return sum(w.resident_bytes() for parts in self._layers.values() for _, w in parts)

    def close(self) -> None:
        """Unmap the windows. The model that computed from them is freed before."""
        while self._layers:
            _, parts = self._layers.popitem()
            for _, window in parts:
                window.close()

    def _requests(self, layer: int, entries: Iterable[tuple[int, int]]) -> list[ReadRequest]:
        requests = []
        for _, expert in entries:
            for part, window in self._layers[layer]:
                start, stop = window.span(expert)
                what = f"the {part.projection} projection of expert {expert} in layer {layer}"
                requests.append(ReadRequest(part.tensor.shard, start, stop, window, what))
        return requests

    def _release(self, layer: int, expert: int) -> None:
        for _, window in self._layers[layer]:
            window.release_expert(expert, lambda other: (layer, other) in self.policy)
