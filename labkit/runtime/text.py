"""Text to token ids and back, and the choice of the next token, all by llama.cpp."""

from __future__ import annotations

import codecs
import ctypes
import math
import operator
import threading
from collections.abc import Callable, Iterable
from typing import Any

from labkit.errors import LlamaError, OptionError, SessionError
from labkit.runtime import ggml
from labkit.runtime.native import NativeModel

_MOST_BYTES_PER_TOKEN = 128
_RANDOM_SEED = 0xFFFFFFFF


class Tokenizer:
    """The model's own tokenizer; absent in models that are run from token ids.

    Safe between threads, beside a step too: it is not freed while somebody uses it.
    """

    def __init__(self, model: NativeModel, available: bool) -> None:
        self._llama = ggml.llama()
        self._vocab: Any = model.vocab
        self._lock = threading.RLock()  # a signal handler may close inside a use of its own thread
        self._n_vocab = model.n_vocab
        self._n_ctx = model.n_ctx
        self.available = available

    def encode(self, text: str, *, start: bool) -> list[int]:
        """Token ids of `text`; `start` adds what the model wants at the start of a text.

        Raises:
            SessionError: the model has no tokenizer, or the text is none or far too long.
        """
        if not self.available:
            raise SessionError(
                "This model has no tokenizer, so it cannot read a text. Give token ids: a list in "
                "Python, --tokens 1,2,3 on the command line. Notebooks 02 and 03 need a text."
            )
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise SessionError(
                f"The text holds half a character ({error.reason} at place {error.start}), which "
                "has no bytes. Read it with the right encoding first."
            ) from error
        if len(data) > _MOST_BYTES_PER_TOKEN * self._n_ctx:
            # Tokenising takes seconds a megabyte, and cannot be interrupted.
            raise SessionError(
                f"A text of {len(data)} bytes does not fit in a context of {self._n_ctx} tokens. "
                "Shorten it, or open the session with a larger n_ctx."
            )
        room = len(data) + 8
        buffer = (ctypes.c_int32 * room)()
        n = self._ask(self._llama.llama_tokenize, data, len(data), buffer, room, start, True)
        if n < 0:
            raise LlamaError(f"llama.cpp cannot tokenize this text of {len(data)} bytes ({n})")
        return list(buffer[:n])

    def check(self, tokens: Iterable[int]) -> list[int]:
        """The same ids as a list.

        Raises:
            SessionError: an id that the model does not have; llama.cpp would fail on it.
            TypeError: something that is no whole number.
        """
        if isinstance(tokens, (bytes, bytearray)):
            raise SessionError("Bytes are neither a text nor token ids; decode them first.")
        ids = [operator.index(token) for token in tokens]
        for token in ids:
            if not 0 <= token < self._n_vocab:
                raise SessionError(
                    f"Token id {token} does not exist: the model has {self._n_vocab} tokens, "
                    f"0 to {self._n_vocab - 1}."
                )
        return ids

    def piece(self, token: int) -> bytes:
        """The bytes of one token; no text at all without a tokenizer."""
        if not self.available:
            return b""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = self._ask(self._llama.llama_token_to_piece, token, buffer, size, 0, False)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def is_end(self, token: int) -> bool:
        """Whether the token ends a text."""
        return self.available and bool(self._ask(self._llama.llama_vocab_is_eog, token))

    def close(self) -> None:
        """Nobody uses it any more; returns when nobody does. The model is freed afterwards."""
        with self._lock:
            self._vocab = None

    def _ask(self, function: Callable[..., int], *arguments: Any) -> int:
        with self._lock:
            if self._vocab is None:
                raise SessionError("This session is closed. Open a new one.")
            return function(self._vocab, *arguments)


class TextStream:
    """Joins the bytes of tokens to text, a character only when all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """What `token` adds to the text."""
        return self._decoder.decode(self._tokenizer.piece(token))


class Sampler:
    """llama.cpp's sampler chain: greedy at temperature 0, else top-k, top-p, temperature, seed."""

    def __init__(self, *, temperature: float, top_k: int, top_p: float, seed: int) -> None:
        if not 0 <= temperature < math.inf or not 0 < top_p <= 1 or top_k < 0:
            raise OptionError(
                f"temperature {temperature}, top_k {top_k}, top_p {top_p}: temperature and top_k "
                "are at least 0 and top_p lies in (0, 1]"
            )
        if not 0 <= seed < _RANDOM_SEED:
            # llama.cpp takes this value for "another one each time".
            raise OptionError(f"seed is {seed}; it must lie in 0 to {_RANDOM_SEED - 1}")
        self._llama = llama = ggml.llama()
        self._chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        if temperature == 0:
            parts = [llama.llama_sampler_init_greedy()]
        else:
            parts = [
                llama.llama_sampler_init_top_k(top_k),
                llama.llama_sampler_init_top_p(top_p, 1),
                llama.llama_sampler_init_temp(temperature),
                llama.llama_sampler_init_dist(seed),
            ]
        for part in parts:
            llama.llama_sampler_chain_add(self._chain, part)

    def sample(self, model: NativeModel) -> int:
        """The next token from the last logits."""
        return self._llama.llama_sampler_sample(self._chain, model.context, -1)

    def reset(self) -> None:
        """Start the random numbers over."""
        self._llama.llama_sampler_reset(self._chain)

    def close(self) -> None:
        """Free the chain."""
        if self._chain:
            self._llama.llama_sampler_free(self._chain)
            self._chain = None
