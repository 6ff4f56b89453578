"""Open a GGUF file whose tensor data is not there: the first megabytes of a download suffice."""

from __future__ import annotations

from pathlib import Path

from labkit.gguf_map import GGUFMap
from labkit.gguf_map.shards import read_model_headers


def open_header(path: str | Path) -> GGUFMap:
    """Map a model from its headers alone; tensors may lie beyond the end of the files.

    Everything else is checked as `labkit.gguf_map.open_gguf` checks it, except for what would keep
    llama.cpp from loading the file, which it will not see. All shards must be there, each at least
    with its header.

    Raises:
        ModelFileError: no GGUF file, or one whose header is damaged or itself cut short.
    """
    headers = read_model_headers(Path(path).expanduser(), header_only=True)
    sizes = [header.size for header in headers]
    for header in headers:
        header.size = 1 << 62  # so that no tensor lies beyond it
    gguf = GGUFMap(headers)
    gguf.sizes = sizes
    return gguf
