"""The rows of which a model's cache is made: how wide each is, and how their number grows.

llama.cpp allocates a cache for the whole context when a context opens. A layer that attends to
everything has a row a token; one with a sliding window needs only as many rows as its window and
one batch; compressed attention keeps a row for several tokens; a recurrent state has a fixed size.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.errors import OptionError
from labkit.gguf_map.types import GGML_TYPES

CONTEXT_STEP = 256
"""llama.cpp rounds a context, and the rows of a window, up to a multiple of this."""

ALIGNMENT = 32
"""Bytes to which ggml rounds each tensor up inside a buffer (CPU backend)."""

ATTENTION = "attention"
LATENT = "latent attention"
WINDOW = "sliding window"
INDEXER = "indexer"
COMPRESSED = "compressed attention"
RECURRENT = "recurrent state"

CACHE_KINDS = (ATTENTION, LATENT, WINDOW, INDEXER, COMPRESSED, RECURRENT)
"""What a row is kept for. Latent attention (MLA) keeps one compressed key and no value."""

_TYPES = {name: (block, nbytes) for name, block, nbytes in GGML_TYPES.values()}


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How llama.cpp is asked to make the cache.

    Attributes:
        n_ctx: tokens of context.
        n_ubatch: tokens of one prefill graph; rows of a sliding window come on top of it.
        type_k, type_v: ggml types of keys and values.
        swa_full: keep the whole context for layers with a sliding window, too. llama.cpp's
            library does so unless told otherwise, and so does `labkit.runtime.Session`, because
            only then can a conversation be cut back; llama.cpp's programs do not.
    """

    n_ctx: int
    n_ubatch: int = 512
    type_k: str = "F16"
    type_v: str = "F16"
    swa_full: bool = False

    def __post_init__(self) -> None:
        for name, value in (("n_ctx", self.n_ctx), ("n_ubatch", self.n_ubatch)):
            if not isinstance(value, int) or not 1 <= value <= 1 << 30:
                raise OptionError(f"{name} is {value!r}; it must be a number of tokens, at least 1")
        for name, value in (("type_k", self.type_k), ("type_v", self.type_v)):
            if value not in _TYPES:
                raise OptionError(
                    f"{name} is {value!r}, not a ggml type; usual ones: F16, Q8_0, Q4_0"
                )

    @property
    def n_rows(self) -> int:
        """Rows of a layer that attends to everything: the context, rounded up."""
        return _padded(self.n_ctx, CONTEXT_STEP)

    def window_rows(self, window: int) -> int:
        """Rows of a layer with a sliding window."""
        if self.swa_full:
            return self.n_rows
        n_ubatch = min(self.n_ubatch, self.n_rows)
        return _padded(min(self.n_rows, window + n_ubatch), CONTEXT_STEP)

    def compressed_rows(self, ratio: int) -> int:
        """Rows that stand for `ratio` tokens each."""
        return _padded(max(1, -(-self.n_rows // ratio)), CONTEXT_STEP)


@dataclass(frozen=True, slots=True)
class CacheRows:
    """One tensor of the cache: rows of `width` elements.

    Attributes:
        layer: whose it is.
        kind: one of `CACHE_KINDS`.
        holds: "key", "value" or "state" (a state is always F32).
        width: elements of a row.
        window: of a sliding window, the tokens that it reaches back; else 0.
        ratio: of compressed attention, the tokens to a row; else 1.
        fixed: number of rows where it does not depend on the context; else 0.
    """

    layer: int
    kind: str
    holds: str
    width: int
    window: int = 0
    ratio: int = 1
    fixed: int = 0

    def n_rows(self, options: CacheOptions) -> int:
        """How many rows llama.cpp allocates."""
        if self.fixed:
            return self.fixed
        if self.kind == WINDOW:
            return options.window_rows(self.window)
        return options.compressed_rows(self.ratio) if self.ratio > 1 else options.n_rows

    def nbytes(self, options: CacheOptions) -> int:
        """Bytes that llama.cpp allocates for it, its alignment included.

        Raises:
            OptionError: the type packs several elements and a row is no multiple of them.
        """
        name = {"key": options.type_k, "value": options.type_v}.get(self.holds, "F32")
        block, block_bytes = _TYPES[name]
        if self.width % block:
            raise OptionError(
                f"the cache of layer {self.layer} has rows of {self.width} elements, which {name}"
                f" cannot hold: it packs {block} at a time. Use F16, as llama.cpp would."
            )
        row_bytes = self.width // block * block_bytes
        return _padded(self.n_rows(options) * row_bytes, ALIGNMENT)


def _padded(value: int, step: int) -> int:
    return -(-value // step) * step
