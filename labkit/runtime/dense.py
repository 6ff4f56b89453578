"""`DenseWeights`: what every token uses, in memory of our own instead of llama.cpp's file map.

Pages of a file map are the first that a system short of memory takes back, and every token needs
them again. A copy in anonymous memory stays. It also keeps a session alive when somebody cuts or
rewrites the file: a page of a map that lost its file ends the process.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from labkit.errors import ReadError
from labkit.gguf_map import GGUFMap, TensorInfo
from labkit.runtime import ggml
from labkit.runtime.memory import PAGE, FileWindow
from labkit.runtime.reader import FileReader, ReadRequest

_CHUNK = 8 << 20


class DenseWeights:
    """The dense tensors of a model, read once and bound in place of the mapped ones.

    Args:
        gguf: the model's map.
        reader: opened on the same files.
        addresses: where llama.cpp's tensors of these names are. Tensors that no graph uses are
            not read.

    Raises:
        ReadError: a tensor cannot be read.
        BudgetError: the system refuses the memory.
    """

    def __init__(self, gguf: GGUFMap, reader: FileReader, addresses: dict[str, set[int]]) -> None:
        self.nbytes = 0
        self._windows: list[FileWindow] = []
        try:
            for run in _runs(tensor for tensor in gguf.tensors if tensor.name in addresses):
                window = self._load(run, reader)
                for tensor in run:
                    for address in addresses[tensor.name]:
                        ggml.tensor_at(address).data = window.address(tensor.offset)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmap. The model that computed from this memory is freed before."""
        while self._windows:
            self._windows.pop().close()

    def _load(self, run: list[TensorInfo], reader: FileReader) -> FileWindow:
        """One window with the bytes of neighbouring tensors, read over the reader's lanes."""
        start, stop = run[0].offset, run[-1].offset + run[-1].nbytes
        window = FileWindow(start, stop - start, huge=True)
        self._windows.append(window)
        what = run[0].name if len(run) == 1 else f"{run[0].name} to {run[-1].name}"
        reader.read(
            [
                ReadRequest(run[0].shard, low, min(low + _CHUNK, stop), window, what)
                for low in range(start, stop, _CHUNK)
            ]
        )
        self.nbytes += sum(tensor.nbytes for tensor in run)
        return window


def warm_dense(gguf: GGUFMap, names: Container[str]) -> int:
    """Read the dense tensors once through the page cache, where llama.cpp's map finds them.

    The system may take them back when memory is short. Returns the bytes read.

    Raises:
        ReadError: a file cannot be read.
    """
    done = 0
    for run in _runs(tensor for tensor in gguf.tensors if tensor.name in names):
        start, stop = run[0].offset, run[-1].offset + run[-1].nbytes
        path = gguf.paths[run[0].shard]
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                while start < stop and (got := len(file.read(min(_CHUNK, stop - start)))):
                    start, done = start + got, done + got
        except OSError as error:
            raise ReadError(f"{path}: {run[0].name} cannot be read: {error.strerror}") from error
    return done


def _runs(tensors: Iterable[TensorInfo]) -> Iterable[list[TensorInfo]]:
    """Tensors that lie next to each other in a file, with less than a page between them."""
    run: list[TensorInfo] = []
    for tensor in sorted(tensors, key=lambda t: (t.shard, t.offset)):
        if run and (
            tensor.shard != run[-1].shard
            or tensor.offset - (run[-1].offset + run[-1].nbytes) >= PAGE
        ):
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run
