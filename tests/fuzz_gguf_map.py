"""Throw damaged GGUF files at `open_gguf`; the test runs a few hundred, a person many.

    python tests/fuzz_gguf_map.py --count 20000 --seed 7

Every mutant must end in labkit's own error or in a right answer: where the file is accepted, the
tensors (name, offset, bytes, shape) and every expert slice must be those of the gguf package's own
reader. Prints one JSON object; exit code 1 and the mutant's path if one of that fails.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from gguf import GGUFReader
from gguf_bytes import ARRAY, FLOAT64, STRING, UINT8, UINT32, GGUFDoc, Key, split, tiny_moe

from labkit.errors import LabkitError
from labkit.gguf_map import GGUFMap, open_gguf

EDGES_32 = [0, 1, 2, 4, 5, 8, 9, 13, 31, 199, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
EDGES_64 = [0, 1, 2, 7, 32, 2**16, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def bases() -> list[GGUFDoc]:
    """Small valid files that differ in layout."""
    odd = tiny_moe(n_layers=2).with_keys(
        Key("general.alignment", UINT32, 64),
        Key("general.tags", ARRAY, ["a", "bc", ""], STRING),
        Key("x.bytes", ARRAY, list(range(200)), UINT8),
        Key("x.double", FLOAT64, 0.25),
    )
    odd.alignment = 64
    old = tiny_moe(n_layers=2, fused=True, shared=False)
    old.version = 2
    single = split(tiny_moe(n_layers=2, n_vocab=90), [len(tiny_moe(n_layers=2).tensors)])[0]
    return [tiny_moe(), odd, old, single]


def mutate(raw: bytes, header: int, rng: random.Random) -> bytes:
    """Damage a file in one to three places, mostly in its header."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(header, max(len(data) - 8, 1)))
        kind = rng.randrange(9)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            data[at : at + 4] = struct.pack("<I", rng.choice(EDGES_32))
        elif kind == 3:
            data[at : at + 8] = struct.pack("<Q", rng.choice(EDGES_64))
        elif kind == 4:
            del data[at : at + rng.choice([1, 4, 8, 40])]
        elif kind == 5:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice([1, 4, 8, 32])))
        elif kind == 6:
            del data[rng.randrange(len(data)) :]
        elif kind == 7:
            other = rng.randrange(min(header, len(data)))
            length = rng.choice([4, 8, 24])
            data[at : at + length] = data[other : other + length]
        else:
            _change_number(data, header, rng)
        if len(data) < 2:
            break
    return bytes(data)


def _change_number(data: bytearray, header: int, rng: random.Random) -> None:
    """Nudge a small 64-bit number of the header: most are lengths, dimensions and offsets."""
    limit = min(header, len(data) - 8)
    found = [at for at in range(limit) if 0 < struct.unpack_from("<Q", data, at)[0] < 1 << 20]
    if found:
        at = rng.choice(found)
        value = struct.unpack_from("<Q", data, at)[0] + rng.choice([-1, 1, 31, 32, 64])
        data[at : at + 8] = struct.pack("<Q", max(value, 0))


def check_answer(path: Path, gguf: GGUFMap) -> str:
    """Compare an accepted file with the gguf package's reader; AssertionError on a difference."""
    if any(not t.type_known for t in gguf.tensors):
        return "accepted, unknown type"
    try:
        reader = GGUFReader(path)
    except (ValueError, KeyError, UnicodeDecodeError, IndexError, OverflowError) as error:
        return f"accepted, gguf's reader fails ({type(error).__name__})"
    theirs = [
        (t.name, int(t.data_offset), int(t.n_bytes), tuple(int(d) for d in t.shape))
        for t in reader.tensors
    ]
    ours = [(t.name, t.offset, t.nbytes, t.shape) for t in gguf.tensors]
    assert ours == theirs
    raw = path.read_bytes()
    by_name = {t.name: t for t in reader.tensors}
    for e in gguf.expert_tensors:
        data = by_name[e.tensor.name].data
        for expert in {0, e.n_expert - 1}:
            (part,) = [s for s in gguf.expert(e.layer, expert) if s.projection == e.projection]
            own = raw[part.offset : part.offset + part.nbytes]
            assert own == data.reshape(e.n_expert, -1)[expert].tobytes()
    return "accepted"


def peak_mib() -> float:
    """Peak resident memory of this process in MiB, or NaN where the system does not tell."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage counts the parent's memory from before exec on Linux
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) / 1024
    try:
        import resource
    except ImportError:
        return float("nan")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2  # bytes on macOS


def run(count: int, seed: int, directory: Path) -> dict[str, object]:
    """Try ``count`` mutants and return what came of them."""
    rng = random.Random(seed)
    files = [(doc.to_bytes(), len(doc.header())) for doc in bases()]
    outcomes: Counter[str] = Counter()
    slowest_cpu_s = 0.0
    path = directory / "mutant.gguf"
    for raw, _ in files:
        path.write_bytes(raw)
        assert check_answer(path, open_gguf(path)) == "accepted"
    for _ in range(count):
        raw, header = rng.choice(files)
        path.write_bytes(mutate(raw, header, rng))
        start = time.process_time()
        try:
            gguf = open_gguf(path)
        except LabkitError as error:
            outcomes[type(error).__name__ if str(error) else "an error without a message"] += 1
            gguf = None
        slowest_cpu_s = max(slowest_cpu_s, time.process_time() - start)
        if gguf is not None:
            outcomes[check_answer(path, gguf)] += 1
    return {
        "count": count,
        "outcomes": dict(outcomes),
        "slowest_cpu_s": round(slowest_cpu_s, 4),
        "peak_mib": round(peak_mib(), 1),
    }


def main() -> int:
    """Command line: ``--count`` mutants from ``--seed``."""
    parser = argparse.ArgumentParser(description="Fuzz labkit.gguf_map.open_gguf")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="fuzz-gguf-"))
    try:
        result = run(options.count, options.seed, directory)
    except BaseException:
        sys.stderr.write(f"the mutant is {directory / 'mutant.gguf'}\n")
        raise
    (directory / "mutant.gguf").unlink()
    directory.rmdir()
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
