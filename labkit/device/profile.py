"""`DeviceProfile`: what a device can do, each figure with its unit and its source.

A profile is a JSON file::

    {"format": "labkit-device 1", "name": "my-phone", "title": "My phone, 12 GB",
     "figures": {"ram_mib": {"value": 11571, "how": "measured", "source": "/proc/meminfo"}},
     "flash": [{"read_kib": 4096, "lanes": 4, "mib_s": 2457.9, "source": "fio, cold"}]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.bundled import DATA_DIR
from labkit.device.figures import FIGURES, HOW, REQUIRED
from labkit.errors import DeviceError
from labkit.json_file import read_json

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "labkit-device 1"
DEVICES_DIR = DATA_DIR / "devices"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Figure:
    """A value in the unit of its name, how it came to be (see `HOW`), and where it stands."""

    value: float
    how: str
    source: str


@dataclass(frozen=True, slots=True)
class FlashPoint:
    """MiB a second of reads of `read_kib` with `lanes` of them under way."""

    read_kib: float
    lanes: int
    mib_s: float
    source: str


@dataclass(frozen=True)
class DeviceProfile:
    """A device: `figures` by name (see `labkit.device.figures.FIGURES`) and its flash curve."""

    name: str
    title: str
    figures: dict[str, Figure]
    flash: tuple[FlashPoint, ...] = ()
    notes: str = ""
    origin: str = ""

    def get(self, figure: str) -> float | None:
        """The value of a figure, None where the profile does not have it."""
        if figure not in FIGURES:
            raise KeyError(f"there is no figure {figure!r}; there are {', '.join(FIGURES)}")
        found = self.figures.get(figure)
        return None if found is None else found.value

    def need(self, figure: str) -> float:
        """The value of a figure; `DeviceError` says what is missing and what to do."""
        value = self.get(figure)
        if value is None:
            raise DeviceError(
                f"{self._where}: the profile does not say {figure} ({FIGURES[figure].meaning}). "
                "Add it with its source, or measure this machine with `labkit device --measure`."
            )
        return value

    def flash_mib_s(self, read_kib: float, lanes: int) -> float:
        """The flash rate at a read size and a number of lanes, between the measured points.

        Interpolated over the logarithm of the size at the lanes that were measured most, scaled by
        what other lanes made of the size that was measured with them. Sizes and lanes outside the
        measurements take the nearest; of a point that was measured twice the mean counts.

        Raises `DeviceError` if no flash rate is known.
        """
        if not self.flash:
            raise DeviceError(
                f"{self._where}: the profile has no flash rates. Add a point to 'flash' (read_kib, "
                "lanes, mib_s, source), or measure with `labkit device --measure`."
            )
        measured: dict[tuple[int, float], list[float]] = {}
        for point in self.flash:
            measured.setdefault((point.lanes, point.read_kib), []).append(point.mib_s)
        points = {place: sum(rates) / len(rates) for place, rates in measured.items()}
        counts = [p.lanes for p in self.flash]
        base = max(sorted(set(counts)), key=counts.count)
        at_base = _curve({size: rate for (n, size), rate in points.items() if n == base}, read_kib)
        # Every size at which several numbers of lanes were measured says what lanes are worth.
        sizes = {size for n, size in points if n != base and (base, size) in points}
        if not sizes:
            return at_base
        size = min(sizes, key=lambda s: abs(math.log(s / read_kib)))
        by_lanes = {float(n): rate for (n, s), rate in points.items() if s == size}
        return at_base * _curve(by_lanes, lanes) / by_lanes[base]

    def with_figures(self, figures: dict[str, Figure], **changes: Any) -> DeviceProfile:
        """A copy with these figures added or replaced, checked like a file's."""
        merged = {**self.figures, **figures}
        for name, figure in merged.items():
            _check_value(self._where, name, figure.value)
        return replace(self, figures=merged, **changes)

    def table(self) -> pd.DataFrame:
        """One row per figure: figure, value, meaning, how, source."""
        import pandas as pd

        rows = [
            (name, f.value, FIGURES[name].meaning, f.how, f.source)
            for name, f in self.figures.items()
        ]
        return pd.DataFrame(rows, columns=["figure", "value", "meaning", "how", "source"])

    def flash_table(self) -> pd.DataFrame:
        """One row per flash point: read_kib, lanes, mib_s, source."""
        import pandas as pd

        rows = [(p.read_kib, p.lanes, p.mib_s, p.source) for p in self.flash]
        return pd.DataFrame(rows, columns=["read_kib", "lanes", "mib_s", "source"])

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        return {
            "format": FORMAT,
            "name": self.name,
            "title": self.title,
            "notes": self.notes,
            "figures": {
                name: {"value": f.value, "how": f.how, "source": f.source}
                for name, f in self.figures.items()
            },
            "flash": [
                {"read_kib": p.read_kib, "lanes": p.lanes, "mib_s": p.mib_s, "source": p.source}
                for p in self.flash
            ],
        }

    def save(self, path: str | Path) -> Path:
        """Write the profile as JSON; `DeviceError` when the file cannot be written."""
        path = Path(path)
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise DeviceError(f"{path}: the profile cannot be written: {error.strerror}") from error
        return path

    @property
    def _where(self) -> str:
        return self.origin or f"device profile '{self.name}'"


