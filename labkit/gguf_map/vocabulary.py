"""Checks of a tokenizer in GGUF metadata: what would end the process inside llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from labkit.gguf_map.values import LazyArray

_TOKENS = "tokenizer.ggml.tokens"
_NO_TOKENIZER = (None, "none", "no_vocab")
_DEFAULT_BOS = {"llama": 1, "gpt2": 11, "gemma4": 11, "bert": 101, "plamo2": 1}
_DEFAULT_EOS = {"llama": 2, "gpt2": 11, "gemma4": 11, "plamo2": 2, "t5": 1}


def vocabulary_problems(metadata: Mapping[str, object]) -> Iterator[str]:
    """Yield what is wrong with the vocabulary so that llama.cpp cannot load it."""
    if metadata.get("tokenizer.ggml.model") in _NO_TOKENIZER:
        return
    tokens = _tokens(metadata)
    if tokens is None:
        return
    seen: set[bytes] = set()
    for index, raw in enumerate(tokens):
        token = raw.split(b"\0", 1)[0] or b"[EMPTY_%d]" % index  # as llama.cpp reads it
        if token in seen:
            text = token.decode("utf-8", "replace")
            yield f"{_TOKENS} holds the token '{text}' twice (again as token {index})"
            return
        seen.add(token)


def can_tokenise(metadata: Mapping[str, object]) -> bool:
    """Whether text can be given to llama.cpp's tokenizer without risk to the process.

    It throws through the C interface when a sentencepiece vocabulary lacks a token for some byte,
    and asserts when it is told to add a begin or end token that the vocabulary does not have.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind in _NO_TOKENIZER:
        return False
    tokens = _tokens(metadata)
    if tokens is None:
        return False
    if kind in ("llama", "plamo2"):
        known = set(tokens)
        bytewise = [b for b in range(256) if b"<0x%02X>" % b not in known]
        if any(kind == "plamo2" or bytes([b]) not in known for b in bytewise):
            return False
    for name, defaults in (("bos", _DEFAULT_BOS), ("eos", _DEFAULT_EOS)):
        if not metadata.get(f"tokenizer.ggml.add_{name}_token"):
            continue
        wanted = metadata.get(f"tokenizer.ggml.{name}_token_id")
        candidates = [wanted, defaults.get(kind)]
        if not any(isinstance(c, int) and 0 <= c < len(tokens) for c in candidates):
            return False
    return True


def _tokens(metadata: Mapping[str, object]) -> list[bytes] | None:
    tokens = metadata.get(_TOKENS)
    if isinstance(tokens, LazyArray) and tokens.type_name == "STRING":
        return tokens.read_raw()
    if isinstance(tokens, list) and all(isinstance(t, str) for t in tokens):
        return [t.encode("utf-8", "surrogatepass") for t in tokens]
    return None
