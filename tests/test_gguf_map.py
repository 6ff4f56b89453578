"""The map of well-formed files: tensors, roles, expert slices, shards, tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf_bytes import (
    ARRAY,
    INT32,
    STRING,
    UINT16,
    UINT32,
    GGUFDoc,
    Key,
    Tensor,
    padded,
    parse,
    split,
    tiny_moe,
    write_split,
)

from labkit.architectures import ROLES, parse_expert_tensor, role_of
from labkit.errors import MissingShardError, ModelFileError, NotMoEError
from labkit.gguf_map import LazyArray, open_gguf
from labkit.gguf_map.summary import bytes_by_role, token_bytes


def bytes_at(gguf, part) -> bytes:
    with gguf.paths[part.shard].open("rb") as file:
        file.seek(part.offset)
        return file.read(part.nbytes)


def assert_equals_reader(gguf) -> None:
    """Every tensor's place and every expert slice is what the gguf package reads."""
    readers = [GGUFReader(path) for path in gguf.paths]
    theirs = [
        (t.name, shard, int(t.data_offset), int(t.n_bytes), tuple(map(int, t.shape)))
        for shard, reader in enumerate(readers)
        for t in reader.tensors
    ]
    assert [(t.name, t.shard, t.offset, t.nbytes, t.shape) for t in gguf.tensors] == theirs
    data = {t.name: t.data for reader in readers for t in reader.tensors}
    assert gguf.expert_tensors
    for e in gguf.expert_tensors:
        rows = data[e.tensor.name].reshape(e.n_expert, -1)
        for expert in range(e.n_expert):
            (part,) = [s for s in gguf.expert(e.layer, expert) if s.projection == e.projection]
            assert bytes_at(gguf, part) == rows[expert].tobytes()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("alignment", [32, 64, 4096])
@pytest.mark.parametrize("version", [2, 3])
def test_places_equal_those_of_the_gguf_reader(tmp_path, fused, alignment, version):
    doc = tiny_moe(fused=fused).with_keys(Key("general.alignment", UINT32, alignment))
    doc.alignment, doc.version = alignment, version
    gguf = open_gguf(doc.write(tmp_path / "m.gguf"))
    assert_equals_reader(gguf)
    assert (gguf.version, gguf.alignment) == (version, alignment)
    projections = ["gate_up", "down"] if fused else ["gate", "up", "down"]
    assert [s.projection for s in gguf.expert(1, 3)] == projections
    assert gguf.entry_bytes(1) == 3 * 64 * 32 // 32 * 34


def test_what_the_map_says_of_a_model(tmp_path):
    gguf = open_gguf(tiny_moe(n_layers=4, dense_layers=2).write(tmp_path / "m.gguf"))
    assert gguf.architecture == "qwen3moe"
    assert (gguf.n_layers, gguf.n_expert, gguf.n_expert_used) == (4, 8, 2)
    assert gguf.moe_layers == [2, 3]
    assert gguf.has_tokenizer
    assert gguf.token_cycle_bytes == 2 * 2 * gguf.entry_bytes(2)
    assert gguf.nbytes == gguf.dense_bytes + gguf.expert_bytes
    assert gguf.tensor("token_embd.weight").role == "embedding"
    gguf.require_streamable()
    with pytest.raises(KeyError):
        gguf.tensor("nothing")
    with pytest.raises(KeyError, match=r"layer 0 has no routed experts; MoE layers: \[2, 3\]"):
        gguf.expert(0, 0)
    with pytest.raises(IndexError, match="experts 0 to 7, not 8"):
        gguf.expert(2, 8)
    with pytest.raises(IndexError):
        gguf.expert(2, -1)


def test_tables(tmp_path):
    gguf = open_gguf(tiny_moe().write(tmp_path / "m.gguf"))
    tensors = gguf.tensors_table()
    assert list(tensors["name"]) == [t.name for t in gguf.tensors]
    assert tensors["size_bytes"].sum() == gguf.nbytes
    assert set(tensors["role"]) <= set(ROLES)
    assert tensors.set_index("name").loc["blk.2.ffn_up_exps.weight", "layer"] == 2
    assert tensors["layer"].isna().sum() == 2
    slices = gguf.slices_table()
    assert len(slices) == 2 * 8 * 3
    assert slices["size_bytes"].sum() == gguf.expert_bytes
    row = slices.query("layer == 2 and expert == 5 and projection == 'down'").iloc[0]
    (part,) = [s for s in gguf.expert(2, 5) if s.projection == "down"]
    assert (row["offset_bytes"], row["size_bytes"]) == (part.offset, part.nbytes)


