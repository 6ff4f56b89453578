"""Write GGUF files by hand for tests: valid ones, and ones that break a rule on purpose.

`GGUFDoc` is an editable model of a file. `to_bytes` lays it out by the rules unless a field says
otherwise, so that a test changes the one thing that it is about.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = (
    range(13)
)
FORMATS = dict(enumerate("BbHhIif?..Qqd"))
F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8
BLOCKS = {F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q8_0: (32, 34)}


@dataclass
class Key:
    """A metadata key. ``element`` is the element type of an array; ``raw`` replaces its value."""

    name: str
    kind: int
    value: object = None
    element: int | None = None
    raw: bytes | None = None

    def to_bytes(self, order: str = "<") -> bytes:
        """The key as it stands in a file."""
        head = text(self.name, order) + struct.pack(order + "I", self.kind)
        if self.raw is not None:
            return head + self.raw
        if self.kind != ARRAY:
            return head + scalar(self.kind, self.value, order)
        assert isinstance(self.value, list)
        assert self.element is not None
        head += struct.pack(order + "IQ", self.element, len(self.value))
        if self.element not in (STRING, ARRAY):
            code = FORMATS[self.element]
            return head + struct.pack(f"{order}{len(self.value)}{code}", *self.value)
        return head + b"".join(scalar(self.element, v, order) for v in self.value)


@dataclass
class Tensor:
    """A tensor. ``offset`` and ``n_dims`` replace what the rules give; ``data`` may be missing."""

    name: str
    shape: tuple[int, ...]
    kind: int = F32
    data: bytes | None = None
    offset: int | None = None
    n_dims: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the data by the rules of ggml."""
        if self.data is not None:
            return len(self.data)
        block, size = BLOCKS[self.kind]
        elements = 1
        for dim in self.shape:
            elements *= dim
        return elements // block * size


@dataclass
class GGUFDoc:
    """A GGUF file to be written."""

    keys: list[Key] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    version: int = 3
    order: str = "<"
    alignment: int = 32
    n_keys: int | None = None
    n_tensors: int | None = None

    def header(self) -> bytes:
        """Everything before the padding and the data section."""
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        out = b"GGUF" + struct.pack(self.order + "IQQ", self.version, n_tensors, n_keys)
        out += b"".join(key.to_bytes(self.order) for key in self.keys)
        offset = 0
        for tensor in self.tensors:
            n_dims = len(tensor.shape) if tensor.n_dims is None else tensor.n_dims
            out += text(tensor.name, self.order) + struct.pack(self.order + "I", n_dims)
            out += struct.pack(f"{self.order}{len(tensor.shape)}Q", *tensor.shape)
            at = offset if tensor.offset is None else tensor.offset
            out += struct.pack(self.order + "IQ", tensor.kind, at)
            offset = padded(offset + tensor.nbytes, self.alignment)
        return out

    def to_bytes(self) -> bytes:
        """The file. Data that is not given is a pattern that differs from block to block."""
        header = self.header()
        out = bytearray(header.ljust(padded(len(header), self.alignment), b"\0"))
        start = len(out)
        for tensor in self.tensors:
            out += bytes(padded(len(out) - start, self.alignment) - (len(out) - start))
            out += pattern(tensor) if tensor.data is None else tensor.data
        return bytes(out)

    def write(self, path: Path) -> Path:
        """Write the file and return its path."""
        path.write_bytes(self.to_bytes())
        return path

    def with_keys(self, *changed: Key) -> GGUFDoc:
        """A copy in which keys of these names are replaced or added."""
        names = {key.name for key in changed}
        return replace(self, keys=[k for k in self.keys if k.name not in names] + list(changed))


