"""A llama.cpp model and its context, loaded, run and freed, with its failures as exceptions."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from labkit.errors import LlamaError, OptionError, SeamError, SessionError
from labkit.gguf_map import GGUFMap
from labkit.runtime import ggml, llama_log
from labkit.runtime.hook import RouterHook
from labkit.runtime.threads import check_threads

LOAD_COPY, LOAD_MMAP = 0, 1  # of `enum llama_load_mode`
_NO_SLOT, _ABORTED = 1, 2  # what llama_decode returns
_locking_memory = threading.Lock()


class NativeModel:
    """One model with one context and one sequence.

    Args:
        gguf: the validated map; llama.cpp never sees a file that was not checked.
        hook: its callback and abort flag go into the context. It is kept alive here. None runs
            stock llama.cpp, which nothing watches.
        n_ctx: tokens of context; None is the model's own, at most 4096.
        n_ubatch: tokens of one prefill graph.
        threads: compute threads; None is the number of physical cores.
        skip_experts: load without reading the expert weights where the system allows it.
        load_mode: how llama.cpp loads the file, by its own number; it maps it by default.
        repack: let llama.cpp lay out weights anew for this processor; they are then no longer the
            file's bytes, and the last bits of a logit may differ.

    Raises:
        LlamaError: with the reason from llama.cpp's log.
        ResourceError: the system does not start so many threads.
    """

    def __init__(
        self,
        gguf: GGUFMap,
        hook: RouterHook | None,
        *,
        n_ctx: int | None,
        n_ubatch: int,
        threads: int | None,
        skip_experts: bool = False,
        load_mode: int = LOAD_MMAP,
        repack: bool = False,
    ) -> None:
        for name, value, most in (("n_ctx", n_ctx, 1 << 24), ("threads", threads, 512)):
            # llama.cpp ends the process on some of these values instead of refusing them.
            if value is not None and not 1 <= value <= most:
                raise OptionError(f"{name} is {value}; it must lie in 1 to {most}")
        if n_ubatch < 1:
            raise OptionError(f"n_ubatch is {n_ubatch}; a graph needs at least one token")
        _check_process()
        self._llama = ggml.llama()
        ggml.self_check()
        self._hook = hook
        threads = threads or _physical_cores()
        check_threads(threads - 1)
        self._model: Any = None
        self._context: Any = None
        self._batch: Any = None
        try:
            self._model = self._load_model(gguf.paths[0], skip_experts, load_mode, repack)
            self.n_ctx = n_ctx or min(4096, self._llama.llama_model_n_ctx_train(self._model))
            self.n_ubatch = min(n_ubatch, self.n_ctx)
            self._context = self._make_context(threads)
            if hook:
                hook.attach(_callback_switch(self._context, hook))
        except BaseException:
            self.close()
            raise
        self.vocab = self._llama.llama_model_get_vocab(self._model)
        self.n_vocab = self._llama.llama_vocab_n_tokens(self.vocab)
        self._batch = self._llama.llama_batch_init(self.n_ubatch, 0, 1)
        self._memory = self._llama.llama_get_memory(self._context)
        # A recurrent state cannot be cut back to an earlier position.
        self.can_rewind = not (
            self._llama.llama_model_is_recurrent(self._model)
            or self._llama.llama_model_is_hybrid(self._model)
        )

    def _load_model(self, path: Path, skip_experts: bool, load_mode: int, repack: bool) -> int:
        params = self._llama.llama_model_default_params()
        params.load_mode = load_mode
        params.use_extra_bufts = repack
        params.n_gpu_layers = 0
        llama_log.forget()
        with populate_on_fault() if skip_experts else contextlib.nullcontext():
            model = self._llama.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            raise LlamaError(f"{path}: llama.cpp cannot load this model: {llama_log.reason()}")
        return model

    def _make_context(self, threads: int) -> int:
        llama = self._llama
        params = llama.llama_context_default_params()
        params.n_ctx = self.n_ctx
        params.n_batch = params.n_ubatch = self.n_ubatch
        params.n_threads = params.n_threads_batch = threads
        params.op_offload = params.offload_kqv = False
        params.no_perf = True
        if hook := self._hook:
            callback_type = llama.ggml_backend_sched_eval_callback
            params.cb_eval = ctypes.cast(hook.callback, callback_type)
            params.abort_callback = ctypes.cast(hook.abort.function, llama.ggml_abort_callback)
            params.abort_callback_data = hook.abort.data
        llama_log.forget()
        context = llama.llama_init_from_model(self._model, params)
        if not context:
            raise LlamaError(
                f"llama.cpp cannot make a context of {self.n_ctx} tokens: {llama_log.reason()}"
            )
        return context

    def decode(self, tokens: Sequence[int], position: int, outputs: Sequence[bool]) -> bool:
        """Run one graph over at most `n_ubatch` tokens from `position` on.

        Returns:
            False if the abort flag ended it; these tokens are then not in the KV cache.

        Raises:
            SessionError: no room left in the context, or a process that was forked from the one
                that loaded llama.cpp: it would wait for ever for threads that stayed there.
            LlamaError: any other refusal, with the reason.
        """
        _check_process()
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = outputs[index]
        if self._hook:
            self._hook.begin((len(tokens), sum(outputs)), n_tokens=len(tokens))
        llama_log.forget()
        status = self._llama.llama_decode(self._context, batch)
        if self._hook:
            self._hook.end(whole=status == 0)
        if status == _ABORTED:
            return False
        if status == _NO_SLOT:
            raise SessionError(
                f"The context is full at {position} of {self.n_ctx} tokens. "
                "Call reset(), or open the session with a larger n_ctx (--n-ctx)."
            )
        if status != 0:
            raise LlamaError(f"llama_decode failed ({status}): {llama_log.reason()}")
        return True

    def logits(self, index: int) -> np.ndarray:
        """(n_vocab,) float32, a copy: the logits of the batch's token `index`, -1 for the last."""
        row = self._llama.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(row, (self.n_vocab,)).copy()

    def rewind(self, position: int) -> bool:
        """Forget the KV cache from `position` on. False if this model can only start over."""
        if position == 0:
            self._llama.llama_memory_clear(self._memory, True)
            return True
        if not self.can_rewind:
            return False
        return bool(self._llama.llama_memory_seq_rm(self._memory, 0, position, -1))

    @property
    def context(self) -> int:
        """The `llama_context` pointer, for samplers."""
        return self._context

    def close(self) -> None:
        """Free everything that llama.cpp allocated. In a forked child, end its use alone."""
        (batch, self._batch), (context, self._context) = (self._batch, None), (self._context, None)
        model, self._model = self._model, None
        if ggml.loaded_by() != os.getpid():
            return
        if batch is not None:
            self._llama.llama_batch_free(batch)
        if context:
            self._llama.llama_free(context)
        if model:
            self._llama.llama_model_free(model)