def test_alignment_against_blocks_and_what_direct_reads_add(tmp_path):
    """Case 16: data that is not aligned to 4096 is shown as such, and reads right."""
    gguf = open_gguf(tiny_moe().write(tmp_path / "m.gguf"))
    slices = gguf.slices_table()
    assert (slices["misaligned_bytes"] != 0).any()
    columns = ["offset_bytes", "size_bytes", "misaligned_bytes", "direct_bytes", "over_read_bytes"]
    for offset, size, misaligned, direct, over in slices[columns].to_numpy().tolist():
        blocks = {byte // 4096 for byte in range(offset, offset + size)}
        assert direct == len(blocks) * 4096
        assert over == direct - size
        assert misaligned == offset % 4096
    assert_equals_reader(gguf)


def test_metadata_that_ends_on_an_alignment_boundary(tmp_path):
    """Case 7: no padding is needed, and none is skipped."""
    for extra in range(33):
        doc = tiny_moe().with_keys(Key("general.description", STRING, "x" * extra))
        size = len(doc.header())
        gguf = open_gguf(doc.write(tmp_path / "m.gguf"))
        assert gguf.data_offsets == [padded(size, 32)]
        if size % 32 == 0:
            break
    else:
        pytest.fail("no header ended on a boundary")
    assert gguf.data_offsets == [size]
    assert_equals_reader(gguf)


def test_bytes_by_role_and_by_token(tmp_path):
    doc = tiny_moe(n_vocab=40)
    tied = open_gguf(doc.write(tmp_path / "tied.gguf"))
    doc.tensors.append(Tensor("output.weight", (64, 40), 8))
    untied = open_gguf(doc.write(tmp_path / "untied.gguf"))
    embedding = tied.tensor("token_embd.weight").nbytes
    rows = {r.role: r for r in bytes_by_role(tied)}
    assert sum(r.size_bytes for r in rows.values()) == tied.nbytes
    assert rows["embedding"].token_bytes == embedding
    assert rows["routed expert"].token_bytes == tied.token_cycle_bytes
    assert rows["routed expert"].size_bytes == 4 * tied.token_cycle_bytes  # 2 of 8 experts
    assert token_bytes(tied) == tied.dense_bytes + tied.token_cycle_bytes
    assert token_bytes(untied) == token_bytes(tied) + embedding // 40


def test_layers_of_multi_token_heads_cost_a_token_nothing(tmp_path):
    doc = tiny_moe(n_layers=4).with_keys(Key("qwen3moe.nextn_predict_layers", UINT32, 1))
    gguf = open_gguf(doc.write(tmp_path / "m.gguf"))
    assert gguf.moe_layers == [1, 2, 3]
    assert gguf.token_cycle_bytes == 2 * 2 * gguf.entry_bytes(1)
    head = sum(t.nbytes for t in gguf.tensors if t.name.startswith("blk.3."))
    experts = sum(e.tensor.nbytes for e in gguf.layer_tensors(3))
    assert token_bytes(gguf) == gguf.dense_bytes - (head - experts) + gguf.token_cycle_bytes


def test_experts_used_may_differ_by_layer(tmp_path):
    key = Key("qwen3moe.expert_used_count", ARRAY, [0, 1, 4], UINT32)
    gguf = open_gguf(tiny_moe().with_keys(key).write(tmp_path / "m.gguf"))
    assert gguf.n_expert_used == 4
    assert gguf.token_cycle_bytes == 5 * gguf.entry_bytes(1)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("token_embd.weight", "embedding"),
        ("output.weight", "output"),
        ("output_norm.weight", "norm"),
        ("rope_freqs.weight", "other"),
        ("blk.0.attn_q.weight", "attention"),
        ("blk.0.attn_q_norm.weight", "norm"),
        ("blk.0.ssm_in.weight", "attention"),
        ("blk.0.ffn_up.weight", "dense ffn"),
        ("blk.7.ffn_gate_inp.weight", "router"),
        ("blk.7.exp_probs_b.bias", "router"),
        ("blk.7.ffn_gate_inp_shexp.weight", "shared expert"),
        ("blk.7.ffn_down_shexp.weight", "shared expert"),
        ("blk.17.ffn_down_exps.weight", "routed expert"),
        ("blk.17.ffn_gate_up_exps.weight", "routed expert"),
        ("blk.3.ffn_norm_exps.weight", "norm"),
        ("blk.3.ffn_up_chexps.weight", "dense ffn"),
        ("blk.3.ffn_up_exps.bias", "dense ffn"),
        ("blk.3.ffn_up_exps.scale", "dense ffn"),
    ],
)
def test_roles(name, role):
    assert role_of(name) == role
    assert (parse_expert_tensor(name) is not None) == (role == "routed expert")


