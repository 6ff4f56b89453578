"""Files that are no model, damaged, or made to do harm: each is refused in words, at once."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_bytes import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
    GGUFDoc,
    Key,
    Tensor,
    tiny_moe,
)

from labkit.errors import (
    ModelFileError,
    NotAModelError,
    NotMoEError,
    StreamingRefusedError,
    TruncatedFileError,
)
from labkit.gguf_map import open_gguf

HERE = Path(__file__).parent


def refuse(path: Path, message: str, kind: type[ModelFileError] = ModelFileError) -> str:
    with pytest.raises(kind, match=message) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def with_raw_key(name: str, kind: int, raw: bytes) -> GGUFDoc:
    doc = tiny_moe()
    doc.keys.append(Key(name, kind, raw=raw))
    return doc


# --- case 1: lengths that lie --------------------------------------------------------------------


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, 10**6])
@pytest.mark.parametrize("element", [UINT8, UINT64, STRING, FLOAT32])
def test_an_array_longer_than_the_file(tmp_path, length, element):
    keys = [Key("a", ARRAY, raw=struct.pack("<IQ", element, length))]
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUFDoc(keys).header())
    assert path.stat().st_size < 50
    refuse(path, "the array of key 'a'.*needs .* bytes, but only", TruncatedFileError)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, 10**6])
def test_strings_longer_than_the_file(tmp_path, length):
    huge = struct.pack("<Q", length)
    refuse(with_raw_key("k", STRING, huge).write(tmp_path / "v"), "value of key 'k'|needs .* bytes")
    many = struct.pack("<IQ", STRING, 100) + huge
    refuse(with_raw_key("k", ARRAY, many).write(tmp_path / "a"), "key 'k'")
    doc = tiny_moe()
    doc.keys = []
    raw = bytearray(doc.to_bytes())
    raw[24:32] = huge
    (tmp_path / "t").write_bytes(raw)
    refuse(tmp_path / "t", "name of tensor 0")


@pytest.mark.parametrize("count", [2**63, 2**64 - 1, 2**32, 10_000])
@pytest.mark.parametrize("field", ["n_keys", "n_tensors"])
def test_counts_beyond_the_file(tmp_path, count, field):
    doc = tiny_moe()
    setattr(doc, field, count)
    refuse(doc.write(tmp_path / "m.gguf"), f"declares {count} (tensors|metadata keys)")


def test_sparse_zeros_do_not_keep_the_reader_busy(tmp_path):
    """A 64 GB hole read as empty strings, keys, or numbers would take minutes."""
    for element in (STRING, UINT8):
        keys = [Key("a", ARRAY, raw=struct.pack("<IQ", element, 2**30))]
        path = GGUFDoc(keys).write(tmp_path / f"{element}.gguf")
        os.truncate(path, 64 << 30)
        refuse(path, "no model needs that (much|many)")


def test_metadata_of_unreasonable_size(tmp_path):
    doc = tiny_moe()
    doc.keys += [Key(f"k{i}", STRING, "x" * (1 << 20)) for i in range(17)]
    refuse(doc.write(tmp_path / "m.gguf"), "metadata is larger than 16 MiB")


def test_nested_arrays(tmp_path):
    nested = struct.pack("<IQ", ARRAY, 1) * 3000
    refuse(with_raw_key("k", ARRAY, nested).write(tmp_path / "m"), "'k'.*array of arrays")


@pytest.mark.parametrize("kind", [13, 99, 2**32 - 1])
def test_unknown_value_types(tmp_path, kind):
    refuse(with_raw_key("k", kind, b"\0" * 8).write(tmp_path / "v"), f"'k'.*unknown type {kind}")
    raw = struct.pack("<IQ", kind, 1) + b"\0" * 8
    refuse(with_raw_key("k", ARRAY, raw).write(tmp_path / "a"), f"'k'.*unknown type {kind}")


# --- case 2 and other tensor lists ---------------------------------------------------------------


@pytest.mark.parametrize("n_dims", [5, 1_000_000, 2**32 - 1])
def test_too_many_dimensions(tmp_path, n_dims):
    doc = tiny_moe()
    doc.tensors[3].n_dims = n_dims
    refuse(doc.write(tmp_path / "m"), f"'{doc.tensors[3].name}'.*has {n_dims} dimensions")


@pytest.mark.parametrize("shape", [(2**32, 2**32), (2**33, 2**31, 2), (2**62, 4), (2**63, 2, 1, 1)])
def test_products_that_wrap_64_bits(tmp_path, shape):
    doc = tiny_moe()
    doc.tensors.append(Tensor("blk.2.evil.weight", shape, data=b""))
    refuse(doc.write(tmp_path / "m"), r"'blk\.2\.evil\.weight'.*more than 64 bits can count")


def test_products_below_64_bits_are_held_against_the_file(tmp_path):
    doc = tiny_moe()
    doc.tensors.append(Tensor("blk.2.big.weight", (2**40, 2**22), data=b""))
    message = refuse(doc.write(tmp_path / "m"), r"'blk\.2\.big\.weight'", TruncatedFileError)
    assert str(2**64) in message or "bytes of it are missing" in message


def test_empty_dimensions(tmp_path):
    doc = tiny_moe()
    doc.tensors.append(Tensor("x", (0, 5), data=b""))
    refuse(doc.write(tmp_path / "m"), "'x'.*dimension of 0")


def test_rows_that_no_block_fits(tmp_path):
    doc = tiny_moe()
    doc.tensors.append(Tensor("x", (33, 5), 8, data=b"\0" * 256))
    refuse(doc.write(tmp_path / "m"), "'x' of type Q8_0 has rows of 33 elements")


def test_repeated_names(tmp_path):
    doc = tiny_moe()
    doc.tensors.append(Tensor("output_norm.weight", (64,)))
    refuse(doc.write(tmp_path / "t"), r"'output_norm\.weight' is listed twice")
    doc = tiny_moe()
    doc.keys.append(Key("general.architecture", STRING, "llama"))
    refuse(doc.write(tmp_path / "k"), r"'general\.architecture' appears twice")


@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "\x1b[31mred"])
def test_names_that_are_no_text(tmp_path, name):
    doc = tiny_moe()
    doc.tensors.append(Tensor(name, (64,)))
    refuse(doc.write(tmp_path / "t"), "name of tensor 19 at offset .* is empty or no printable")


def test_names_of_more_than_63_bytes(tmp_path):
    doc = tiny_moe()
    doc.tensors.append(Tensor("n" * 63, (64,)))
    open_gguf(doc.write(tmp_path / "m"))
    doc.tensors[-1].name += "n"
    refuse(doc.write(tmp_path / "m"), "name of tensor 19 .*declares 64 bytes")


@pytest.mark.parametrize("shift", [-32, 32, 1, 2**63])
def test_tensors_that_overlap_or_leave_gaps(tmp_path, shift):
    doc = tiny_moe()
    doc.tensors[5].offset = sum(-(-t.nbytes // 32) * 32 for t in doc.tensors[:5]) + shift
    refuse(doc.write(tmp_path / "m"), f"'{doc.tensors[5].name}' begins at offset")


def test_expert_tensors_of_the_wrong_shape(tmp_path):
    doc = tiny_moe()
    doc.tensors.append(Tensor("blk.9.ffn_up_exps.weight", (64, 32)))
    refuse(doc.write(tmp_path / "m"), r"'blk\.9\.ffn_up_exps\.weight' has the shape \(64, 32\)")


def test_projections_that_disagree_on_the_number_of_experts(tmp_path):
    doc = tiny_moe()
    tensor = next(t for t in doc.tensors if t.name == "blk.1.ffn_up_exps.weight")
    tensor.shape = (64, 32, 5)
    refuse(doc.write(tmp_path / "m"), r"layer 1 has 8 experts in '.*gate_exps.*' but 5 in '.*up_")


# --- case 4: files cut short ---------------------------------------------------------------------


def test_a_file_cut_40_bytes_short_names_tensor_layer_and_expert(tmp_path):
    doc = tiny_moe(shared=False)
    path = doc.write(tmp_path / "m.gguf")
    os.truncate(path, path.stat().st_size - 40)
    message = refuse(path, "ends too early", TruncatedFileError)
    assert "tensor 'blk.2.ffn_down_exps.weight'" in message
    assert "layer 2, down projection" in message
    assert "first expert cut is 7" in message
    assert "40 bytes of it are missing" in message


def test_the_first_tensor_and_expert_that_do_not_fit_are_named(tmp_path):
    gguf = open_gguf(tiny_moe().write(tmp_path / "m.gguf"))
    up = gguf.layer_tensors(1)[1]
    os.truncate(gguf.paths[0], up.tensor.offset + 3 * up.slice_bytes + 1)
    message = refuse(gguf.paths[0], "ends too early", TruncatedFileError)
    assert f"'{up.tensor.name}'" in message
    assert "first expert cut is 3" in message


def test_every_cut_is_noticed(tmp_path):
    """All lengths of a small file, header and data alike; only the last one is whole."""
    doc = tiny_moe(n_layers=1, dense_layers=0, n_expert=2, n_vocab=2, shared=False)
    raw = doc.to_bytes()
    path = tmp_path / "m.gguf"
    for size in [*range(len(doc.header()) + 70), *range(len(raw) - 70, len(raw))]:
        path.write_bytes(raw[:size])
        with pytest.raises((TruncatedFileError, NotAModelError, ModelFileError)):
            open_gguf(path)
    path.write_bytes(raw)
    open_gguf(path)


# --- case 6: alignment ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 1, 4, 24, 48, 33, 2**32 - 1])
def test_alignments_against_the_rule(tmp_path, value):
    doc = tiny_moe().with_keys(Key("general.alignment", UINT32, value))
    refuse(doc.write(tmp_path / "m"), f"general.alignment is {value}; it must be .*power of two")


@pytest.mark.parametrize(
    "key",
    [
        Key("general.alignment", UINT64, 32),
        Key("general.alignment", INT32, 32),
        Key("general.alignment", UINT16, 32),
        Key("general.alignment", STRING, "32"),
        Key("general.alignment", BOOL, True),
        Key("general.alignment", ARRAY, [32], UINT32),
    ],
)
def test_alignments_of_another_type(tmp_path, key):
    doc = tiny_moe().with_keys(key)
    refuse(doc.write(tmp_path / "m"), "general.alignment is of type .*must be a UINT32")


def test_alignments_that_llama_cpp_cannot_map(tmp_path):
    """8 and 16 are allowed by GGUF, but mapped tensors must start at multiples of 32."""
    docs = [
        tiny_moe().with_keys(
            Key("general.alignment", UINT32, 8), Key("general.description", STRING, "x" * padding)
        )
        for padding in (0, 8)
    ]
    doc = next(d for d in docs if -(-len(d.header()) // 8) * 8 % 32)
    doc.alignment = 8
    refuse(doc.write(tmp_path / "m"), "not a multiple of 32")


# --- case 8: versions and byte order -------------------------------------------------------------


def test_big_endian_files(tmp_path):
    doc = tiny_moe()
    doc.order = ">"
    refuse(doc.write(tmp_path / "m"), r"big-endian GGUF file \(version 3\)")


@pytest.mark.parametrize("version", [0, 1, 4, 65535, 65537])
def test_other_versions(tmp_path, version):
    doc = tiny_moe()
    doc.version = version
    refuse(doc.write(tmp_path / "m"), f"GGUF version {version}")


# --- case 12: unknown types ----------------------------------------------------------------------


def test_an_unknown_type_is_listed_and_streaming_refused(tmp_path):
    doc = tiny_moe()
    odd = doc.tensors[7]
    odd.data, odd.kind = b"\1" * 1000, 199
    gguf = open_gguf(doc.write(tmp_path / "m.gguf"))
    tensor = gguf.tensor(odd.name)
    assert (tensor.type_name, tensor.type_known) == ("unknown (199)", False)
    assert tensor.nbytes == 1024
    assert len(gguf.tensors) == len(doc.tensors)
    assert gguf.tensors[8].offset == tensor.offset + 1024
    with pytest.raises(StreamingRefusedError, match=f"'{odd.name}' has type 199"):
        gguf.require_streamable()


def test_an_unknown_type_at_the_end(tmp_path):
    doc = tiny_moe()
    doc.tensors.append(Tensor("last", (7,), 199, data=b"\1" * 50))
    gguf = open_gguf(doc.write(tmp_path / "m.gguf"))
    assert gguf.tensors[-1].nbytes == 50


def test_what_keeps_a_moe_from_being_streamed(tmp_path):
    doc = tiny_moe(n_expert=8).with_keys(Key("qwen3moe.expert_count", UINT32, 9))
    with pytest.raises(StreamingRefusedError, match="holds 8 experts, but the model declares 9"):
        open_gguf(doc.write(tmp_path / "m")).require_streamable()


# --- case 15: five other things that a path can be -----------------------------------------------


def not_models(directory: Path) -> dict[str, Path]:
    """One path for each kind of thing that is no model."""
    (directory / "empty.gguf").write_bytes(b"")
    (directory / "lfs.gguf").write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    )
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "m.bin").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    (directory / "folder").mkdir()
    (directory / "page.gguf").write_text("<!DOCTYPE html><html></html>")
    (directory / "x.zip").write_bytes(b"PK\x03\x04" + b"\0" * 60)
    (directory / "short.gguf").write_bytes(b"GGUF\3\0\0\0")
    (directory / "other").write_bytes(b"ELF" * 40)
    return {
        "the file is empty": directory / "empty.gguf",
        "Git-LFS pointer": directory / "lfs.gguf",
        "safetensors": directory / "m.bin",
        "without any .gguf": directory / "folder",
        "text": directory / "page.gguf",
        "zip archive": directory / "x.zip",
        "only 8 bytes": directory / "short.gguf",
        "not a GGUF file": directory / "other",
        "no such file": directory / "nowhere.gguf",
    }


def test_things_that_are_no_model_have_messages_of_their_own(tmp_path):
    messages = [refuse(p, m, NotAModelError) for m, p in not_models(tmp_path).items()]
    dense = tiny_moe(dense_layers=3).with_keys(
        Key("qwen3moe.expert_count", UINT32, 0), Key("qwen3moe.expert_used_count", UINT32, 0)
    )
    with pytest.raises(NotMoEError) as caught:
        open_gguf(dense.write(tmp_path / "dense.gguf")).require_streamable()
    messages.append(str(caught.value))
    texts = {m.split(": ", 1)[1] for m in messages}
    assert len(texts) == len(messages)


def test_paths_that_no_file_can_have(tmp_path):
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(ModelFileError):
            open_gguf(tmp_path / name)


def test_a_directory_hints_at_a_subdirectory(tmp_path):
    (tmp_path / "Q4_K_M").mkdir()
    tiny_moe().write(tmp_path / "Q4_K_M" / "m.gguf")
    refuse(tmp_path, "Perhaps .*Q4_K_M is meant", NotAModelError)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    refuse(tmp_path / "pipe.gguf", "not a regular file", NotAModelError)


def test_gguf_files_that_are_no_language_model(tmp_path):
    doc = tiny_moe()
    doc.keys = [k for k in doc.keys if k.name != "general.architecture"]
    refuse(doc.write(tmp_path / "m"), "no general.architecture")
    for value in (Key("general.architecture", UINT32, 5), Key("general.architecture", STRING, "")):
        refuse(tiny_moe().with_keys(value).write(tmp_path / "m"), "no general.architecture")


@pytest.mark.parametrize(
    "key",
    [
        Key("qwen3moe.block_count", STRING, "3"),
        Key("qwen3moe.block_count", INT32, -3),
        Key("qwen3moe.expert_count", FLOAT32, 8.0),
        Key("qwen3moe.expert_used_count", ARRAY, [], UINT32),
    ],
)
def test_counts_that_are_none(tmp_path, key):
    refuse(tiny_moe().with_keys(key).write(tmp_path / "m"), f"{key.name} is .*must be a count")


def test_a_vocabulary_that_repeats_a_token(tmp_path):
    """llama.cpp asserts that tokens are distinct, as C strings."""
    words = [f"t{i}" for i in range(100)]
    for word in ("t3", "t3\0x"):
        key = Key("tokenizer.ggml.tokens", ARRAY, [*words, word], STRING)
        path = tiny_moe().with_keys(key).write(tmp_path / "m")
        refuse(path, r"the token 't3' twice \(again as token 100\)")
        assert open_gguf(path, inspect_only=True).load_problems()


def fuzz(*options: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(HERE / "fuzz_gguf_map.py"), *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_damaged_files_end_in_an_error_or_a_right_answer():
    """``LABKIT_FUZZ_COUNT`` sets the number of mutants (20,000 were run by hand)."""
    count = int(os.environ.get("LABKIT_FUZZ_COUNT", "600"))
    seed = os.environ.get("LABKIT_FUZZ_SEED", "1")
    result = fuzz("--count", str(count), "--seed", seed)
    assert sum(result["outcomes"].values()) == count
    assert result["outcomes"]["accepted"] > count // 100
    assert result["slowest_cpu_s"] < 1
    assert not result["peak_mib"] > 200
