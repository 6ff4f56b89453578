"""A model whose layers stock llama.cpp puts on a ggml device."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from labkit.errors import LlamaError
from labkit.gguf_map import GGUFMap, open_gguf
from labkit.prefill_lab.devices import find_device
from labkit.runtime import llama_log
from labkit.runtime.native import NativeModel
from labkit.runtime.stock import StockModel

_ALL_LAYERS = 999


class DeviceModel(StockModel):
    """All layers on one device, with nothing of labkit in the graph.

    What the device cannot compute llama.cpp leaves to the CPU, operation by operation. A device
    may still be computing when `prefill` and `decode` return: asking for `logits` waits for it.

    Args:
        path: a GGUF file, any shard, or a directory with one model.
        device: registry name, as `labkit.prefill_lab.devices.ggml_devices` gives it.
        threads, n_ctx, n_ubatch: as for `Session`.

    Raises:
        OptionError: no such device.
        ModelFileError, LlamaError: the file, or llama.cpp with the device, refuses.
    """

    def __init__(
        self,
        path: str | Path,
        device: str,
        *,
        threads: int | None = None,
        n_ctx: int | None = None,
        n_ubatch: int = 512,
    ) -> None:
        self.map = open_gguf(path)
        chosen = find_device(device).pointer
        begin = time.perf_counter()
        self._model = _OnDevice(self.map, chosen, n_ctx=n_ctx, n_ubatch=n_ubatch, threads=threads)
        self.open_s = time.perf_counter() - begin
        self.n_ctx = self._model.n_ctx
        self.n_past = 0


class _OnDevice(NativeModel):
    """`NativeModel` with all layers, KV cache and wide products on a device."""

    def __init__(
        self, gguf: GGUFMap, device: int, *, n_ctx: int | None, n_ubatch: int, threads: int | None
    ) -> None:
        # llama.cpp keeps no copy of the list while it loads.
        self._devices = (ctypes.c_void_p * 2)(device, None)
        super().__init__(gguf, None, n_ctx=n_ctx, n_ubatch=n_ubatch, threads=threads)

    def _load_model(self, path: Path, skip_experts: bool, load_mode: int, repack: bool) -> int:
        del skip_experts, load_mode, repack  # the device decides how weights are held
        params = self._llama.llama_model_default_params()
        params.devices = ctypes.addressof(self._devices)
        params.n_gpu_layers = _ALL_LAYERS
        llama_log.forget()
        model = self._llama.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            raise LlamaError(f"{path}: llama.cpp cannot load this model: {llama_log.reason()}")
        return model

    def _make_context(self, threads: int) -> int:
        params = self._llama.llama_context_default_params()
        params.n_ctx = self.n_ctx
        params.n_batch = params.n_ubatch = self.n_ubatch
        params.n_threads = params.n_threads_batch = threads
        params.op_offload = params.offload_kqv = params.no_perf = True
        llama_log.forget()
        context = self._llama.llama_init_from_model(self._model, params)
        if not context:
            raise LlamaError(
                f"llama.cpp cannot make a context of {self.n_ctx} tokens: {llama_log.reason()}"
            )
        return context