@pytest.mark.parametrize(
    "name",
    ["blk.01.ffn_up_exps.weight", "xblk.1.ffn_up_exps.weight", "blk.1.ffn_up_exps.weight2",
     "blk.-1.ffn_up_exps.weight", "blk.1.ffn_up_exps", "blk.١.ffn_up_exps.weight",
     "dec.blk.1.ffn_up_exps.weight", "blk.1.ffn_up_exps.weight\n"],
)  # fmt: skip
def test_expert_names_match_exactly(name):
    assert parse_expert_tensor(name) is None


def test_long_arrays_stay_in_the_file(tmp_path):
    words = [f"wörd{i}" for i in range(3000)]
    keys = [
        Key("tokenizer.ggml.tokens", ARRAY, words, STRING),
        Key("tokenizer.ggml.token_type", ARRAY, list(range(3000)), INT32),
        Key("qwen3moe.short", ARRAY, [1, 2, 3], UINT16),
    ]
    gguf = open_gguf(tiny_moe().with_keys(*keys).write(tmp_path / "m.gguf"))
    tokens, kinds = (
        gguf.metadata["tokenizer.ggml.tokens"],
        gguf.metadata["tokenizer.ggml.token_type"],
    )
    assert isinstance(tokens, LazyArray)
    assert isinstance(kinds, LazyArray)
    assert len(tokens) == len(kinds) == 3000
    assert tokens.read(2998, 50) == words[2998:]
    assert tokens.read(0, 3) == words[:3]
    assert kinds.read(1500, 2) == [1500, 1501]
    assert tokens.read(5000) == []
    assert [t.decode() for t in tokens.read_raw()] == words
    assert gguf.metadata["qwen3moe.short"] == [1, 2, 3]
    assert "3000" in repr(tokens)


def test_a_dense_model_can_be_inspected_but_not_streamed(tmp_path):
    gguf = open_gguf(tiny_moe(dense_layers=3).with_keys(
        Key("qwen3moe.expert_count", UINT32, 0), Key("qwen3moe.expert_used_count", UINT32, 0)
    ).write(tmp_path / "m.gguf"))  # fmt: skip
    assert (gguf.n_expert, gguf.moe_layers, gguf.token_cycle_bytes) == (0, [], 0)
    assert len(gguf.tensors_table()) == len(gguf.tensors)
    assert gguf.slices_table().empty
    with pytest.raises(NotMoEError, match="dense model"):
        gguf.require_streamable()


# --- shards ------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path) -> list[Path]:
    doc = tiny_moe()
    return write_split(doc, [4, 7, len(doc.tensors) - 11], tmp_path, "model")


@pytest.mark.parametrize("opened", [0, 1, 2, None])
def test_a_split_model_is_one_model(tmp_path, shards, opened):
    """Case 9: any shard or the directory opens it; only shard 1 carries the architecture."""
    gguf = open_gguf(tmp_path if opened is None else shards[opened])
    assert gguf.paths == shards
    assert gguf.architecture == "qwen3moe"
    assert {t.shard for t in gguf.tensors} == {0, 1, 2}
    assert_equals_reader(gguf)


def test_shards_behind_symbolic_links(tmp_path, shards):
    """Download caches keep shards as links to files with other names."""
    cache = tmp_path / "snapshot"
    cache.mkdir()
    for i, shard in enumerate(shards):
        blob = tmp_path / f"blob{i}"
        shard.rename(blob)
        (cache / shard.name).symlink_to(blob)
    assert len(open_gguf(cache).paths) == 3


def test_missing_shards_are_named(shards):
    """Case 11."""
    shards[1].unlink()
    with pytest.raises(MissingShardError, match=r"model-00002-of-00003\.gguf"):
        open_gguf(shards[2])
    shards[0].unlink()
    with pytest.raises(MissingShardError, match=r"model-00001-of-00003\.gguf, model-00002"):
        open_gguf(shards[2])


