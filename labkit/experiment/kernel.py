"""A papermill engine that runs a notebook in this Python and tells a dead kernel from success.

Three things differ from papermill's own engine:

* The kernel is the Python that runs labkit, whatever kernel specs the user has installed and
  whether or not a virtual environment is active.
* A kernel that dies leaves its cell marked `failed`, with an error output, and the cells after it
  `pending`; papermill 2.7 marks all of them `completed`.
* Output of a thread that outlives its cell goes to that cell, not away.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import ensure_async, run_sync
from nbclient.exceptions import CellExecutionComplete, CellExecutionError, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_output
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, NotebookExecutionManager, papermill_engines

ENGINE = "labkit"

_log = logging.getLogger(__name__)
_log.addHandler(logging.NullHandler())  # what matters is in the exception


@dataclass
class Watch:
    """What a run tells about itself while it goes.

    The kernel runs in the directory of `notebook`, `kernel_log` takes its stdout and stderr.
    `on_cell` is called before each cell with its index and the number of cells; `cell` is the
    cell itself.
    """

    notebook: Path
    kernel_log: IO[bytes]
    on_cell: Callable[[int, int], None] | None = None
    cell: NotebookNode | None = None
    exit_code: int | None = None
    peak_rss_mib: float | None = None

    def started(self, cell: NotebookNode, index: int, total: int) -> None:
        self.cell = cell
        if self.on_cell:
            self.on_cell(index, total)

    def measured(self, pid: int | None) -> None:
        peak = _peak_rss_mib(pid) if pid else None
        if peak is not None:
            self.peak_rss_mib = max(peak, self.peak_rss_mib or 0.0)


class ThisPython(KernelSpecManager):
    """Knows one kernel under every name: ipykernel in the Python that is running."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(
            argv=[
                sys.executable,
                "-m",
                "ipykernel_launcher",
                "-f",
                "{connection_file}",
                # A C library's last message before abort() would be lost in ipykernel's pipe.
                "--IPKernelApp.capture_fd_output=False",
            ],
            display_name="Python 3",
            language="python",
            metadata={"supported_encryption": ["curve"]},
        )


class LabClient(PapermillNotebookClient):
    """papermill's client with the differences that this module's text lists."""

    def __init__(self, nb_man: NotebookExecutionManager, watch: Watch, **options: Any) -> None:
        super().__init__(nb_man, **options)
        self._watch = watch
        self._owners: dict[str, tuple[NotebookNode, int]] = {}

    def create_kernel_manager(self) -> AsyncKernelManager:
        self.km = AsyncKernelManager(kernel_spec_manager=ThisPython(), kernel_name="python3")
        if self.km.has_trait("transport_encryption"):  # jupyter_client 8.9 and later
            self.km.set_trait("transport_encryption", "auto")
        return self.km

    def papermill_execute_cells(self) -> None:
        total = len(self.nb.cells)
        for index, cell in enumerate(self.nb.cells):
            self._watch.started(cell, index, total)
            self.nb_man.cell_start(cell, index)
            try:
                self.execute_cell(cell, index)
            except CellExecutionError as error:
                self.nb_man.cell_exception(cell, cell_index=index, exception=error)
                break
            except BaseException as error:
                if isinstance(error, DeadKernelError):
                    self._watch.exit_code = self._kernel_exit_code()
                elif isinstance(error, KeyboardInterrupt):
                    run_sync(_end_other_tasks)()
                self._mark_failed(cell, index, error)
                raise
            finally:
                self._watch.measured(getattr(getattr(self.km, "provisioner", None), "pid", None))
                self.nb_man.cell_complete(cell, cell_index=index)

    def _mark_failed(self, cell: NotebookNode, index: int, error: BaseException) -> None:
        name, text = type(error).__name__, str(error) or "the run was stopped in this cell"
        if cell.cell_type == "code":
            cell.execution_count = self.code_cells_executed
            cell.outputs.append(
                new_output("error", ename=name, evalue=text, traceback=[f"{name}: {text}"])
            )
        self.nb_man.cell_exception(cell, cell_index=index, exception=error)

    def _kernel_exit_code(self) -> int | None:
        provisioner = getattr(self.km, "provisioner", None)
        return run_sync(provisioner.poll)() if provisioner else None

    async def _async_poll_output_msg(
        self, parent_msg_id: str, cell: NotebookNode, cell_index: int
    ) -> None:
        # nbclient listens to the running cell only; a thread's late output has an earlier parent.
        self._owners[parent_msg_id] = (cell, cell_index)
        while self.kc is not None:
            message = await ensure_async(self.kc.iopub_channel.get_msg(timeout=None))
            parent = message["parent_header"].get("msg_id")
            if parent not in self._owners:
                continue
            try:
                self.process_message(message, *self._owners[parent])
            except CellExecutionComplete:
                if parent == parent_msg_id:
                    return


class LabEngine(NBClientEngine):
    """The engine that papermill finds under the name `ENGINE`."""

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: NotebookExecutionManager,
        kernel_name: str,
        log_output: bool = False,
        stdout_file: Any = None,
        stderr_file: Any = None,
        start_timeout: float = 60,
        execution_timeout: float | None = None,
        **options: Any,
    ) -> Any:
        """Run the cells; `options` must hold a `Watch` named `watch`."""
        watch: Watch = options["watch"]
        nb_man.nb.metadata.papermill["input_path"] = str(watch.notebook)
        client = LabClient(
            nb_man,
            watch,
            kernel_name=kernel_name,
            startup_timeout=start_timeout,
            timeout=execution_timeout,
            log=_log,
        )
        return client.execute(
            cwd=str(watch.notebook.parent), stdout=watch.kernel_log, stderr=watch.kernel_log
        )


async def _end_other_tasks() -> None:
    """End what Ctrl-C left waiting for the kernel, or asyncio reports it on stderr at exit."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _peak_rss_mib(pid: int) -> float | None:
    """Peak resident memory of a process so far, where the system keeps that figure."""
    try:
        if sys.platform == "linux":
            for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
        peak = getattr(psutil.Process(pid).memory_info(), "peak_wset", None)
    except (OSError, psutil.Error):
        return None
    return None if peak is None else peak / 2**20


papermill_engines.register(ENGINE, LabEngine)
