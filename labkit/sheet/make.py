"""`sheet`: the ledger of a model, from a GGUF file's metadata or a description of its shape."""

from __future__ import annotations

from pathlib import Path

from labkit.errors import LabkitError
from labkit.gguf_map import GGUFMap, open_gguf
from labkit.sheet.attention import attention_layers
from labkit.sheet.cache_layout import cache_layout
from labkit.sheet.keys import Keys
from labkit.sheet.known_caches import cache_note
from labkit.sheet.model_sheet import ModelSheet
from labkit.sheet.weights import weights_of_file


def sheet_of_file(gguf: GGUFMap, *, header_only: bool = False) -> ModelSheet:
    """The ledger of a mapped file; tensor data is not looked at."""
    keys = Keys(gguf.metadata, gguf.architecture, str(gguf.paths[0]))
    notes = []
    unknown = [t.name for t in gguf.tensors if not t.type_known]
    if unknown:
        notes.append(
            f"{len(unknown)} tensors have a type that labkit does not know ({unknown[0]}, ...):"
            " their bytes count the room up to the next tensor."
        )
    note, checked = cache_note(keys.architecture)
    cache = attention = None
    try:
        if checked is not None:
            cache = tuple(cache_layout(keys, gguf.has_tensor))
            attention = tuple(attention_layers(keys))
    except LabkitError as error:  # a tensor ledger is worth having without these keys
        note = str(error)
    name = str(gguf.metadata.get("general.name") or gguf.paths[0].name)
    embedding = gguf.tensor("token_embd.weight") if gguf.has_tensor("token_embd.weight") else None
    return ModelSheet(
        name="".join(c if c.isprintable() else "?" for c in name)[:120],
        architecture=gguf.architecture,
        where=str(gguf.paths[0]),
        n_layers=gguf.n_computed_layers,
        n_expert=gguf.n_expert,
        n_expert_used=gguf.n_expert_used,
        context_length=keys.context_length,
        n_vocab=embedding.shape[1] if embedding and len(embedding.shape) > 1 else 0,
        weights=tuple(weights_of_file(gguf)),
        cache=cache,
        attention=attention or (),
        cache_note=note,
        notes=tuple(notes),
        header_only=header_only,
        experts_used={layer: gguf.experts_used(layer) for layer in gguf.moe_layers},
    )


def sheet(source: str | Path | GGUFMap) -> ModelSheet:
    """placeholder, replaced when shapes exist"""
    if isinstance(source, GGUFMap):
        return sheet_of_file(source)
    return sheet_of_file(open_gguf(source, inspect_only=True))