def test_a_set_of_one_is_whole(tmp_path):
    """Case 11: ``-00001-of-00001``, with and without split keys."""
    doc = tiny_moe()
    name = "m-00001-of-00001.gguf"
    assert len(open_gguf(doc.write(tmp_path / name)).paths) == 1
    (single,) = split(doc, [len(doc.tensors)])
    assert len(open_gguf(single.write(tmp_path / name)).paths) == 1
    assert len(open_gguf(tmp_path).paths) == 1


def test_a_renamed_shard_is_explained(tmp_path, shards):
    lone = shards[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match="one of 3 shards, so its name must end"):
        open_gguf(lone)


def test_swapped_shards_are_noticed(tmp_path, shards):
    spare = tmp_path / "spare"
    shards[1].rename(spare)
    shards[2].rename(shards[1])
    spare.rename(shards[2])
    with pytest.raises(ModelFileError, match="named shard 2 but its header says shard 3"):
        open_gguf(shards[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Key("split.count", UINT16, 4), "says that the model has 4 shards"),
        (Key("split.count", UINT32, 3), "split.count is of type UINT32"),
        (Key("split.no", UINT32, 1), "split.no is of type UINT32"),
        (Key("split.no", UINT16, 0), "header says shard 1"),
    ],
)
def test_inconsistent_shards(tmp_path, shards, change, message):
    parse(shards[1].read_bytes()).with_keys(change).write(shards[1])
    with pytest.raises(ModelFileError, match=message):
        open_gguf(shards[0])


def test_shards_with_other_tensors(tmp_path, shards):
    doc = parse(shards[1].read_bytes())
    doc.tensors.pop()
    doc.write(shards[1])
    with pytest.raises(ModelFileError, match="declares 19 tensors over all shards, but they hold"):
        open_gguf(tmp_path)
    doc.tensors.append(parse(shards[0].read_bytes()).tensors[0])
    doc.write(shards[1])
    with pytest.raises(ModelFileError, match=r"'token_embd\.weight' is also in model-00001"):
        open_gguf(tmp_path)


def test_a_directory_of_several_models_lists_them(tmp_path, shards):
    tiny_moe().write(tmp_path / "other.gguf")
    with pytest.raises(
        ModelFileError, match=r"holds 2 models.*model-00001-of-00003\.gguf, other\.gguf"
    ):
        open_gguf(tmp_path)


def test_a_vision_projector_beside_a_model_is_passed_over(tmp_path, shards):
    GGUFDoc([Key("general.architecture", STRING, "clip")]).write(tmp_path / "mmproj-F16.gguf")
    assert open_gguf(tmp_path).paths == shards


def test_opening_does_not_read_tensor_data(tmp_path):
    """A sparse file of 40 GB opens with a handful of small reads."""
    doc = tiny_moe(n_layers=2)
    doc.tensors.append(Tensor("blk.1.ffn_up_chexps.weight", (2**20, 10_000), data=b""))
    path = tmp_path / "sparse.gguf"
    doc.write(path)
    end = path.stat().st_size
    os.truncate(path, end + 4 * 2**20 * 10_000)
    gguf = open_gguf(path)
    assert gguf.tensors[-1].nbytes == 4 * 2**20 * 10_000
    assert path.stat().st_blocks * 512 < 1 << 20


def test_opening_needs_neither_pandas_nor_llama(tmp_path):
    path = tiny_moe().write(tmp_path / "m.gguf")
    code = (
        "import sys; from labkit.gguf_map import open_gguf; open_gguf(sys.argv[1]);"
        "assert not {'pandas', 'llama_cpp', 'altair'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_offsets_beyond_four_gib_stay_exact(tmp_path):
    big = Tensor("blk.0.ffn_gate_exps.weight", (4096, 4096, 128), data=b"")
    doc = GGUFDoc(tiny_moe(n_expert=128).keys, [big])
    path = doc.write(tmp_path / "m.gguf")
    start = path.stat().st_size
    os.truncate(path, start + 4096 * 4096 * 128 * 4)
    gguf = open_gguf(path)
    (part,) = gguf.expert(0, 127)
    assert part.offset == start + 127 * 4096 * 4096 * 4 > 2**32
    assert gguf.slices_table()["offset_bytes"].dtype == np.int64
    assert gguf.slices_table()["offset_bytes"].iloc[-1] == part.offset
