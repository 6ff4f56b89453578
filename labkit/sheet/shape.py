"""`ModelShape`: a model described in JSON, for a sheet before there is a file.

A shape is metadata and tensor shapes under the names that GGUF files use::

    {"format": "labkit-shape 1", "name": "My model", "architecture": "qwen3moe",
     "keys": {"block_count": 2, "embedding_length": 64, ...},
     "tensors": {"token_embd.weight": [64, 1000], "blk.*.attn_q.weight": [64, 128],
                 "blk.{1}.ffn_up_exps.weight": [64, 32, 8], ...},
     "sources": ["https://..."]}

In a tensor's name `*` stands for every layer, and `{0-3,7}` for those layers. `cached_like` names
an architecture of llama.cpp whose cache the model has, where llama.cpp does not know its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from labkit.bundled import DATA_DIR
from labkit.errors import SheetError
from labkit.json_file import read_json
from labkit.sheet.keys import MAX_LAYERS, Keys

FORMAT = "labkit-shape 1"
MANY_FORMAT = "labkit-shapes 1"
PUBLISHED = DATA_DIR / "recorded" / "model_shapes.json"
_MAX_BYTES = 4 << 20
_MAX_TENSORS = 1 << 16
_MAX_SIZE = 1 << 40
_FIELDS = {
    *("format", "name", "architecture", "cached_like", "keys", "tensors"),
    *("sources", "notes", "published"),
}
_LAYERS = re.compile(r"blk\.(?:\*|\{([0-9, -]+)\})\.", re.ASCII)


@dataclass(frozen=True)
class PublishedCount:
    """What the publisher says, in 1e9 parameters; None where it does not."""

    total_b: float | None
    active_b: float | None
    source: str


@dataclass(frozen=True)
class ModelShape:
    """A model's metadata (with its architecture's prefix) and tensors (name, shape), in order.

    `cache_architecture` is the one whose cache it has in llama.cpp, and the prefix of `metadata`.
    """

    name: str
    architecture: str
    cache_architecture: str
    metadata: dict[str, object]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    where: str
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    published: PublishedCount | None = None

    @property
    def keys(self) -> Keys:
        """Its metadata, with llama.cpp's defaults."""
        return Keys(self.metadata, self.cache_architecture, self.where)


def shape_names() -> list[str]:
    """Names of the published shapes that come with labkit, smallest model first."""
    return list(_published())


def load_shape(source: str | Path) -> ModelShape:
    """A published shape by its name, or a shape from a JSON file.

    Raises:
        SheetError: no such shape or file, no JSON, or a field that is missing or makes no sense.
    """
    if str(source).lower() in _published():
        name = str(source).lower()
        return parse_shape(_published()[name], f"published shape '{name}'")
    path = Path(source).expanduser()
    if path.suffix != ".json" and not path.exists():
        close = get_close_matches(str(source).lower(), shape_names(), n=1, cutoff=0.4)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise SheetError(
            f"There is no published shape and no file '{source}'.{hint} Published shapes:"
            f" {', '.join(shape_names())}. A description of your own is a .json file."
        )
    value = _read_json(path)
    if isinstance(value, dict) and value.get("format") == MANY_FORMAT:
        raise SheetError(
            f"{path}: holds several shapes; labkit reads its own such file by the model's name:"
            f" {', '.join(shape_names())}. A file of your own describes one model"
            f' ("format": "{FORMAT}").'
        )
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise SheetError(
            f'{path}: no description of a model: it must be an object with "format": "{FORMAT}".'
            " `python -m pydoc labkit.sheet.shape` shows one."
        )
    return parse_shape(value, str(path))