def text(value: str | bytes, order: str = "<") -> bytes:
    """A length-prefixed string."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack(order + "Q", len(raw)) + raw


def scalar(kind: int, value: object, order: str = "<") -> bytes:
    """One metadata value."""
    if kind == STRING:
        assert isinstance(value, str | bytes)
        return text(value, order)
    return struct.pack(order + FORMATS[kind], value)


def padded(value: int, alignment: int) -> int:
    """``value`` rounded up to the alignment."""
    return -(-value // alignment) * alignment if alignment > 0 else value


def pattern(tensor: Tensor) -> bytes:
    """Data that tells its place: little-endian 32-bit counters salted with the tensor's name."""
    salt = sum(tensor.name.encode()) << 20
    words = struct.pack(
        f"<{-(-tensor.nbytes // 4)}I",
        *((salt + i) & 0xFFFFFFFF for i in range(-(-tensor.nbytes // 4))),
    )
    return words[: tensor.nbytes]


def tiny_moe(
    arch: str = "qwen3moe",
    *,
    n_layers: int = 3,
    n_expert: int = 8,
    n_used: int = 2,
    kind: int = Q8_0,
    fused: bool = False,
    shared: bool = True,
    dense_layers: int = 1,
    n_vocab: int = 40,
) -> GGUFDoc:
    """A small MoE with leading dense layers and a shared expert; not meant to run."""
    d, ff = 64, 32
    keys = [
        Key("general.architecture", STRING, arch),
        Key(f"{arch}.block_count", UINT32, n_layers),
        Key(f"{arch}.context_length", UINT32, 128),
        Key(f"{arch}.embedding_length", UINT32, d),
        Key(f"{arch}.feed_forward_length", UINT32, ff),
        Key(f"{arch}.expert_count", UINT32, n_expert),
        Key(f"{arch}.expert_used_count", UINT32, n_used),
        Key("tokenizer.ggml.model", STRING, "gpt2"),
        Key("tokenizer.ggml.tokens", ARRAY, [f"t{i}" for i in range(n_vocab)], STRING),
        Key("tokenizer.ggml.merges", ARRAY, ["t 1"], STRING),
        Key("tokenizer.ggml.scores", ARRAY, [0.5] * n_vocab, FLOAT32),
    ]
    tensors = [Tensor("token_embd.weight", (d, n_vocab), kind), Tensor("output_norm.weight", (d,))]
    for il in range(n_layers):
        tensors += [
            Tensor(f"blk.{il}.attn_norm.weight", (d,)),
            Tensor(f"blk.{il}.attn_q.weight", (d, d), kind),
        ]
        if il < dense_layers:
            tensors.append(Tensor(f"blk.{il}.ffn_up.weight", (d, ff), kind))
            continue
        tensors.append(Tensor(f"blk.{il}.ffn_gate_inp.weight", (d, n_expert)))
        if fused:
            tensors.append(Tensor(f"blk.{il}.ffn_gate_up_exps.weight", (d, 2 * ff, n_expert), kind))
        else:
            tensors.append(Tensor(f"blk.{il}.ffn_gate_exps.weight", (d, ff, n_expert), kind))
            tensors.append(Tensor(f"blk.{il}.ffn_up_exps.weight", (d, ff, n_expert), kind))
        tensors.append(Tensor(f"blk.{il}.ffn_down_exps.weight", (ff, d, n_expert), kind))
        if shared:
            tensors.append(Tensor(f"blk.{il}.ffn_up_shexp.weight", (d, ff), kind))
    return GGUFDoc(keys, tensors)


def split(doc: GGUFDoc, counts: list[int]) -> list[GGUFDoc]:
    """Split a model as llama.cpp does: the first shard alone carries the model's metadata."""
    shards, start = [], 0
    total = len(doc.tensors)
    assert sum(counts) == total
    for number, count in enumerate(counts):
        own = [
            Key("split.no", UINT16, number),
            Key("split.count", UINT16, len(counts)),
            Key("split.tensors.count", INT32, total),
        ]
        keys = (doc.keys if number == 0 else []) + own
        shards.append(replace(doc, keys=keys, tensors=doc.tensors[start : start + count]))
        start += count
    return shards


def write_split(doc: GGUFDoc, counts: list[int], directory: Path, prefix: str) -> list[Path]:
    """Write a split model under the names that llama.cpp expects."""
    shards = split(doc, counts)
    return [
        shard.write(directory / f"{prefix}-{i:05d}-of-{len(shards):05d}.gguf")
        for i, shard in enumerate(shards, 1)
    ]


def parse(raw: bytes) -> GGUFDoc:
    """Read a small valid little-endian file back into a document (keys keep their raw value)."""
    pos = 24

    def take(layout: str) -> tuple:
        nonlocal pos
        values = struct.unpack_from("<" + layout, raw, pos)
        pos += struct.calcsize("<" + layout)
        return values

    def string() -> str:
        nonlocal pos
        (length,) = take("Q")
        pos += length
        return raw[pos - length : pos].decode()

    _, version, n_tensors, n_keys = struct.unpack_from("<4sIQQ", raw)
    doc = GGUFDoc(version=version)
    for _ in range(n_keys):
        name = string()
        (kind,) = take("I")
        if kind == ARRAY:
            element, count = take("IQ")
            if element == STRING:
                value: object = [string() for _ in range(count)]
            else:
                value = list(take(f"{count}{FORMATS[element]}"))
            doc.keys.append(Key(name, kind, value, element))
        else:
            value = string() if kind == STRING else take(FORMATS[kind])[0]
            doc.keys.append(Key(name, kind, value))
        if name == "general.alignment":
            assert isinstance(value, int)
            doc.alignment = value
    offsets = []
    for _ in range(n_tensors):
        name = string()
        (n_dims,) = take("I")
        shape = take(f"{n_dims}Q")
        kind, offset = take("IQ")
        doc.tensors.append(Tensor(name, shape, kind))
        offsets.append(offset)
    start = padded(pos, doc.alignment)
    for tensor, offset in zip(doc.tensors, offsets, strict=True):
        nbytes = tensor.nbytes
        tensor.data = raw[start + offset : start + offset + nbytes]
    return doc
