"""The ctypes seam: the libraries that llama-cpp-python installs, and the layout of `ggml_tensor`.

labkit calls exported C functions only. The one thing that it takes from no function is where the
fields of `struct ggml_tensor` lie; `self_check` compares that layout with what exported functions
say, so that another llama.cpp ends in a clear error and never in silent corruption.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from labkit.errors import SeamError
from labkit.runtime import llama_log

MAX_NAME = 64
TESTED_VERSIONS = "0.3.36"


class Tensor(ctypes.Structure):
    """`struct ggml_tensor`. `ne` counts elements, `nb` are strides in bytes, `ne[0]` first."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int32),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * MAX_NAME),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


NAME_OFFSET = Tensor.name.offset
_NE, _NB, _DATA = Tensor.ne.offset, Tensor.nb.offset, Tensor.data.offset
OBJECT_BYTES = 32  # `struct ggml_object`, which ggml_tensor_overhead() counts as well


class _InitParams(ctypes.Structure):
    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


@functools.cache
def llama() -> ModuleType:
    """`llama_cpp.llama_cpp`, imported once, with llama.cpp's log led into Python logging.

    Raises:
        SeamError: llama-cpp-python is absent or its library cannot be loaded.
    """
    # A thread that waits for the others at the end of a node spins for some microseconds, then
    # sleeps. Sleeping at once halves a large model's speed on idle cores (futex calls at each of a
    # thousand nodes) and is 20 times slower for a toy; spinning longer takes the core from lanes
    # and neighbours. Milliseconds a token on two cores, idle and with one busy neighbour, by
    # count: 0 70, 70; 300 36, 75; 1000 35, 83; 10000 37, 179.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        import llama_cpp.llama_cpp as module
    except (ImportError, OSError, RuntimeError) as error:
        raise SeamError(
            f"llama-cpp-python cannot be loaded: {error}. "
            "Install it with: pip install llama-cpp-python"
        ) from error
    loaded_by()
    llama_log.install(module)
    module.llama_backend_init()
    return module


@functools.cache
def loaded_by() -> int:
    """The process that loaded llama.cpp; its threads do not follow into a fork."""
    return os.getpid()


@functools.cache
def _libraries() -> list[ctypes.CDLL]:
    """libllama and the ggml libraries beside it, in the order in which symbols are looked up."""
    handle = llama()._lib
    folder = Path(handle._name).parent
    prefix = "" if sys.platform == "win32" else "lib"
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    found = [handle]
    for stem in ("ggml-base", "ggml", "ggml-cpu"):
        path = folder / f"{prefix}{stem}{suffix}"
        if path.exists():
            found.append(ctypes.CDLL(str(path)))
    return found


@functools.cache
def function(name: str, restype: Any, *argtypes: Any) -> Any:
    """The exported C function `name` of the installed llama.cpp or ggml, typed.

    Raises:
        SeamError: no library exports it; the message names the installed version.
    """
    for library in _libraries():
        pointer = getattr(library, name, None)
        if pointer is not None:
            # A fresh function object, so that two declarations of one symbol never mix.
            prototype = ctypes.CFUNCTYPE(restype, *argtypes)
            return prototype(ctypes.cast(pointer, ctypes.c_void_p).value or 0)  # pyright: ignore
    raise SeamError(
        f"the installed llama.cpp exports no function {name} ({version()}). "
        f"labkit is tested with llama-cpp-python {TESTED_VERSIONS}."
    )


def version() -> str:
    """The installed llama-cpp-python, for messages."""
    try:
        return f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"
    except importlib.metadata.PackageNotFoundError:
        return "llama-cpp-python, version unknown"


@functools.cache
def op_code(name: str) -> int:
    """The number of a ggml operation such as `MUL_MAT_ID` in the installed library."""
    op_name = function("ggml_op_name", ctypes.c_char_p, ctypes.c_int)
    # Past the last operation ggml_op_name reads beyond its table, so stop at the known end.
    for code in range(200):
        found = op_name(code)
        if found == name.encode():
            return code
        if found == b"GLU":  # the last operation of the enumeration
            break
    raise SeamError(f"the installed ggml has no operation {name} ({version()})")


@functools.cache
def all_memory(code: Literal["Q", "i", "f"]) -> memoryview[Any]:
    """This process's address space as one memoryview of elements `code` ('Q', 'i', 'f').

    Element i lies at address i * itemsize. Nothing is touched until an element is read; that
    makes it the cheapest way from Python to a word at a known address (about 0.15 us).
    """
    size = 1 << 48  # all that a 64-bit process can address without asking for more
    return memoryview((ctypes.c_char * size).from_address(0)).cast("B").cast(code)


