"""`Session`: a model that is open, resident or streamed, and the conversation that it holds."""

from __future__ import annotations

import contextlib
import hashlib
import operator
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from labkit.errors import ResourceError, SessionError
from labkit.runtime.engine import Dense, Engine
from labkit.runtime.overlap import OverlapChoice
from labkit.runtime.recorder import Mark
from labkit.runtime.stepper import Stepper
from labkit.runtime.steps import Generation, TokenStep
from labkit.runtime.streaming import Prefetch, Prefill
from labkit.runtime.text import Sampler, TextStream, Tokenizer
from labkit.trace import RouteTrace

Prompt = str | Sequence[int]


class Session:
    """One model, one conversation.

    With streaming on, every logit equals the resident run's, bit for bit, whatever the cache.

    Args:
        path: a GGUF file, any shard of a split model, or a directory with one model.
        resident: keep llama.cpp's own memory map; no streaming, but the routing is still traced.
        cache_mib: budget for expert weights in MiB. None takes a quarter of them, at most half of
            the memory that is free; "auto" as much as memory allows; 0 turns the cache off: every
            token reads its experts anew. While a prompt is prefilled it is exceeded by what one
            layer's experts take beyond it, for a wide batch uses them at once.
        policy: which entries stay in the cache; a name out of `labkit.policy.ONLINE`.
        lanes: reads under way at once.
        direct_io: past the page cache; None where the file system can. `reader_note` says which.
        overlap: how reads overlap with compute: "serial" (a layer waits for its reads), "pipeline"
            (it waits for the down projections when it comes to them), "userfaultfd" (a thread
            sleeps where a slice is not there yet), or "auto", which tries them on the first
            tokens that read and keeps the fastest. `overlap_note` says what it found.
        prefill: how a prompt's experts come: "experts" through the expert cache, "layers" whole
            layers through two slots, which count in the budget; "auto" takes layers for batches
            so wide that they use nearly every expert, if two layers fit the budget.
        prefetch: what is read, while a layer computes, for the next one: "router" what that one's
            router makes of this layer's input, "previous" what it used for the token before; None
            reads only what was asked for. Hits that it brings are counted apart.
        hot_list: a directory that keeps which experts of each model were used most. Opening begins
            to read those of earlier sessions, as many as fit; closing adds this one's uses. None
            keeps and writes nothing.
        dense: where a streamed session keeps the weights that every token uses: "anonymous", a
            copy that the system does not take back, "mmap", llama.cpp's map of the file, or
            "warm", that map after one read through the page cache.
        threads: compute threads; None is the number of physical cores. Runs compare bit for bit at
            the same value only: llama.cpp divides the attention to a long context among them.
        n_ctx: tokens of context; None is the model's own, at most 4096.
        n_ubatch: prompt tokens of one graph. Runs compare bit for bit at the same value only.
        temperature, top_k, top_p, seed: sampling; temperature 0 is greedy.
        trial: load a file for the first time in a child process, which takes half a second, because
            llama.cpp ends the process on metadata that contradict each other. False trusts it.
        all_logits: compute logits for every prompt token, not the last alone. The last MoE layer
            then routes every prompt token; otherwise llama.cpp drops them before it.
        on_logits: called with a (n_vocab,) float32 row of each logits computed, in order.

    Attributes:
        map: the model's `GGUFMap`.
        trace: routing since opening or `reset`.
        prefill_steps: a `TokenStep` per token of the last prompt.
        n_past: tokens in the context, of at most `n_ctx`.
        cache_bytes: budget for expert weights, None in a resident run.
        reader_note: whether reads go past the page cache, and why.

    Raises:
        ModelFileError, StreamingRefusedError, BudgetError, ResourceError, LlamaError, SeamError,
            ReadError.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        resident: bool = False,
        cache_mib: float | Literal["auto"] | None = None,
        policy: str = "lru",
        lanes: int = 4,
        direct_io: bool | None = None,
        overlap: OverlapChoice = "auto",
        prefill: Prefill = "auto",
        prefetch: Prefetch = None,
        hot_list: str | Path | None = None,
        dense: Dense = "anonymous",
        threads: int | None = None,
        n_ctx: int | None = None,
        n_ubatch: int = 512,
        seed: int = 0,
        temperature: float = 0.0,
        top_k: int = 40,
        top_p: float = 0.95,
        trial: bool = True,
        all_logits: bool = False,
        on_logits: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        self._sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        try:
            self._engine = Engine(
                path,
                resident=resident,
                cache_mib=cache_mib,
                policy=policy,
                lanes=lanes,
                direct_io=direct_io,
                overlap=overlap,
                prefill=prefill,
                prefetch=prefetch,
                hot_list=hot_list,
                dense=dense,
                threads=threads,
                n_ctx=n_ctx,
                n_ubatch=n_ubatch,
                trial=trial,
            )
        except OSError as error:
            self._sampler.close()
            raise ResourceError(
                f"{path}: the system refuses what opening it takes: {error}. Look at `ulimit -n`."
            ) from error
        except BaseException:
            self._sampler.close()
            raise
        self.map = self._engine.map
        self._streaming = self._engine.streaming
        self.cache_bytes = self._streaming.cache_bytes if self._streaming else None
        self.reader_note = self._streaming.reader.direct_io_note if self._streaming else None
        self.all_logits = all_logits
        self.on_logits = on_logits
        self.n_past = 0
        self.prefill_steps: list[TokenStep] = []
        self._model, self._recorder = self._engine.model, self._engine.recorder
        self.n_ctx = self._model.n_ctx
        self._tokenizer = Tokenizer(self._model, self.map.has_tokenizer)
        self._stepper = Stepper(self._engine.hook.abort)
        self._gate = self._stepper.gate
        self._logits_ready = False
        self._turn = -1
        self._digest: Any = None

    @property
    def trace(self) -> RouteTrace:
        """The routing of everything since opening or `reset`."""
        return self._recorder.trace

    @property
    def resident_expert_bytes(self) -> int | None:
        """Bytes of expert weights that the kernel holds in memory; None for a resident run.

        After a ReadError up to a layer of shared zeros may count too (`PageRange.resident_bytes`).
        """
        self._gate.home.check("This session")
        return self._streaming.source.resident_bytes() if self._streaming else None

    @property
    def overlap(self) -> str | None:
        """How the next token's reads overlap with compute; None for a resident run."""
        return self._streaming.overlap.current if self._streaming else None

    @property
    def overlap_note(self) -> str | None:
        """Why it is done this way."""
        return self._streaming.overlap.note if self._streaming else None

    @property
    def prefetch_accuracy(self) -> pd.DataFrame:
        """How often prefetch was right, a row a layer; empty without it (`Lookahead.table`)."""
        lookahead = self._streaming.lookahead if self._streaming else None
        return lookahead.table() if lookahead else pd.DataFrame()

    @property
    def prefill_layers(self) -> pd.DataFrame:
        """What each layer of the last prompt took that streamed whole layers (`LayerTime`)."""
        layers = self._streaming.layers if self._streaming else None
        return layers.table() if layers else pd.DataFrame()

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, with what the model wants at its start."""
        self._gate.check_open()
        return self._tokenizer.encode(text, start=True)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        self._gate.check_open()
        pieces = map(self._tokenizer.piece, self._tokenizer.check(tokens))
        return b"".join(pieces).decode("utf-8", "replace")

    def stream(self, prompt: Prompt, n: int = 64) -> Iterator[TokenStep]:
        """Prefill `prompt`, then yield each of at most `n` generated tokens.

        A token is yielded once it went through the model, with the routing that it had. The
        conversation stays: the next prompt continues it, `reset` starts anew. The prompt is
        prefilled when the first token is asked for.

        Raises:
            KeyboardInterrupt: Ctrl-C, the stop button, or `interrupt`. The session stays usable:
                an interrupted prompt is forgotten, finished tokens are kept.
            SessionError: closed, used by another thread or a forked process, continued after
                another stream began, an unknown token id, or no room in the context; or in doubt
                after an exception from elsewhere (see `Gate`).
            ReadError: expert bytes could not be read. Nothing was computed from them, and the
                conversation stands as it was before the step. A read ahead of need that failed is
                told once, by the next step that runs; asked for again, that step goes on.
        """
        return self._begin(self._encode(prompt), n, Generation(), None)

    def _begin(
        self, tokens: list[int], n: int, result: Generation, digest: Any
    ) -> Iterator[TokenStep]:
        """Check what can be checked at once; the iterator then runs and fills in `result`."""
        if operator.index(n) < 0:
            raise SessionError(f"{n} tokens cannot be generated; give 0 or more.")
        if not tokens and self.n_past == 0:
            raise SessionError("The prompt is empty: give at least one token to start from.")
        if self.n_past + len(tokens) + n > self.n_ctx:
            raise SessionError(
                f"{self.n_past} tokens in the context, {len(tokens)} in the prompt and {n} to "
                f"generate do not fit in {self.n_ctx}. Shorten them, call reset(), or open it "
                "with a larger n_ctx (--n-ctx)."
            )
        if not tokens and not self._logits_ready:
            raise SessionError("The last step was interrupted: give a prompt to go on from.")
        return self._run(tokens, n, self._stepper.begin_stream(), result, digest)

    def generate(
        self,
        prompt: Prompt,
        n: int = 64,
        *,
        hash_logits: bool = False,
        on_step: Callable[[TokenStep], object] | None = None,
    ) -> Generation:
        """`stream` to its end, which calls `on_step` with each. See there for what it raises."""
        digest = hashlib.sha256() if hash_logits else None
        result = Generation(prompt_tokens=self._encode(prompt))
        for step in self._begin(result.prompt_tokens, n, result, digest):
            result.steps.append(step)
            if on_step:
                on_step(step)
        result.decode_s = time.perf_counter() - result.begin_s - result.prefill_s
        result.stop = "length" if len(result.steps) == n else "end of text"
        result.logits_sha256 = digest.hexdigest() if digest else None
        result.sum_up()
        return result

    def interrupt(self) -> None:
        """End the running step, from any thread; its stream raises KeyboardInterrupt."""
        self._stepper.interrupt()

    def reset(self) -> None:
        """Forget the conversation and its trace; the expert cache stays warm."""
        self._stepper.end_streams(self._start_anew)

    def close(self) -> None:
        """Give everything back. A running step is ended first; a second call does nothing."""
        self._stepper.close(self._give_back)

    def _give_back(self) -> None:
        self._tokenizer.close()
        self._sampler.close()
        self._engine.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_gate"):
            self.close()

    def __reduce__(self) -> str:
        raise TypeError("A session can be neither copied nor pickled; open a second one.")

    def _encode(self, prompt: Prompt) -> list[int]:
        self._gate.check_open()
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, start=self.n_past == 0) if prompt else []
        return self._tokenizer.check(prompt)

    def _run(
        self, tokens: list[int], n: int, stream_id: int, result: Generation, digest: Any
    ) -> Iterator[TokenStep]:
        self._stepper.run(stream_id, self._prefill, tokens, result, digest)
        text = TextStream(self._tokenizer)
        for _ in range(n):
            step = self._stepper.run(stream_id, self._next, text, result)
            if step is None:
                return
            yield step

    def _prefill(self, tokens: list[int], result: Generation, digest: Any) -> None:
        self._turn += 1
        self._digest = digest
        self.prefill_steps = []
        start, begin = self.n_past, time.perf_counter()
        mark = self._recorder.mark()
        text = TextStream(self._tokenizer)
        last = len(tokens) - 1
        for low in range(0, len(tokens), self._model.n_ubatch):
            chunk = tokens[low : low + self._model.n_ubatch]
            outputs = [self.all_logits or low + i == last for i in range(len(chunk))]
            with self._undo_on_failure(start, mark):
                self._graph(chunk, "prefill", outputs, n_left=last + 1 - low - len(chunk))
            self.prefill_steps += self._recorder.steps(chunk, text)
        spent = self._recorder.totals_since(mark)
        result.prefill_s = time.perf_counter() - begin
        result.prefill_read_bytes = spent.bytes_read
        result.hits, result.misses = spent.hits, spent.misses

    def _next(self, text: TextStream, result: Generation) -> TokenStep | None:
        """Choose a token and run it; None at the end of the text."""
        token = self._sampler.sample(self._model)
        if result.ttft_s is None:
            result.ttft_s = time.perf_counter() - result.begin_s
        if self._tokenizer.is_end(token):
            return None
        with self._undo_on_failure(self.n_past, self._recorder.mark()):
            self._graph([token], "decode", [True])
        return self._recorder.steps([token], text)[0]

    def _graph(self, tokens: list[int], phase: str, outputs: list[bool], n_left: int = 0) -> None:
        """One graph, and its logits to whoever asked for them."""
        is_whole = self._engine.graph(
            tokens, self.n_past, outputs, turn=self._turn, phase=phase, n_left=n_left
        )
        if not is_whole:
            raise self._gate.excuse(KeyboardInterrupt())
        self.n_past += len(tokens)
        self._logits_ready = outputs[-1]
        if self.on_logits or self._digest:
            for index in np.flatnonzero(outputs):
                row = self._model.logits(int(index))
                if self._digest:
                    self._digest.update(row.tobytes())
                self._show(row)

    def _show(self, row: np.ndarray) -> None:
        try:
            if self.on_logits:
                self.on_logits(row)
        except BaseException as error:
            self._gate.excuse(error)
            raise

    @contextlib.contextmanager
    def _undo_on_failure(self, position: int, mark: Mark) -> Iterator[None]:
        """Go back to `position` if a graph fails, so that asking again starts from there."""
        try:
            yield
        except BaseException as error:
            if self._gate.forgives(error):  # else nobody goes on from here
                self._take_back(position, mark)
            raise

    def _take_back(self, position: int, mark: Mark) -> None:
        self._recorder.rewind(mark)
        self._engine.forget_prompt()
        self.prefill_steps = []
        self._logits_ready = False
        if self._model.rewind(position):
            self.n_past = position
        else:
            self._forget()
            self._recorder.restart()
            warnings.warn(
                "This model keeps a recurrent state that cannot be cut back, so the "
                "conversation up to here was forgotten.",
                stacklevel=2,
            )

    def _start_anew(self) -> None:
        self._forget()
        self._recorder.restart()
        self._sampler.reset()
        self._turn = -1

    def _forget(self) -> None:
        self._model.rewind(0)
        self.n_past = 0
        self._logits_ready = False
