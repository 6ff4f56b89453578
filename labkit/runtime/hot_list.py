"""`HotList`: which experts of a model were used most, kept from one session to the next."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from labkit.errors import OptionError
from labkit.gguf_map import GGUFMap
from labkit.json_file import read_json
from labkit.policy.base import Entry

_FORMAT = "labkit hot list 1"
_MOST_BYTES = 16 << 20
_MOST_USES = 1 << 48
_SAMPLE_BYTES = 4096


class HotListWarning(UserWarning):
    """A hot list that cannot be used or kept; the session goes on without."""


class HotList:
    """Counts uses of experts, in a file of its own for each model.

    What earlier sessions used counts half as much with each session, so that the list follows what
    the model is used for. The file is a hint: one that is damaged or belongs to another model is
    not used, with a warning, and replaced when this session's uses are saved.

    Args:
        directory: where the files are kept; it is made when something is saved.
        gguf: the model.

    Attributes:
        path: this model's file.

    Raises:
        OptionError: `directory` is something else.
    """

    def __init__(self, directory: str | Path, gguf: GGUFMap) -> None:
        folder = Path(directory)
        if folder.exists() and not folder.is_dir():
            raise OptionError(f"hot_list is {folder}, which is no directory; give one, or none")
        self._identity = model_identity(gguf)
        self._layers = gguf.moe_layers
        self._uses = {layer: np.zeros(gguf.n_expert, np.int64) for layer in self._layers}
        self.path = folder / f"{self._identity[:16]}.json"
        self._earlier = self._read()

    def hottest(self) -> list[Entry]:
        """Entries that earlier sessions used, the most used first."""
        uses = [
            (-count, layer, expert)
            for layer, counts in self._earlier.items()
            for expert, count in enumerate(counts.tolist())
            if count
        ]
        return [(layer, expert) for _, layer, expert in sorted(uses)]

    def note(self, layer: int, experts: np.ndarray) -> None:
        """A layer used `experts`, (n_tokens, k) int32."""
        uses = self._uses[layer]
        uses += np.bincount(experts.ravel(), minlength=len(uses))

    def save(self) -> None:
        """Write the file anew, if this session used anything; a failure is a warning."""
        if not any(counts.any() for counts in self._uses.values()):
            return
        uses = {
            str(layer): ((self._earlier[layer] + 1) // 2 + self._uses[layer]).tolist()
            for layer in self._layers
        }
        content = {"format": _FORMAT, "model": self._identity, "uses": uses}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self.path, json.dumps(content))
        except OSError as error:
            self._warn(f"cannot be written ({error.strerror})")

    def _read(self) -> dict[int, np.ndarray]:
        earlier = {layer: np.zeros_like(uses) for layer, uses in self._uses.items()}
        if not self.path.exists():
            return earlier
        try:
            if not self.path.is_file():  # a pipe would never end
                raise OptionError("it is no file")
            content = read_json(
                self.path, what="hot list", most_bytes=_MOST_BYTES, error=OptionError
            )
            return {
                layer: _counts(uses, len(self._uses[layer]))
                for layer, uses in self._by_layer(content).items()
            }
        except OptionError as error:
            self._warn(f"is not used: {error}")
            return earlier

    def _by_layer(self, content: Any) -> dict[int, Any]:
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise OptionError(f"it does not say that it is a {_FORMAT}")
        if content.get("model") != self._identity:
            raise OptionError("it belongs to another model")
        uses = content.get("uses")
        if not isinstance(uses, dict) or set(uses) != {str(layer) for layer in self._layers}:
            raise OptionError("its layers are not the model's")
        return {layer: uses[str(layer)] for layer in self._layers}

    def _warn(self, what: str) -> None:
        warnings.warn(f"The hot list {self.path} {what}", HotListWarning, stacklevel=2)


def model_identity(gguf: GGUFMap) -> str:
    """A hash of the model's headers, its size and a sample of its experts, in hexadecimal.

    Two files with the same identity are taken for copies of one model.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for shard, path in enumerate(gguf.paths):
        digest.update(gguf.sizes[shard].to_bytes(8, "little"))
        with path.open("rb") as file:
            digest.update(file.read(gguf.data_offsets[shard]))
            for part in gguf.expert_tensors:
                if part.tensor.shard == shard:
                    file.seek(part.tensor.offset)
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _counts(values: Any, n_expert: int) -> np.ndarray:
    if not isinstance(values, list) or len(values) != n_expert:
        raise OptionError(f"a layer has not {n_expert} counts, one for each expert")
    if not all(type(value) is int and 0 <= value <= _MOST_USES for value in values):
        raise OptionError(f"its counts are not whole numbers from 0 to {_MOST_USES}")
    return np.array(values, np.int64)


def _replace(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
