"""`labkit inspect`: what it prints for people and programs, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_bytes import ARRAY, STRING, UINT32, Key, tiny_moe, write_split

from labkit.cli.inspect_text import size, spans
from labkit.gguf_map import open_gguf


def inspect(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from labkit.cli import main; main()", "inspect"]
        + [str(a) for a in arguments],
        capture_output=True,
        text=True,
        env={"COLUMNS": "100", "PATH": "", "NO_COLOR": "1"},
    )


@pytest.fixture
def split_model(tmp_path) -> list[Path]:
    doc = tiny_moe(n_layers=4)
    return write_split(doc, [9, len(doc.tensors) - 9], tmp_path, "model")


def test_expert_as_json_leads_to_its_bytes(split_model):
    done = inspect(split_model[1], "--expert", "2:5", "--json")
    assert done.returncode == 0, done.stderr
    slices = json.loads(done.stdout)
    gguf = open_gguf(split_model[0])
    assert [list(s) for s in slices] == [["projection", "shard", "offset", "nbytes", "type"]] * 3
    assert [s["projection"] for s in slices] == ["gate", "up", "down"]
    assert [(s["shard"], s["offset"], s["nbytes"], s["type"]) for s in slices] == [
        (s.shard, s.offset, s.nbytes, s.type_name) for s in gguf.expert(2, 5)
    ]


def test_model_as_json_lists_every_tensor(split_model):
    done = inspect(split_model[0].parent, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    gguf = open_gguf(split_model[0])
    assert [t["name"] for t in told["tensors"]] == [t.name for t in gguf.tensors]
    assert told["tensors"][3]["shape"] == list(gguf.tensors[3].shape)
    assert [s["path"] for s in told["shards"]] == [str(p) for p in split_model]
    assert told["token_cycle_bytes"] == gguf.token_cycle_bytes
    assert told["entry_bytes"] == {str(il): gguf.entry_bytes(il) for il in gguf.moe_layers}
    assert told["streamable"] is True
    assert sum(r["size_bytes"] for r in told["roles"]) == told["tensor_bytes"] == gguf.nbytes


def test_summary_for_people(split_model):
    done = inspect(split_model[0])
    assert done.returncode == 0, done.stderr
    for words in ("qwen3moe", "2 shards", "1-3 (3 of 4)", "8 a layer, 2 used", "token cycle"):
        assert words in done.stdout
    done = inspect(split_model[0], "--expert", "3:7")
    assert "Expert 7 of layer 3" in done.stdout
    assert str(open_gguf(split_model[0]).expert(3, 7)[2].offset) in done.stdout


def test_dense_unknown_and_unloadable_models_are_still_shown(tmp_path):
    dense = tiny_moe(dense_layers=3).with_keys(
        Key("qwen3moe.expert_count", UINT32, 0), Key("qwen3moe.expert_used_count", UINT32, 0)
    )
    done = inspect(dense.write(tmp_path / "dense.gguf"))
    assert done.returncode == 0
    assert "dense model" in done.stdout
    done = inspect(tmp_path / "dense.gguf", "--expert", "1:1")
    assert done.returncode == 1
    assert "without routed experts" in done.stderr

    odd = tiny_moe()
    odd.tensors[-1].kind, odd.tensors[-1].data = 199, b"\1" * 64
    done = inspect(odd.write(tmp_path / "odd.gguf"))
    assert done.returncode == 0
    assert "type 199" in done.stdout
    assert "Not streamable" in done.stdout

    twice = tiny_moe().with_keys(Key("tokenizer.ggml.tokens", ARRAY, ["a", "a"], STRING))
    done = inspect(twice.write(tmp_path / "twice.gguf"))
    assert done.returncode == 0
    assert "llama.cpp cannot load it" in done.stdout
    assert json.loads(inspect(tmp_path / "twice.gguf", "--json").stdout)["load_problems"]


def test_escape_codes_in_a_file_do_not_reach_the_terminal(tmp_path):
    doc = tiny_moe().with_keys(Key("general.name", STRING, "\x1b]0;owned\x07[red]name"))
    done = inspect(doc.write(tmp_path / "m.gguf"))
    assert "\x1b" not in done.stdout
    assert "?]0;owned?[red]name" in done.stdout


@pytest.mark.parametrize("wrong", ["3", "3:", ":17", "a:b", "3:17:1", "-1:0", "3.0:1", "９:1"])
def test_wrong_use_ends_with_2(tmp_path, wrong):
    done = inspect(tiny_moe().write(tmp_path / "m.gguf"), "--expert", wrong)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("wrong", "words"), [("0:0", "layer 0 has no"), ("1:8", "0 to 7, not 8")])
def test_an_expert_that_the_model_has_not(tmp_path, wrong, words):
    done = inspect(tiny_moe().write(tmp_path / "m.gguf"), "--expert", wrong)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_damaged_file_ends_with_1_and_one_plain_message(tmp_path):
    path = tiny_moe().write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-40])
    done = inspect(path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "the file ends too early" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 B"), (1023, "1023 B"), (8704, "8.5 KiB"), (731136, "714 KiB"), (1 << 40, "1 TiB"),
     (104857600, "100 MiB"), (63 << 30, "63 GiB"), (1023.9 * 2**20, "1024 MiB")],
)  # fmt: skip
def test_sizes_in_words(nbytes, words):
    assert size(nbytes) == words


@pytest.mark.parametrize(
    ("numbers", "words"), [([], ""), ([4], "4"), ([1, 2, 3, 7], "1-3, 7"), ([0, 2, 3], "0, 2-3")]
)
def test_spans(numbers, words):
    assert spans(numbers) == words