def parse_shape(value: dict[str, Any], where: str) -> ModelShape:
    """A shape from the content of its JSON; `where` names it in errors. Raises `SheetError`."""
    unknown = sorted(set(value) - _FIELDS)
    if unknown:
        raise SheetError(
            f"{where}: '{unknown[0]}' is no field of a shape; there are {sorted(_FIELDS)}."
        )
    architecture = _text(value, "architecture", where)
    cached_like = _text(value, "cached_like", where) if "cached_like" in value else architecture
    keys = value.get("keys")
    if not isinstance(keys, dict) or not keys:
        raise SheetError(f"{where}: 'keys' must be an object of metadata, such as block_count.")
    n_layers = keys.get("block_count")
    if not isinstance(n_layers, int) or not 1 <= n_layers <= MAX_LAYERS:
        raise SheetError(
            f"{where}: keys.block_count is {n_layers!r}; it must be 1 to {MAX_LAYERS}."
        )
    return ModelShape(
        name=_text(value, "name", where),
        architecture=architecture,
        cache_architecture=cached_like,
        metadata={f"{cached_like}.{key}": _key(where, key, v) for key, v in keys.items()},
        tensors=tuple(_tensors(value.get("tensors"), n_layers, where)),
        where=where,
        sources=_texts(value, "sources", where),
        notes=_texts(value, "notes", where),
        published=_count(value.get("published"), where),
    )


def _tensors(value: Any, n_layers: int, where: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    if not isinstance(value, dict) or not value:
        raise SheetError(f"{where}: 'tensors' must be an object: name -> shape.")
    seen: set[str] = set()
    for pattern, shape in value.items():
        here = f"{where}: tensor '{pattern}'"
        good = isinstance(shape, list) and 1 <= len(shape) <= 4 and all(map(_is_whole, shape))
        if not good or not all(1 <= size <= _MAX_SIZE for size in shape):
            raise SheetError(f"{here} has the shape {shape!r}; give 1 to 4 sizes of at least 1.")
        if "_exps.weight" in pattern and len(shape) != 3:
            raise SheetError(f"{here} needs three sizes, the last by expert, not {shape}.")
        for name in _names(pattern, n_layers, here):
            if name in seen or len(seen) >= _MAX_TENSORS:
                raise SheetError(f"{here} gives '{name}' a second time, or too many tensors.")
            seen.add(name)
            yield name, tuple(shape)


def _names(pattern: str, n_layers: int, here: str) -> Iterator[str]:
    match = _LAYERS.match(pattern)
    if match is None:
        if "*" in pattern or "{" in pattern:
            raise SheetError(f"{here}: layers are given as blk.*. or blk.{{0-3,7}}., at the start.")
        yield pattern
        return
    layers = range(n_layers) if match[1] is None else _layer_set(match[1], here)
    for layer in layers:
        if layer >= n_layers:
            raise SheetError(f"{here}: layer {layer} is beyond the model's {n_layers} layers.")
        yield f"blk.{layer}.{pattern[match.end() :]}"


def _layer_set(text: str, here: str) -> Iterator[int]:
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 9:
            raise SheetError(f"{here}: '{part}' is no layer and no range of layers such as 0-3.")
        yield from range(int(first), int(last or first) + 1)


def _key(where: str, key: str, value: Any) -> object:
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(isinstance(n, bool) or _is_whole(n) for n in numbers):
        raise SheetError(f"{where}: keys.{key} is {value!r}; it must be a count or a list of them.")
    return value


def _count(value: Any, where: str) -> PublishedCount | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise SheetError(f"{where}: 'published' must be an object.")
    counts = [value.get(name) for name in ("total_b", "active_b")]
    for count in counts:
        if count is not None and not (isinstance(count, (int, float)) and 0 < count < 1e6):
            raise SheetError(f"{where}: published counts are in 1e9 parameters, not {count!r}.")
    return PublishedCount(counts[0], counts[1], _text(value, "source", f"{where}: published"))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: dict[str, Any], key: str, where: str) -> str:
    text = value.get(key)
    if not isinstance(text, str) or not text.strip() or not text.isprintable():
        raise SheetError(f"{where}: '{key}' is missing; it must be a text that is not empty.")
    return text


def _texts(value: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    texts = value.get(key, [])
    if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
        raise SheetError(f"{where}: '{key}' must be a list of texts.")
    return tuple(texts)


def _read_json(path: Path) -> Any:
    what = "description of a model"
    return read_json(path, what=what, most_bytes=_MAX_BYTES, error=SheetError)


@cache
def _published() -> dict[str, dict[str, Any]]:
    """The shapes in `data/recorded`, empty in an installation without data."""
    if not PUBLISHED.is_file():
        return {}
    models = _read_json(PUBLISHED)["models"]
    return dict(sorted(models.items(), key=lambda item: item[1]["published"]["total_b"]))