def tensor_at(address: int) -> Tensor:
    """The live tensor at `address`; valid as long as its graph or model is."""
    return Tensor.from_address(address)


def extents(address: int) -> list[int]:
    """`ne` of the tensor at `address`: elements per dimension. Far cheaper than by `Tensor`."""
    at = (address + _NE) >> 3
    return all_memory("Q")[at : at + 4].tolist()


def strides(address: int) -> list[int]:
    """`nb` of the tensor at `address`, in bytes."""
    at = (address + _NB) >> 3
    return all_memory("Q")[at : at + 4].tolist()


def is_float32(address: int) -> bool:
    """Whether the tensor at `address` is of type F32."""
    return all_memory("i")[address >> 2] == 0


def matrix_view(
    address: int, dtype: type, shape: tuple[int, int], strides: tuple[int, int]
) -> np.ndarray:
    """The `shape` of 4-byte elements of a tensor's data that lie `strides` apart, in place."""
    data = all_memory("Q")[(address + _DATA) >> 3]
    extent = (shape[0] - 1) * strides[0] + (shape[1] - 1) * strides[1] + 4
    raw = all_memory("i")[data >> 2 : (data + extent) >> 2]
    return np.ndarray(shape, dtype, raw, 0, strides)


@functools.cache
def self_check() -> list[tuple[str, str]]:
    """Check the layout of `Tensor` against exported functions.

    Returns:
        (what was checked, what was found), a row each.

    Raises:
        SeamError: at the first difference, naming it and the installed version.
    """
    return list(_checks())


def _checks():
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    overhead = function("ggml_tensor_overhead", size)()
    expected = ctypes.sizeof(Tensor) + OBJECT_BYTES
    yield _agree("bytes of ggml_tensor with its object header", overhead, expected)

    context = function("ggml_init", pointer, _InitParams)(_InitParams(1 << 16, None, False))
    if not context:
        raise SeamError(f"ggml_init failed ({version()})")
    try:
        yield from _tensor_checks(context, pointer, size, integer)
    finally:
        function("ggml_free", None, pointer)(context)


def _tensor_checks(context: int, pointer: Any, size: Any, integer: Any):
    new_3d = function("ggml_new_tensor_3d", pointer, pointer, ctypes.c_int, *[integer] * 3)
    new_2d = function("ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, *[integer] * 2)
    set_name = function("ggml_set_name", pointer, pointer, ctypes.c_char_p)
    get_name = function("ggml_get_name", ctypes.c_char_p, pointer)
    get_data = function("ggml_get_data", pointer, pointer)
    nbytes = function("ggml_nbytes", size, pointer)
    view_2d = function("ggml_view_2d", pointer, pointer, pointer, integer, integer, size, size)
    mul_mat_id = function("ggml_mul_mat_id", pointer, pointer, pointer, pointer, pointer)

    experts = new_3d(context, 0, 8, 4, 3)
    set_name(experts, b"blk.0.ffn_up_exps.weight")
    tensor = tensor_at(experts)
    yield _agree("type of an F32 tensor", tensor.type, 0)
    yield _agree("ne", list(tensor.ne), [8, 4, 3, 1])
    yield _agree("nb", list(tensor.nb), [4, 32, 128, 384])
    yield _agree("nbytes", nbytes(experts), 384)
    yield _agree("name", tensor.name, b"blk.0.ffn_up_exps.weight")
    ctypes.memmove(experts + NAME_OFFSET, b"renamed\0", 8)
    yield _agree("name read back", get_name(experts), b"renamed")
    yield _agree("data", tensor.data, get_data(experts))

    ids = new_2d(context, 26, 2, 1)
    view = view_2d(context, experts, 2, 4, 32, 8)
    yield _agree("source of a view", tensor_at(view).view_src, experts)
    yield _agree("offset of a view", tensor_at(view).view_offs, 8)
    rows = new_3d(context, 0, 8, 1, 1)
    product = tensor_at(mul_mat_id(context, experts, rows, ids))
    yield _agree("sources of MUL_MAT_ID", list(product.src[:3]), [experts, rows, ids])
    yield _agree("operation of MUL_MAT_ID", product.op, op_code("MUL_MAT_ID"))

    elsewhere = ctypes.create_string_buffer(384)
    before, tensor.data = tensor.data, ctypes.addressof(elsewhere)
    yield _agree("data after it was written", get_data(experts), ctypes.addressof(elsewhere))
    tensor.data = before


def _agree(what: str, found: Any, expected: Any) -> tuple[str, str]:
    if found != expected:
        raise SeamError(
            f"the installed llama.cpp lays out its tensors differently: {what} is {found!r}, "
            f"expected {expected!r} ({version()}). labkit is tested with llama-cpp-python "
            f"{TESTED_VERSIONS}: install that version."
        )
    return what, str(found)
