"""Running one notebook headlessly, with an answer that can be trusted."""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import nbformat
import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError
from papermill.execute import raise_for_execution_errors
from papermill.iorw import load_notebook_node, write_ipynb
from papermill.parameterize import parameterize_notebook

from labkit.errors import CellFailedError, KernelDiedError, NotebookError
from labkit.experiment.kernel import ENGINE, Watch
from labkit.experiment.notebooks import parameters_of, read_notebook
from labkit.experiment.parameters import checked

_LAST_WORDS_BYTES = 4096
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class NotebookRun:
    """A run that finished. `peak_rss_mib` is the kernel's, None where the system keeps none."""

    notebook: Path
    executed: Path
    parameters: dict[str, Any]
    wall_s: float
    peak_rss_mib: float | None


def run_notebook(
    path: str | Path,
    out: str | Path,
    parameters: Mapping[str, Any] | None = None,
    *,
    on_cell: Callable[[int, int], None] | None = None,
    cell_timeout_s: float | None = None,
) -> NotebookRun:
    """Execute the notebook at `path` and write the result to the file `out`, cell by cell.

    The kernel is the Python that calls this, its directory is the notebook's. A notebook that
    declares `out_dir` writes its tables beside `out` unless `parameters` say otherwise.
    `on_cell(index, total)` is called before each cell. What was finished when a run fails or is
    stopped stays in `out`.

    Raises `ParameterError` before anything runs when a parameter is not declared or its value
    does not fit the default's type, `CellFailedError` when a cell raises or takes longer than
    `cell_timeout_s`, and `KernelDiedError` when the kernel ends under a cell.
    """
    path, out = Path(path).resolve(), Path(out).resolve()
    if path == out:
        raise NotebookError(f"{path} would be overwritten by its own result: choose another place.")
    notebook = load_notebook_node(read_notebook(path))  # with the metadata that papermill needs
    if not any(cell.cell_type == "code" and cell.source.strip() for cell in notebook.cells):
        raise NotebookError(f"{path} has no code in any cell: there is nothing to run.")
    declared = parameters_of(notebook, path.name)
    given = checked(parameters or {}, declared, path.name)
    if "out_dir" in declared:
        given.setdefault("out_dir", str(out.parent))
    if given:
        notebook = parameterize_notebook(notebook, given, kernel_name="python3", language="python")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_ipynb(notebook, str(out))

    started = time.monotonic()
    with tempfile.TemporaryFile() as kernel_log:
        watch = Watch(path, kernel_log, on_cell)
        literal = str(out).replace("{", "{{").replace("}", "}}")  # papermill formats its paths
        try:
            executed = papermill.execute_notebook(
                literal,
                literal,
                engine_name=ENGINE,
                kernel_name="python3",
                language="python",
                progress_bar=False,
                watch=watch,
                execution_timeout=cell_timeout_s,
            )
        except PapermillExecutionError as error:
            cell = _cell_in_words(error.source, error.exec_count)
            raise CellFailedError(
                f"{path.name}: {cell} raised {error.ename}: {_sentence(str(error.evalue))} "
                f"The output so far is in {out}."
            ) from error
        except CellTimeoutError as error:
            raise CellFailedError(
                f"{path.name}: {_running_cell(watch)} took longer than {cell_timeout_s:g} s "
                f"and was stopped. The output so far is in {out}."
            ) from error
        except DeadKernelError as error:
            _add_error_banner(out)
            raise KernelDiedError(
                f"{path.name}: the kernel died in {_running_cell(watch)}"
                f"{_cause(watch.exit_code)}. What was finished is in {out}."
                f"{_last_words(kernel_log)}"
            ) from error
        except RuntimeError as error:  # jupyter_client says so when a kernel never answers
            if watch.cell is not None:
                raise
            raise KernelDiedError(
                f"{path.name}: the kernel did not start: {_sentence(str(error))}"
                f"{_last_words(kernel_log)}"
            ) from error
    for cell in executed.cells:  # exit() ends a notebook without an error in papermill's eyes
        if cell.metadata.papermill.get("status") == "failed":
            raise CellFailedError(
                f"{path.name}: {_cell_in_words(cell.source, cell.execution_count)} left the "
                f"notebook by exit(), so the cells after it did not run. See {out}."
            )
    return NotebookRun(path, out, given, time.monotonic() - started, watch.peak_rss_mib)


def _sentence(words: str) -> str:
    """What an error says, without colours, ending in one full stop whether it had one or not."""
    return f"{_ANSI.sub('', words).rstrip(' .')}."


def _cell_in_words(source: str, count: int | None) -> str:
    """A cell as people find it: the number in its brackets and its first line of code."""
    lines = [line.strip() for line in source.splitlines()]
    first = next((line for line in lines if line and not line.startswith("#")), "empty")
    number = f"cell [{count}]" if count else "the cell"
    return f"{number} (`{first[:60]}`)"


def _running_cell(watch: Watch) -> str:
    if watch.cell is None:
        return "no cell, for none had started"
    return _cell_in_words(watch.cell.source, watch.cell.get("execution_count"))


def _cause(exit_code: int | None) -> str:
    if exit_code is None:
        return ""
    if exit_code >= 0:
        return f" with exit code {exit_code}"
    with suppress(ValueError):
        name = signal.Signals(-exit_code).name
        hint = " (often: out of memory)" if name == "SIGKILL" else ""
        return f", killed by {name}{hint}"
    return f", killed by signal {-exit_code}"


def _last_words(kernel_log: IO[bytes]) -> str:
    """The end of what the kernel wrote to its own stdout and stderr, such as a failed assertion."""
    size = kernel_log.seek(0, 2)
    kernel_log.seek(max(0, size - _LAST_WORDS_BYTES))
    text = _ANSI.sub("", kernel_log.read().decode("utf-8", "replace")).strip()
    lines = [line for line in text.splitlines() if "IPKernelApp" not in line][-8:]
    return "\nThe kernel's last words:\n  " + "\n  ".join(lines) if lines else ""


def _add_error_banner(out: Path) -> None:
    """Mark the failed cell as papermill marks one that raised: a link at the top, an anchor."""
    with suppress(PapermillExecutionError):
        raise_for_execution_errors(nbformat.read(out, as_version=4), str(out))
