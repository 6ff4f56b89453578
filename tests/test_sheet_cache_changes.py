"""The cache's rules hold for models that nobody published: metadata changed at random.

llama.cpp says which tensors a model of the changed metadata has, and then what it would allocate.
Some changes it refuses; of those there is nothing to compare.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labkit import synth
from labkit.errors import LabkitError
from labkit.gguf_map import open_gguf
from labkit.sheet import CacheOptions, ModelShape, ask_llama, sheet
from labkit.sheet.special_cache import SPECIAL

ALWAYS = ("deepseek2", "gpt-oss", "jamba", "kimi-linear", "lfm2moe", "llama4", "qwen35moe")
FULL = bool(os.environ.get("LABKIT_FULL"))

Keys = dict[str, Any]


def changes(keys: Keys, layers: int, rng: random.Random) -> list[Keys]:
    """Changes that a model could have; keys have no prefix, lists are for `layers` layers."""
    n_kv = keys.get("attention.head_count_kv")
    latent = "attention.key_length_mla" in keys
    width, window = rng.choice([16, 32, 64]), rng.choice([1, 48, 200, 1000])
    found: list[Keys] = [
        {"attention.sliding_window": window},
        {"attention.sliding_window_pattern": [rng.random() < 0.5 for _ in range(layers)]},
        {"attention.key_length_swa": width, "attention.value_length_swa": width},
        {"attention.indexer.key_length": rng.choice([64, 96, 128])},
        {"attention.indexer.types": [1, *(rng.choice([0, 1]) for _ in range(layers - 1))]},
        {"attention.indexer.kpool": rng.choice([0, 4])},
        {"attention.shared_kv_layers": rng.choice([0, 1, 2])},
        {"full_attention_interval": rng.choice([1, 2, 3, 9])},
        {"attention.recurrent_layers": [rng.random() < 0.5 for _ in range(layers)]},
        {"ssm.conv_kernel": rng.choice([2, 3, 4])},
        {"shortconv.l_cache": rng.choice([2, 3, 5])},
        {"leading_dense_block_count": rng.choice([0, 1, 2])},
    ]
    if not isinstance(keys.get("attention.sliding_window_pattern"), list):
        found.append({"attention.sliding_window_pattern": rng.choice([0, 1, 2, 3, 5])})
    if "attention.compress_ratios" in keys:
        ratios = [rng.choice([0, 4, 128]) for _ in range(layers)]
        found.append({"attention.compress_ratios": ratios})
    if isinstance(n_kv, list):
        heads = [rng.choice([0, max(n_kv)]) for _ in range(layers)]
        found.append({"attention.head_count_kv": heads})
    elif not latent and n_kv != 1:
        heads = [rng.choice([1, 2, 4]) for _ in range(layers)]
        found.append({"attention.head_count_kv": heads})
    return found


def changed(path: Path, rng: random.Random, worker: synth.LlamaWorker) -> ModelShape | None:
    """The model with more layers and a few changes, or None if llama.cpp refuses them."""
    gguf = open_gguf(path)
    prefix = f"{gguf.architecture}."
    layers = gguf.n_layers + rng.choice([0, 1, 3, 5])
    keys = {
        key.removeprefix(prefix): [value[i % len(value)] for i in range(layers)]
        if isinstance(value, list) and len(value) == gguf.n_layers
        else value
        for key, value in gguf.metadata.items()
        if key.startswith(prefix)
    }
    keys["block_count"] = layers
    for change in rng.sample(changes(keys, layers, rng), rng.choice([1, 2, 4])):
        keys |= change
    own = {prefix + key: value for key, value in keys.items()}
    rest = {key: value for key, value in gguf.metadata.items() if not key.startswith(prefix)}
    try:
        tensors = worker.tensors(rest | own)
    except LabkitError:
        return None
    arch = gguf.architecture
    return ModelShape("changed", arch, arch, own, tuple(tensors.items()), f"{arch}, {keys}")


@pytest.mark.parametrize("arch", synth.architectures() if FULL else sorted({*SPECIAL, *ALWAYS}))
def test_changed_metadata(
    arch: str, synth_model: Callable[..., Path], synth_worker: synth.LlamaWorker
) -> None:
    compared = 0
    for seed in range(12):
        rng = random.Random(f"{arch} {seed}")
        shape = changed(synth_model(arch), rng, synth_worker)
        if shape is None:
            continue
        options = CacheOptions(
            rng.choice([256, 512, 2000]), rng.choice([1, 64, 512]), swa_full=rng.random() < 0.3
        )
        try:
            answer = ask_llama(shape, options)
        except LabkitError as error:
            if "cannot be read here" in str(error):
                pytest.skip(str(error))
            continue
        found = sum(rows.nbytes(options) for rows in sheet(shape).known_cache())
        assert found == answer.kv_bytes, (shape.where, options)
        compared += 1
        if compared == (6 if FULL else 1):
            break
    assert compared
