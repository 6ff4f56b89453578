"""The ggml devices that the installed llama.cpp reports, by the name in its registry."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from labkit.errors import OptionError
from labkit.runtime import ggml

#: `enum ggml_backend_dev_type`, in its order.
KINDS = ("CPU", "GPU", "integrated GPU", "accelerator beside the CPU", "several devices as one")


@dataclass(frozen=True)
class GgmlDevice:
    """One device.

    Attributes:
        name: in the registry: CPU, CUDA0, Vulkan0, GPUOpenCL, HTP0, ...
        description: what the backend says about it.
        backend: the backend that it belongs to.
        kind: one of `KINDS`.
        free_mib, total_mib: memory as the backend counts it; None where it does not say.
        pointer: its `ggml_backend_dev_t` in this process.
    """

    name: str
    description: str
    backend: str
    kind: str
    free_mib: float | None
    total_mib: float | None
    pointer: int

    @property
    def is_cpu(self) -> bool:
        """Whether it is the processor itself, with or without a library that speeds it up."""
        return self.kind in (KINDS[0], KINDS[3])


def ggml_devices() -> list[GgmlDevice]:
    """Every device, in the registry's order.

    Raises:
        SeamError: llama.cpp cannot be loaded, or exports no such functions.
    """
    ggml.llama()
    pointer = ctypes.c_void_p
    count = ggml.function("ggml_backend_dev_count", ctypes.c_size_t)()
    get = ggml.function("ggml_backend_dev_get", pointer, ctypes.c_size_t)
    return [_describe(get(index)) for index in range(count)]


def find_device(name: str) -> GgmlDevice:
    """The device of this registry name, in upper or lower case.

    Raises:
        OptionError: there is none; the message lists those that are there.
    """
    found = ggml_devices()
    for device in found:
        if device.name.lower() == name.lower():
            return device
    names = ", ".join(device.name for device in found) or "none"
    raise OptionError(
        f"the installed llama.cpp reports no device {name!r}; it reports: {names}. Another one "
        "needs llama.cpp built with its backend, for example "
        'CMAKE_ARGS="-DGGML_VULKAN=ON" pip install --force-reinstall --no-binary llama-cpp-python '
        "llama-cpp-python."
    )


def _describe(device: int) -> GgmlDevice:
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    registry = ggml.function("ggml_backend_dev_backend_reg", pointer, pointer)(device)
    kind = ggml.function("ggml_backend_dev_type", ctypes.c_int, pointer)(device)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    memory = ggml.function("ggml_backend_dev_memory", None, pointer, pointer, pointer)
    memory(device, ctypes.addressof(free), ctypes.addressof(total))
    return GgmlDevice(
        name=_text(ggml.function("ggml_backend_dev_name", text, pointer)(device)),
        description=_text(ggml.function("ggml_backend_dev_description", text, pointer)(device)),
        backend=_text(ggml.function("ggml_backend_reg_name", text, pointer)(registry)),
        kind=KINDS[kind] if 0 <= kind < len(KINDS) else f"kind {kind}",
        free_mib=free.value / 2**20 if total.value else None,
        total_mib=total.value / 2**20 if total.value else None,
        pointer=device,
    )


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")
