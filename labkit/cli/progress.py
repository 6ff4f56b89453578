"""A progress bar over the cells of notebooks."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from rich.console import Console

    from labkit.experiment.report import Entry


class NotebookProgress:
    """Shows the running notebook and its cells; where stderr is no terminal, a line at each end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("cells"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, visible=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def notebook_started(self, name: str) -> None:
        self._bar.reset(self._task, description=name, total=None, visible=True)

    def cell_started(self, index: int, total: int) -> None:
        self._bar.update(self._task, completed=index, total=total)

    def notebook_ended(self, entry: Entry) -> None:
        mark = "[red]failed[/red]" if entry.error is not None else "[green]done[/green]"
        self._console.print(f"{mark}  {entry.name}  [dim]{entry.wall_s:.1f} s[/dim]")
        if entry.error is not None:
            self._console.print(entry.error, markup=False, style="red", soft_wrap=True)
        elif entry.finding is not None:
            self._console.print(f"      {entry.finding.finding}", markup=False)
