"""`labkit device`: what a device can do, from a profile or measured here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.cli.outputs import file_to_make

if TYPE_CHECKING:
    from labkit.device import DeviceProfile


def command(
    profile: Annotated[
        str | None, typer.Argument(help="A profile's name or JSON file; without it, all names.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine (half a minute).")
    ] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="BENCH",
            help="Fit the profile's decode constants to the directory of a `labkit bench`.",
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            callback=file_to_make,
            help="Where --measure and --calibrate write.",
        ),
    ] = Path("device.json"),
    model: Annotated[
        Path | None,
        typer.Option(help="A GGUF MoE to measure with; without it a synthetic one is made."),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(help="Directory on the disk to measure; without it the temporary one."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Plain JSON on stdout.")] = False,
) -> None:
    """Show a device profile, measure this machine, or calibrate its profile with a benchmark."""
    from labkit.cli.console import emit_json, stderr, stdout
    from labkit.device import load_profile, profile_names

    if measure:
        from labkit.device.measure import measure_this_machine

        shown = measure_this_machine(model=model, work=work, progress=stderr().print)
        stderr().print(f"written to {shown.save(output)}")
    elif calibrate:
        from labkit.device.calibrate import calibrate as fit

        shown = fit(load_profile(profile or output), calibrate)
        stderr().print(f"written to {shown.save(output)}")
    elif profile is None:
        _show_names(json, [load_profile(name) for name in profile_names()])
        return
    else:
        shown = load_profile(profile)
    if json:
        emit_json(shown.to_json())
        return
    for part in _text(shown):
        stdout().print(part)


def _show_names(json: bool, profiles: list[DeviceProfile]) -> None:
    from labkit.cli.console import emit_json, stdout

    if json:
        emit_json([{"name": p.name, "title": p.title} for p in profiles])
        return
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for profile in profiles:
        table.add_row(f"[bold]{profile.name}[/]", profile.title)
    stdout().print(table)
    stdout().print("`labkit device NAME` shows one; `labkit device --measure` makes one of yours.")


def _text(profile: DeviceProfile):
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from labkit.device.figures import FIGURES

    yield f"[bold]{escape(profile.name)}[/]: {escape(profile.title)}"
    sources = list(dict.fromkeys(figure.source for figure in profile.figures.values()))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    for column in ("how", "meaning"):
        table.add_column(column)
    table.add_column("source", justify="right")
    for name, figure in profile.figures.items():
        value = f"{figure.value:,.4g}" if figure.value < 1000 else f"{figure.value:,.0f}"
        number = str(1 + sources.index(figure.source))
        table.add_row(name, value, figure.how, FIGURES[name].meaning, number)
    yield table
    for number, source in enumerate(sources, 1):
        yield f"[dim]{number}[/] {escape(source)}"
    if profile.flash:
        yield _flash_table(profile)
    for source in dict.fromkeys(point.source for point in profile.flash):
        yield escape(f"Flash: {source}")
    if profile.notes:
        yield escape(profile.notes)


def _flash_table(profile: DeviceProfile):
    from rich import box
    from rich.table import Table

    lanes = sorted({point.lanes for point in profile.flash})
    table = Table(box=box.SIMPLE_HEAD, title="Flash, MiB/s", title_justify="left")
    table.add_column("read KiB", justify="right")
    for n in lanes:
        table.add_column(f"{n} lane{'s' if n > 1 else ''}", justify="right")
    rates: dict[tuple[float, int], list[str]] = {}
    for point in profile.flash:
        rates.setdefault((point.read_kib, point.lanes), []).append(f"{point.mib_s:,.0f}")
    for size in sorted({point.read_kib for point in profile.flash}):
        cells = ["\n".join(rates.get((size, n), [])) for n in lanes]
        table.add_row(f"{size:g}", *cells)
    return table
