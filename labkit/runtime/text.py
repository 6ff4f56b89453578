"""Text to token ids and back, and the choice of the next token, all by llama.cpp."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Sequence

from labkit.errors import LlamaError, SessionError
from labkit.runtime import ggml
from labkit.runtime.native import NativeModel


class Tokenizer:
    """The model's own tokenizer; absent in models that are run from token ids."""

    def __init__(self, model: NativeModel, available: bool) -> None:
        self._llama = ggml.llama()
        self._vocab = model.vocab
        self._n_vocab = model.n_vocab
        self.available = available

    def encode(self, text: str, *, start: bool) -> list[int]:
        """Token ids of `text`; `start` adds what the model wants at the start of a text.

        Raises:
            SessionError: the model has no tokenizer.
        """
        if not self.available:
            raise SessionError("This model has no tokenizer. Give a list of token ids instead.")
        data = text.encode()
        room = len(data) + 8
        buffer = (ctypes.c_int32 * room)()
        n = self._llama.llama_tokenize(self._vocab, data, len(data), buffer, room, start, True)
        if n < 0:
            raise LlamaError(f"llama.cpp cannot tokenize this text of {len(data)} bytes ({n})")
        return list(buffer[:n])

    def check(self, tokens: Sequence[int]) -> list[int]:
        """The same ids as a list.

        Raises:
            SessionError: an id that the model does not have; llama.cpp would fail on it.
        """
        for token in tokens:
            if not 0 <= token < self._n_vocab:
                raise SessionError(
                    f"Token id {token} does not exist: the model has {self._n_vocab} tokens, "
                    f"0 to {self._n_vocab - 1}."
                )
        return [int(token) for token in tokens]

    def piece(self, token: int) -> bytes:
        """The bytes of one token; no text at all without a tokenizer."""
        if not self.available:
            return b""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = self._llama.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def is_end(self, token: int) -> bool:
        """Whether the token ends a text."""
        return self.available and bool(self._llama.llama_vocab_is_eog(self._vocab, token))


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
        if temperature < 0 or not 0 < top_p <= 1 or top_k < 0:
            raise ValueError(
                f"temperature {temperature}, top_k {top_k}, top_p {top_p}: temperature and top_k "
                "are at least 0 and top_p lies in (0, 1]"
            )
        self._llama = llama = ggml.llama()
        self._chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        if temperature == 0:
            parts = [llama.llama_sampler_init_greedy()]
        else:
            parts = [
                llama.llama_sampler_init_top_k(top_k),
                llama.llama_sampler_init_top_p(top_p, 1),
                llama.llama_sampler_init_temp(temperature),
                llama.llama_sampler_init_dist(seed & 0xFFFFFFFF),
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
