"""`PrefillPath`: a wide batch uses nearly all experts, so whole layers stream through two slots.

While a layer computes from one slot, the next layer is read into the other, in file order and in
large pieces. A slot is read into again only once the layer in it has been computed, which is known
when the graph stops at the next layer's routing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from labkit.errors import LlamaError, ReadError
from labkit.gguf_map import ExpertTensor, GGUFMap
from labkit.runtime import ggml
from labkit.runtime.arena import N_SLOTS, DeviceArena, slot_bytes
from labkit.runtime.memory import BLOCK
from labkit.runtime.reader import Batch, FileReader, ReadRequest
from labkit.runtime.totals import Totals

_PIECE = 4 << 20  # bytes of one read: large enough for the disk, small enough to share over lanes


@dataclass(slots=True)
class LayerTime:
    """What one layer of one graph took.

    Attributes:
        chunk: which graph of the prompt, from 0.
        layer: the MoE layer.
        prepare_s: from the first of its reads beginning to the last ending.
        wait_s: of it, time that compute stood still.
        compute_s: from the stop at its routing to the stop at the next layer's, or to the end of
            the graph: its experts, and the next layer's attention and router.
        read_bytes: bytes read for it.
    """

    chunk: int
    layer: int
    prepare_s: float
    wait_s: float
    compute_s: float
    read_bytes: int


class PrefillPath:
    """Whole layers through two slots, in turns with the expert cache's windows.

    Args:
        gguf: the model's map.
        reader: opened on the same files.
        addresses: llama.cpp's expert tensors, by name.
        totals: where reads and waits are counted.

    Attributes:
        nbytes: memory that the two slots take.
        times: a `LayerTime` per layer and graph of the last prompt.
    """

    def __init__(
        self, gguf: GGUFMap, reader: FileReader, addresses: dict[str, int], totals: Totals
    ) -> None:
        self._reader = reader
        self._addresses = addresses
        self._totals = totals
        self._layers: dict[int, list[ExpertTensor]] = {}
        for tensor in gguf.expert_tensors:
            if tensor.tensor.name in addresses:
                self._layers.setdefault(tensor.layer, []).append(tensor)
        self._order = sorted(self._layers)
        self.nbytes = N_SLOTS * slot_bytes(list(self._layers.values()))
        self.times: list[LayerTime] = []
        self._arena: DeviceArena | None = None
        self._batches: dict[int, Batch] = {}
        self._turn = 0  # counts layers over all graphs of a prompt; a layer's slot is turn % 2
        self._first = 0
        self._last_turn = 0
        self._chunk = -1
        self._left_s = 0.0

    def begin(self, *, more: bool) -> None:
        """Call before a graph; `more` if another one of the same prompt will follow."""
        if self._arena is None:
            self._arena = DeviceArena(list(self._layers.values()))
        if not self._batches:
            self._turn, self._chunk, self.times = 0, -1, []
        self._chunk += 1
        self._first = self._turn
        n_layers = len(self._order)
        self._last_turn = self._first + (2 if more else 1) * n_layers - 1
        for turn in range(self._first, self._first + n_layers):
            windows = self._windows(turn)
            for tensor in self._layers[self._layer(turn)]:
                name, offset = tensor.tensor.name, tensor.tensor.offset
                ggml.tensor_at(self._addresses[name]).data = windows[name].address(offset)
        for turn in range(self._turn, self._turn + N_SLOTS):
            self._start(turn)

    def at_layer(self, layer: int) -> None:
        """Return when the layer's experts are in its slot; the next layer's are being read.

        Raises:
            ReadError: they could not be read.
        """
        begin = time.perf_counter()
        self._end_compute(begin)
        turn = self._turn
        if turn >= self._first + len(self._order) or self._layer(turn) != layer:
            raise LlamaError(
                f"llama.cpp computes layer {layer} where labkit expected another: this graph does "
                "not go through its layers in order. Open the model with prefill='experts'."
            )
        batch = self._batches[turn]
        self._turn += 1
        # The layer before this one is done, so its slot is free: its reads queue behind ours.
        self._start(turn + 1)
        read_bytes = self._reader.finish(batch)
        del self._batches[turn]
        self._left_s = time.perf_counter()
        wait_s = self._left_s - begin
        self._totals.wait_s += wait_s
        self._totals.bytes_read += read_bytes
        prepare_s = batch.ended_s - batch.began_s
        self.times.append(LayerTime(self._chunk, layer, prepare_s, wait_s, 0.0, read_bytes))

    def end(self, *, whole: bool) -> None:
        """Call after a graph; `whole` if it went through. Reads for the next graph go on.

        Raises:
            ReadError: the graph ended because a layer that it had not come to could not be read.
        """
        self._end_compute(time.perf_counter())
        if not whole and (error := self.stop()):
            raise error

    def stop(self) -> ReadError | None:
        """Wait for what is still being read, and forget it; the first failure among it."""
        error = None
        while self._batches and self._reader.drain(batch := next(iter(self._batches.values()))):
            error = error or batch.error
            del self._batches[next(iter(self._batches))]
        return error

    def release(self) -> None:
        """Give the slots' memory back to the system, unless a read is stuck in it."""
        self.stop()
        if self._arena and not self._batches:
            self._arena.release()

    def close(self) -> None:
        """Unmap the slots. The model that computed from them is freed."""
        if self._arena:
            self._arena.close()
            self._arena = None

    def table(self) -> pd.DataFrame:
        """`times` as a table: chunk, layer, prepare_s, wait_s, compute_s, read_bytes."""
        columns = list(LayerTime.__slots__)
        rows = [[getattr(row, name) for name in columns] for row in self.times]
        return pd.DataFrame(rows, columns=columns)

    def _layer(self, turn: int) -> int:
        return self._order[(turn - self._first) % len(self._order)]

    def _windows(self, turn: int):
        assert self._arena
        return self._arena.windows(turn % N_SLOTS, self._layers[self._layer(turn)])

    def _start(self, turn: int) -> None:
        if turn > self._last_turn or turn in self._batches or turn < self._turn:
            return
        self._batches[turn] = self._reader.submit(list(self._requests(turn)))

    def _requests(self, turn: int) -> Iterator[ReadRequest]:
        windows = self._windows(turn)
        for tensor in self._layers[self._layer(turn)]:
            info = tensor.tensor
            what = f"the {tensor.projection} projections of layer {tensor.layer}"
            low, end = info.offset, info.offset + info.nbytes
            while low < end:
                high = min(end, low - low % BLOCK + _PIECE)
                yield ReadRequest(info.shard, low, high, windows[info.name], what)
                low = high

    def _end_compute(self, now: float) -> None:
        if self.times and self.times[-1].chunk == self._chunk and not self.times[-1].compute_s:
            self.times[-1].compute_s = now - self._left_s
