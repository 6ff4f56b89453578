"""The paths that a prompt can take, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.errors import OptionError
from labkit.prefill_lab.devices import GgmlDevice, find_device

DEVICE = "device:"
DEVICES = "devices"


@dataclass(frozen=True)
class PrefillPath:
    """One path.

    Attributes:
        what: in words.
        load: how stock llama.cpp loads the file; "" for a path of labkit's.
        options: arguments of `Session`.
        whole: it holds the whole model in memory.
    """

    what: str
    load: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    whole: bool = False


PATHS: dict[str, PrefillPath] = {
    "mmap": PrefillPath("stock llama.cpp, the file mapped and read ahead", "mmap"),
    "mmap-random": PrefillPath("stock llama.cpp, mapped, without reading ahead", "mmap-random"),
    "resident": PrefillPath(
        "stock llama.cpp, all weights read into memory", "resident", whole=True
    ),
    "repack": PrefillPath(
        "stock llama.cpp, weights laid out anew for this processor", "repack", whole=True
    ),
    "experts": PrefillPath(
        "streamed expert by expert, through the cache", options={"prefill": "experts"}
    ),
    "layers": PrefillPath(
        "streamed layer by layer, through two slots", options={"prefill": "layers"}
    ),
}
"""Name -> path; `device:NAME` stands for a ggml device besides."""

DEFAULT_PATHS = ("mmap", "resident", "repack", "experts", "layers", DEVICES)


def parse_paths(names: Sequence[str], devices: Sequence[GgmlDevice]) -> list[str]:
    """The paths that `names` ask for, `devices` replaced by those beside the CPU.

    Raises:
        OptionError: an unknown name, a device that is not there, the same path twice, or none.
    """
    found: list[str] = []
    for name in names:
        if name == DEVICES:
            found += [DEVICE + device.name for device in devices if not device.is_cpu]
        elif name.startswith(DEVICE):
            found.append(DEVICE + find_device(name.removeprefix(DEVICE)).name)
        elif name in PATHS:
            found.append(name)
        else:
            known = ", ".join([*PATHS, DEVICES, f"{DEVICE}NAME"])
            raise OptionError(f"there is no prefill path {name!r}; there are {known}")
    if twice := {name for name in found if found.count(name) > 1}:
        raise OptionError(f"the path {min(twice)!r} is asked for twice")
    if not found:
        raise OptionError(
            "no path is left to measure: the installed llama.cpp reports no device besides the "
            f"CPU. Add one of {', '.join(PATHS)}."
        )
    return found


def describe(name: str) -> str:
    """What a path is, in words."""
    if name.startswith(DEVICE):
        return f"stock llama.cpp, all layers on its device {name.removeprefix(DEVICE)}"
    return PATHS[name].what


def holds_whole_model(name: str) -> bool:
    """Whether the path needs memory for all weights; a device may have memory of its own."""
    return name.startswith(DEVICE) or PATHS[name].whole


def streams(name: str) -> bool:
    """Whether labkit reads the experts."""
    return not name.startswith(DEVICE) and not PATHS[name].load
