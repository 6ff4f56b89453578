"""`sheet`: the ledger of a model, from a GGUF file's metadata or a description of its shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from labkit.errors import LabkitError, ModelFileError
from labkit.gguf_map import GGUFMap
from labkit.sheet.attention import Attention, attention_layers
from labkit.sheet.cache_layout import cache_layout
from labkit.sheet.cache_rows import CacheRows
from labkit.sheet.header import open_header
from labkit.sheet.keys import Keys
from labkit.sheet.known_caches import cache_note
from labkit.sheet.model_sheet import ModelSheet
from labkit.sheet.shape import ModelShape, load_shape, shape_names
from labkit.sheet.weights import Bits, at_bits, weights_of_file, weights_of_shape


def sheet(
    source: str | Path | GGUFMap | ModelShape,
    *,
    bits: Bits | None = None,
    n_ctx: int | None = None,
) -> ModelSheet:
    """The ledger of a model, without loading it.

    Args:
        source: a GGUF file (any shard, or their directory; its tensor data may be absent), its
            map, the name of a published shape (see `shape_names`), a shape, or its JSON file.
        bits: width of the weights (see `labkit.sheet.at_bits`). None keeps a file's own types, and
            takes 4 bits for a shape, which has none.
        n_ctx: a context to be checked against the model's own.

    Raises:
        ModelFileError: the file is no model, or its header damaged.
        SheetError: no such shape, or one that makes no sense.
        OptionError: `n_ctx` is longer than the model's context, or `bits` makes no sense.
    """
    if not isinstance(source, (GGUFMap, ModelShape)):
        source = _read(source)
    if isinstance(source, ModelShape):
        made = _sheet_of_shape(source, 4 if bits is None else bits)
    else:
        made = _sheet_of_file(source)
        made = made if bits is None else made.at_bits(bits)
    if n_ctx is not None:
        made.check_context(n_ctx)
    return made


def _read(source: str | Path) -> GGUFMap | ModelShape:
    path = Path(source).expanduser()
    named = str(source).lower() in shape_names() and not path.exists()
    if named or path.suffix.lower() == ".json":
        return load_shape(source)
    if not path.exists() and path.suffix.lower() != ".gguf" and len(path.parts) == 1:
        return load_shape(source)  # which says what names there are
    return open_header(path)


def _sheet_of_file(gguf: GGUFMap) -> ModelSheet:
    if not gguf.tensors:
        raise ModelFileError(
            f"{gguf.paths[0]}: holds no tensors (a vocabulary alone?): there is nothing to weigh."
        )
    keys = Keys(gguf.metadata, gguf.architecture, str(gguf.paths[0]))
    cache, attention, note = _cache(keys, gguf.has_tensor)
    weights = weights_of_file(gguf)
    notes = []
    if unknown := [t.name for t in gguf.tensors if not t.type_known]:
        notes.append(
            f"{len(unknown)} tensors have a type that labkit does not know ('{unknown[0]}'"
            f"{', ...' if len(unknown) > 1 else ''}): their bytes count the room up to the next"
            " tensor."
        )
    header_only = any(
        t.offset + t.nbytes > gguf.sizes[t.shard] for t in gguf.tensors if t.type_known
    )
    name = str(gguf.metadata.get("general.name") or gguf.paths[0].name)
    return ModelSheet(
        name="".join(c if c.isprintable() else "?" for c in name)[:120],
        architecture=gguf.architecture,
        where=str(gguf.paths[0]),
        n_layers=gguf.n_computed_layers,
        n_expert=gguf.n_expert if gguf.expert_tensors else 0,
        n_expert_used=gguf.n_expert_used if gguf.expert_tensors else 0,
        context_length=keys.context_length,
        weights=tuple(weights),
        cache=cache,
        attention=attention,
        cache_note=note,
        notes=tuple(notes),
        header_only=header_only,
        experts_used={layer: gguf.experts_used(layer) for layer in gguf.moe_layers},
    )


def _sheet_of_shape(shape: ModelShape, bits: Bits) -> ModelSheet:
    keys = shape.keys
    cache, attention, note = _cache(keys, {name for name, _ in shape.tensors}.__contains__)
    used = keys.by_layer("expert_used_count", keys.n_layers)
    weights = weights_of_shape(shape)
    experts = [w for w in weights if w.n_experts]
    return ModelSheet(
        name=shape.name,
        architecture=shape.architecture,
        where=shape.where,
        n_layers=keys.n_trunk_layers,
        n_expert=max((w.n_experts for w in experts), default=0),
        n_expert_used=max(used) if experts else 0,
        context_length=keys.context_length,
        weights=tuple(at_bits(weights, bits)),
        cache=cache,
        attention=attention,
        cache_note=note,
        notes=shape.notes,
        sources=shape.sources,
        from_shape=True,
        published=shape.published,
        experts_used={w.layer: used[w.layer] for w in experts if w.layer is not None},
    )


def _cache(
    keys: Keys, has_tensor: Callable[[str], bool]
) -> tuple[tuple[CacheRows, ...] | None, tuple[Attention, ...], str]:
    """(cache rows or None, layers that attend, what to say about them)."""
    note, checked = cache_note(keys.architecture)
    if checked is None:
        return None, (), note
    try:
        return tuple(cache_layout(keys, has_tensor)), tuple(attention_layers(keys)), note
    except LabkitError as error:  # the weights' ledger is worth having without these keys
        return None, (), f"no figure for the KV cache: {error}"