def _check_process() -> None:
    if ggml.loaded_by() != os.getpid():
        raise SessionError(
            "llama.cpp was loaded by the process that this one was forked from, and its threads "
            "stayed there. Start processes with the method 'spawn' instead of 'fork'."
        )


def scheduler_functions() -> tuple[Any, Any]:
    """(what gives a context's scheduler, what sets the scheduler's eval callback).

    llama.cpp sets that callback itself whenever it builds a graph. The scheduler is known to a
    method that libllama exports under its C++ name.

    Raises:
        SeamError: the installed llama.cpp does not export them.
    """
    pointer = ctypes.c_void_p
    return (
        ggml.function("_ZNK13llama_context9get_schedEv", pointer, pointer),
        ggml.function("ggml_backend_sched_set_eval_callback", None, pointer, pointer, pointer),
    )


def _callback_switch(context: int, hook: RouterHook) -> Callable[[bool], None] | None:
    """What switches the eval callback of `context` off and on again, until a graph is built."""
    try:
        get_scheduler, set_callback = scheduler_functions()
    except SeamError:
        return None
    scheduler = get_scheduler(context)
    callback = ctypes.cast(hook.callback, ctypes.c_void_p)

    def listen(on: bool) -> None:
        set_callback(scheduler, callback if on else None, None)

    return listen


def _physical_cores() -> int:
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(usable or 1, psutil.cpu_count(logical=False) or 1))


@contextlib.contextmanager
def populate_on_fault() -> Iterator[bool]:
    """Keep `mmap` from reading whole files inside this block; yields whether it could.

    llama.cpp maps a model with MAP_POPULATE, which reads all of it, experts too. Under
    mlockall(MCL_FUTURE | MCL_ONFAULT) the kernel skips that and reads pages as they are touched.
    It takes CAP_IPC_LOCK or no limit on locked memory: with a small limit the mapping would fail.
    It is a state of the process, and memory that was locked before is unlocked after.
    """
    if not may_lock_memory():
        yield False
        return
    future, on_fault = 2, 4
    libc = ctypes.CDLL(None, use_errno=True)
    with _locking_memory:  # it holds for the whole process, so one at a time
        locked = libc.mlockall(future | on_fault) == 0
        try:
            yield locked
        finally:
            if locked:
                libc.munlockall()


def may_lock_memory() -> bool:
    """Whether this process may lock any amount of memory (Linux)."""
    if not sys.platform.startswith("linux"):
        return False
    import resource

    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
        return True
    ipc_lock = 1 << 14
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & ipc_lock)
    return False
