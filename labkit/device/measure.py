"""`measure_this_machine`: a device profile of the machine that this runs on."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path

import psutil

from labkit.bundled import BundledDataError, model_path
from labkit.device.probes import FlashRate, ModelRate, dram_gb_s, flash_rates, model_rate
from labkit.device.profile import DeviceProfile, Figure, FlashPoint
from labkit.errors import DeviceError
from labkit.host import cgroup_memory_limit, usable_memory_bytes

MIB = 2**20
MODEL_GIB = 0.75
"""Size of the synthetic model: large enough that its weights do not fit in a processor's cache."""
ASSUMED = {
    "hidden_pct": (44.4, "as fitted for the OnePlus 15R; `labkit device --calibrate` measures it"),
    "fault_mib_s": (68.1, "as fitted for the OnePlus 15R: the order of magnitude at best"),
    "band_pct": (30.0, "not calibrated with a benchmark yet"),
}


def measure_this_machine(
    *,
    model: str | Path | None = None,
    work: str | Path | None = None,
    progress: Callable[[str], object] | None = None,
) -> DeviceProfile:
    """Measure memory, flash, decode and prefill here; takes about half a minute.

    Args:
        model: a GGUF MoE that fits in memory, on the disk to be measured. Without it a synthetic
            one of 0.75 GiB is written to `work` and removed at the end.
        work: a directory on the disk to be measured; the temporary one by default.
        progress: told what is being measured.

    Raises:
        DeviceError: the model does not fit in memory, or there is no room for the synthetic one.
        ModelFileError: `model` is no model.
    """
    say = progress or (lambda _: None)
    if model is not None:
        return _measure(Path(model), say)
    with tempfile.TemporaryDirectory(prefix="labkit-device-", dir=work) as folder:
        say(f"writing a synthetic model of {MODEL_GIB} GiB to {folder}")
        return _measure(_synthetic(Path(folder)), say)


def _measure(path: Path, say: Callable[[str], object]) -> DeviceProfile:
    from labkit.sheet import sheet

    ledger = sheet(path)
    file = Path(ledger.where)
    _require_room(ledger.total_bytes, file)
    how = f"measured on {date.today().isoformat()}"
    threads = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    figures = _memory_figures(how)
    figures["threads"] = Figure(threads, "measured", f"{how}: physical cores")
    say("memory rate")
    read, copied = dram_gb_s(threads)
    figures["dram_read_gb_s"] = Figure(round(read, 2), "measured", f"{how} with numpy")
    figures["dram_copy_gb_s"] = Figure(round(copied, 2), "measured", f"{how} with numpy")
    say("flash rate by read size and lanes")
    flash = flash_rates(file)
    say("decode and prefill with stock llama.cpp, the model in memory")
    rate = model_rate(file, ledger.flops_per_token(64), threads=threads)
    figures |= speed_figures(ledger, rate, _small_rate(threads), f"{how}: {ledger.name}")
    notes = (
        ""
        if isinstance(flash, list)
        else f"Flash was not measured: {flash} Name a directory on the disk with --work."
    )
    if isinstance(flash, list):
        figures["read_share_pct"] = Figure(
            100.0, "assumed", "flash was measured with the reads of a streamed run"
        )
    for name, (value, source) in ASSUMED.items():
        figures[name] = Figure(value, "assumed", source)
    return DeviceProfile(
        "this-machine",
        f"{_processor()}, {figures['ram_mib'].value / 1024:.0f} GiB",
        figures,
        tuple(_flash_point(point, how) for point in flash) if isinstance(flash, list) else (),
        notes,
    )


def _memory_figures(how: str) -> dict[str, Figure]:
    ram = psutil.virtual_memory().total / MIB
    limit = cgroup_memory_limit()
    limited = "" if limit is None else f" (limit {limit.limit_bytes / MIB:.0f} MiB, {limit.source})"
    usable = min(usable_memory_bytes() / MIB, ram)
    return {
        "ram_mib": Figure(round(ram), "measured", f"{how}: what the system reports"),
        "usable_mib": Figure(
            int(usable), "measured", f"{how}: free at that moment, within the limit{limited}"
        ),
    }


def speed_figures(
    ledger, rate: ModelRate, small: tuple[float, int, float] | None, how: str
) -> dict[str, Figure]:
    """Decode rate and fixed time of a layer, from two models: two equations, two unknowns.

    `small` is (seconds a token, layers, bytes a token) of a small model, None if there is none.
    It tells nothing of a model that is not much larger.
    """
    seconds, layers, nbytes = rate.token_s, ledger.n_layers, ledger.token_bytes
    if small is not None and (nbytes < 3 * small[2] or nbytes / small[2] * small[1] <= layers):
        small = None
    layer_s = 0.0
    if small is not None:
        small_s, small_layers, small_bytes = small
        scale = nbytes / small_bytes
        # seconds = bytes / rate + layers x fixed: take the bytes out of both.
        layer_s = max(0.0, (scale * small_s - seconds) / (scale * small_layers - layers))
        layer_s = min(layer_s, 0.5 * seconds / layers)
    decode = nbytes / (seconds - layers * layer_s) / 1e9
    source = f"{how}, {1 / seconds:.1f} tok/s in memory"
    figures = {
        "decode_gb_s": Figure(round(decode, 2), "measured", source),
        "prefill_gflop_s": Figure(round(rate.prefill_gflop_s, 1), "measured", f"{how}, 128 tokens"),
    }
    if small is not None:
        figures["layer_ms"] = Figure(
            round(1000 * layer_s, 4), "measured", f"{how}, and the bundled model beside it"
        )
    return figures


def _small_rate(threads: int) -> tuple[float, int, float] | None:
    from labkit.sheet import sheet

    try:
        path = model_path()
    except BundledDataError:
        return None
    ledger = sheet(path)
    rate = model_rate(path, ledger.flops_per_token(64), threads=threads, seconds=1.0)
    return rate.token_s, ledger.n_layers, ledger.token_bytes


def _synthetic(folder: Path) -> Path:
    from labkit.synth.large import make_large

    return make_large("qwen3moe", folder / "probe.gguf", size_gib=MODEL_GIB)


def _require_room(nbytes: int, path: Path) -> None:
    usable = usable_memory_bytes()
    if nbytes > 0.8 * usable:
        raise DeviceError(
            f"{path}: the model takes {nbytes / MIB:,.0f} MiB in memory and {usable / MIB:,.0f} MiB"
            " are free: its rate in memory cannot be measured. Give a smaller model, or none."
        )


def _flash_point(rate: FlashRate, how: str) -> FlashPoint:
    source = f"{how}: direct reads at random places of a file"
    return FlashPoint(rate.read_kib, rate.lanes, round(rate.mib_s, 1), source)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