def profile_names() -> list[str]:
    """Names of the profiles that come with labkit, sorted."""
    return sorted(path.stem for path in DEVICES_DIR.glob("*.json"))


def load_profile(device: str | Path) -> DeviceProfile:
    """A profile by the name of one that comes with labkit, or from a JSON file.

    Raises `DeviceError`: no such profile or file, no JSON, or a figure that is missing, unknown,
    absurd or without a source.
    """
    named = DEVICES_DIR / f"{device}.json"
    if str(device) in profile_names():
        return read_profile(named)
    path = Path(device).expanduser()
    if path.suffix == ".json" or path.exists():
        return read_profile(path)
    close = get_close_matches(str(device), profile_names(), n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    raise DeviceError(
        f"There is no device profile '{device}'.{hint} There are {', '.join(profile_names())}; a "
        "JSON file of your own is named by its path, and `labkit device --measure -o my.json` "
        "makes one of this machine."
    )


def read_profile(path: str | Path) -> DeviceProfile:
    """A profile from a JSON file; see `load_profile` for what it raises."""
    path = Path(path)
    value = read_json(path, what="device profile", most_bytes=_MAX_BYTES, error=DeviceError)
    return parse_profile(value, str(path))


def parse_profile(value: Any, where: str) -> DeviceProfile:
    """A profile from the content of its file; `where` names it in errors."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DeviceError(
            f'{where}: no device profile: it must be an object with "format": "{FORMAT}".'
        )
    unknown = sorted(set(value) - {"format", "name", "title", "notes", "figures", "flash"})
    if unknown:
        raise DeviceError(f"{where}: '{unknown[0]}' is no field of a device profile.")
    figures = _figures(value.get("figures"), where)
    flash = value.get("flash", [])
    if not isinstance(flash, list):
        raise DeviceError(f"{where}: 'flash' must be a list of points.")
    return DeviceProfile(
        name=_text(value, "name", where),
        title=_text(value, "title", where),
        figures=figures,
        flash=tuple(_flash_point(p, f"{where}: flash point {i}") for i, p in enumerate(flash)),
        notes=_text(value, "notes", where, optional=True),
        origin=where,
    )


def _figures(value: Any, where: str) -> dict[str, Figure]:
    if not isinstance(value, dict):
        raise DeviceError(f"{where}: 'figures' must be an object of figures by name.")
    figures = {name: _figure(name, given, where) for name, given in value.items()}
    for name in REQUIRED:
        if name not in figures:
            raise DeviceError(f"{where}: {name} ({FIGURES[name].meaning}) is missing.")
    usable = figures.get("usable_mib")
    if usable and usable.value > figures["ram_mib"].value:
        raise DeviceError(
            f"{where}: usable_mib is {usable.value:g}, more than the {figures['ram_mib'].value:g} "
            "MiB of ram_mib."
        )
    return figures


def _figure(name: str, given: Any, where: str) -> Figure:
    if name not in FIGURES:
        close = get_close_matches(name, FIGURES, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else f" There are {', '.join(FIGURES)}."
        raise DeviceError(f"{where}: there is no figure '{name}'.{hint}")
    if not isinstance(given, dict):
        raise DeviceError(f"{where}: {name} must be an object with value, how and source.")
    how = given.get("how")
    if how not in HOW:
        raise DeviceError(f"{where}: {name} has how = {how!r}; it must be one of {', '.join(HOW)}.")
    value = _check_value(where, name, given.get("value"))
    return Figure(value, how, _text(given, "source", f"{where}: {name}"))


def _check_value(where: str, name: str, value: Any) -> float:
    kind = FIGURES[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DeviceError(f"{where}: {name} is {value!r}; it must be a number ({kind.meaning}).")
    if not kind.low <= value <= kind.high:  # false for NaN
        raise DeviceError(
            f"{where}: {name} is {value:g}, which no device has ({kind.meaning}; "
            f"{kind.low:g} to {kind.high:g}). Is the unit right?"
        )
    return value


def _flash_point(given: Any, where: str) -> FlashPoint:
    if not isinstance(given, dict):
        raise DeviceError(f"{where} must be an object with read_kib, lanes, mib_s and source.")
    limits = {"read_kib": (0.5, 2**20), "lanes": (1, 1024), "mib_s": (0.01, 1e6)}
    values = []
    for name, (low, high) in limits.items():
        value = given.get(name)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not low <= value <= high:
            raise DeviceError(f"{where}: {name} is {value!r}; it must be {low:g} to {high:g}.")
        values.append(value)
    read_kib, lanes, mib_s = values
    if lanes != int(lanes):
        raise DeviceError(f"{where}: lanes is {lanes}; it must be a whole number.")
    return FlashPoint(read_kib, int(lanes), mib_s, _text(given, "source", where))


def _text(given: dict[str, Any], key: str, where: str, *, optional: bool = False) -> str:
    text = given.get(key, "" if optional else None)
    if not isinstance(text, str) or not (optional or text.strip()):
        raise DeviceError(f"{where}: '{key}' is missing; it must be a text that is not empty.")
    return text


def _curve(points: Mapping[float, float], at: float) -> float:
    """Between the points, straight over the logarithm of their places."""
    places = sorted(points)
    rates = [points[place] for place in places]
    return float(np.interp(math.log(at), np.log(places), rates))
