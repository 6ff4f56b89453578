"""The figures that a device profile can hold: what each means, and the range that is no mistake."""

from __future__ import annotations

from typing import NamedTuple


class FigureKind(NamedTuple):
    """What a figure means; a value outside [low, high] is taken for a mistake of unit."""

    low: float
    high: float
    meaning: str


REQUIRED = ("ram_mib",)
"""Without these no profile makes sense; what else is missing limits what can be predicted."""

FIGURES: dict[str, FigureKind] = {
    "ram_mib": FigureKind(64, 2**24, "physical memory"),
    "usable_mib": FigureKind(16, 2**24, "memory that one process can take: limit, or what is free"),
    "dram_gb_s": FigureKind(0.5, 20_000, "advertised memory rate, in 1e9 bytes a second"),
    "dram_read_gb_s": FigureKind(0.1, 20_000, "memory rate of reading with all threads"),
    "dram_copy_gb_s": FigureKind(0.05, 10_000, "bytes copied a second with all threads"),
    "threads": FigureKind(1, 1024, "threads that compute"),
    "tops": FigureKind(0.01, 100_000, "advertised rate of the fastest unit, 1e12 operations/s"),
    "decode_gb_s": FigureKind(
        0.01, 20_000, "bytes of weights that decoding passes through a second"
    ),
    "layer_ms": FigureKind(0, 1000, "fixed time of a layer in decode, whatever its size"),
    "prefill_gflop_s": FigureKind(0.01, 1e7, "rate of prefill on the CPU, in 1e9 operations/s"),
    "read_share_pct": FigureKind(1, 200, "part of the flash curve that expert reads reach"),
    "read_wait_ms": FigureKind(0, 1000, "fixed wait of a layer that has to read"),
    "hidden_pct": FigureKind(0, 100, "part of the shorter of reads and compute that overlap hides"),
    "fault_mib_s": FigureKind(0.01, 1e6, "rate at which page faults bring in a mapped file"),
    "band_pct": FigureKind(0.1, 1000, "error of decode predictions that four in five stay within"),
    "htp_version": FigureKind(60, 200, "Hexagon architecture, as in v73"),
    "htp_prefill_gflop_s": FigureKind(0.1, 1e7, "rate of prefill on the HTP, in 1e9 operations/s"),
    "htp_session_mib": FigureKind(64, 2**20, "memory that one HTP session can map"),
    "htp_sync_ms": FigureKind(0, 1000, "one hand-over between CPU and HTP"),
}
"""Figure -> its meaning. Names carry their unit."""

HOW = ("published", "measured", "fitted", "assumed")
"""How a figure came to be: a data sheet, a measurement, a fit to measured runs, or a guess."""
