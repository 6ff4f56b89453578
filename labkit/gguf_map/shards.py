"""From a path (a file, any shard of a split model, a directory) to the files of one model."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from labkit.errors import MissingShardError, ModelFileError, NotAModelError
from labkit.gguf_map.header import Header, read_header

_SHARD = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.ASCII | re.DOTALL)
MAX_SHARDS = 1024
_LISTED = 10


def read_model_headers(path: Path, *, header_only: bool = False) -> list[Header]:
    """Return the headers of a model's files in shard order; see `read_header`."""
    with contextlib.suppress(OSError):  # reading the header says what is wrong with the path
        path = _only_model_in(path) if path.is_dir() else path
    first = read_header(path, header_only=header_only)
    count = _split_key(first, "split.count", "UINT16", default=1)
    if count <= 1:
        return [first]
    if count > MAX_SHARDS:
        raise ModelFileError(f"{path}: declares {count} shards; labkit reads up to {MAX_SHARDS}.")
    headers = []
    for number, shard_path in enumerate(_shard_paths(path, count)):
        same = shard_path == path
        header = first if same else read_header(shard_path, header_only=header_only)
        _check_shard(header, number, count)
        headers.append(header)
    _check_total(headers)
    return headers


def _only_model_in(directory: Path) -> Path:
    try:
        files = sorted(p for p in directory.iterdir() if p.suffix.lower() == ".gguf")
        deeper = [] if files else sorted(p.parent for p in directory.glob("*/*.gguf"))
    except OSError as error:
        raise ModelFileError(f"{directory}: cannot be listed: {error.strerror}.") from error
    models: dict[str, Path] = {}
    for file in files:
        match = _SHARD.fullmatch(file.name)
        models.setdefault(match[1] + match[3] if match else file.name, file)
    if len(models) > 1:  # a vision projector lies beside its model and is not one itself
        models = {k: v for k, v in models.items() if not k.lower().startswith("mmproj")} or models
    if not models:
        hint = f" Perhaps {deeper[0]} is meant." if deeper else ""
        raise NotAModelError(f"{directory}: a directory without any .gguf file.{hint}")
    if len(models) > 1:
        names = [file.name for file in models.values()]
        names = names[:_LISTED] + (["..."] if len(names) > _LISTED else [])
        raise ModelFileError(
            f"{directory}: holds {len(models)} models; give the path of one: {', '.join(names)}."
        )
    return next(iter(models.values()))


def _shard_paths(path: Path, count: int) -> list[Path]:
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ModelFileError(
            f"{path}: its header says that it is one of {count} shards, so its name must end"
            f" in -00001-of-{count:05d}.gguf or the like. Give it back its published name."
        )
    paths = [path.with_name(f"{match[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise MissingShardError(
            f"{path.parent}: this model has {count} shards and {len(missing)} of them is missing:"
            f" {', '.join(missing[:_LISTED])}{more}. Download them into the same directory."
        )
    return paths


def _check_shard(header: Header, number: int, count: int) -> None:
    declared = _split_key(header, "split.count", "UINT16", default=None)
    if declared != count:
        raise ModelFileError(
            f"{header.path}: says that the model has {declared} shards, the others say {count}."
            " The files belong to different models."
        )
    own = _split_key(header, "split.no", "UINT16", default=None)
    if own != number:
        raise ModelFileError(
            f"{header.path}: is named shard {number + 1} but its header says shard"
            f" {'?' if own is None else own + 1}. Files of the set were renamed or mixed up."
        )


def _check_total(headers: list[Header]) -> None:
    declared = _split_key(headers[0], "split.tensors.count", "INT32", default=None)
    found = sum(len(h.tensors) for h in headers)
    if declared != found:
        raise ModelFileError(
            f"{headers[0].path}: declares {declared} tensors over all shards, but they hold"
            f" {found}. The shards belong to different versions of the model."
        )


def _split_key(header: Header, key: str, kind: str, default: int | None) -> int:
    value = header.metadata.get(key, default)
    found = header.value_types.get(key, kind)
    if found != kind:  # llama.cpp ends the process on some of these
        raise ModelFileError(f"{header.path}: {key} is of type {found} instead of {kind}.")
    return value  # type: ignore[return-value]
