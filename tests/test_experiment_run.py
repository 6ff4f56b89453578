"""Headless runs: what is reported is what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from notebook_factory import outputs, statuses, write_notebook

from labkit.errors import CellFailedError, KernelDiedError, NotebookError, ParameterError
from labkit.experiment import run_notebook
from labkit.experiment.notebooks import strip_outputs

PYTHON = "import pathlib, sys\npython = pathlib.Path(sys.executable).parent.resolve()"


def test_run_injects_parameters_and_runs_in_this_python(tmp_path):
    notebook = write_notebook(
        tmp_path / "a.ipynb",
        f"import os\n{PYTHON}\nprint(seed, python, os.getcwd())",
        parameters="seed = 1\nout_dir = ''",
    )
    run = run_notebook(notebook, tmp_path / "out {x}" / "a.ipynb", {"seed": 7})
    assert outputs(run.executed)[1] == f"7 {Path(sys.executable).parent.resolve()} {tmp_path}\n"
    assert run.parameters == {"seed": 7, "out_dir": str(tmp_path / "out {x}")}
    assert statuses(run.executed) == ["completed", "completed"]


def test_kernel_is_this_python_whatever_specs_are_installed(tmp_path, monkeypatch):
    spec = tmp_path / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text('{"argv": ["/bin/false"], "display_name": "x"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    notebook = write_notebook(tmp_path / "a.ipynb", f"{PYTHON}\nprint(python)")
    run = run_notebook(notebook, tmp_path / "o.ipynb")
    assert outputs(run.executed) == [f"{Path(sys.executable).parent.resolve()}\n"]


def test_unknown_parameter_is_refused_before_anything_runs(tmp_path):
    notebook = write_notebook(
        tmp_path / "a.ipynb", f"open({str(tmp_path / 'ran')!r}, 'w')", parameters="cache_mib = 64"
    )
    with pytest.raises(ParameterError, match="nearest is `cache_mib`"):
        run_notebook(notebook, tmp_path / "out" / "a.ipynb", {"cache_mbb": 64})
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_killed_kernel_is_a_failure_with_its_cell(tmp_path):
    notebook = write_notebook(
        tmp_path / "a.ipynb",
        "print('one', flush=True)",
        "print('two', flush=True)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "print('four')",
    )
    out = tmp_path / "o.ipynb"
    started = time.monotonic()
    with pytest.raises(
        KernelDiedError, match=r"died in cell \[3\] \(`import os, signal`\).*SIGKILL"
    ):
        run_notebook(notebook, out)
    assert time.monotonic() - started < 15
    assert statuses(out) == ["completed", "completed", "failed", "pending"]
    assert outputs(out)[:2] == ["one\n", "two\n"]


def test_kernel_killed_from_outside_while_it_computes(tmp_path):
    notebook = write_notebook(
        tmp_path / "a.ipynb",
        f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))",
        "while True: pass",
    )

    def kill(index: int, _total: int) -> None:
        if index == 2:
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    with pytest.raises(KernelDiedError, match=r"`while True: pass`"):
        run_notebook(notebook, tmp_path / "o.ipynb", on_cell=kill)


def test_last_words_of_a_crashing_library_are_in_the_message(tmp_path):
    crash = "import os\nos.write(2, b'GGML_ASSERT(n > 0) failed\\n')\nos.abort()"
    notebook = write_notebook(tmp_path / "a.ipynb", crash)
    with pytest.raises(KernelDiedError, match=r"SIGABRT(.|\n)*GGML_ASSERT\(n > 0\) failed"):
        run_notebook(notebook, tmp_path / "o.ipynb")


def test_the_message_of_a_cell_ends_in_one_full_stop(tmp_path):
    notebook = write_notebook(tmp_path / "a.ipynb", "raise ValueError('That makes no sense.')")
    with pytest.raises(CellFailedError, match=r"ValueError: That makes no sense\. The output"):
        run_notebook(notebook, tmp_path / "o.ipynb")


def test_raising_cell_is_named_with_its_error(tmp_path):
    notebook = write_notebook(tmp_path / "a.ipynb", "x = 1", "1 / 0", "print('after')")
    out = tmp_path / "o.ipynb"
    with pytest.raises(CellFailedError, match=r"cell \[2\] \(`1 / 0`\) raised ZeroDivisionError"):
        run_notebook(notebook, out)
    cells = nbformat.read(out, as_version=4).cells
    assert [c.metadata.papermill.status for c in cells if c.get("outputs") is not None] == [
        "completed",
        "failed",
        "pending",
    ]


def test_exit_in_a_cell_is_no_success(tmp_path):
    notebook = write_notebook(tmp_path / "a.ipynb", "import sys; sys.exit(0)", "print('after')")
    with pytest.raises(CellFailedError, match="left the notebook by exit"):
        run_notebook(notebook, tmp_path / "o.ipynb")


def test_hanging_cell_ends_at_its_time_limit(tmp_path):
    notebook = write_notebook(tmp_path / "a.ipynb", "import time; time.sleep(600)")
    with pytest.raises(CellFailedError, match="took longer than 1 s"):
        run_notebook(notebook, tmp_path / "o.ipynb", cell_timeout_s=1)


def test_output_of_a_thread_lands_in_the_cell_that_started_it(tmp_path):
    notebook = write_notebook(
        tmp_path / "a.ipynb",
        "import contextvars, threading\n"
        "go = threading.Event()\n"
        "worker = threading.Thread(target=contextvars.copy_context().run,\n"
        "    args=(lambda: (go.wait(), print('from the worker')),))\n"
        "worker.start()",
        "go.set(); worker.join(); print('second')",
    )
    run = run_notebook(notebook, tmp_path / "o.ipynb")
    assert outputs(run.executed) == ["from the worker\n", "second\n"]


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_leaves_what_is_done_and_no_kernel(tmp_path):
    pid = tmp_path / "pid"
    notebook = write_notebook(
        tmp_path / "a.ipynb",
        "print('one', flush=True)",
        f"import os\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\nwhile True: pass",
    )
    out = tmp_path / "o.ipynb"
    code = (
        f"from labkit.experiment import run_notebook; run_notebook({str(notebook)!r}, {str(out)!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert stderr.endswith(b"KeyboardInterrupt\n")
    assert b"never retrieved" not in stderr
    assert outputs(out)[0] == "one\n"
    assert statuses(out) == ["completed", "failed"]
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_a_notebook_is_not_overwritten_by_its_result(tmp_path):
    notebook = write_notebook(tmp_path / "a.ipynb", "1")
    before = notebook.read_bytes()
    with pytest.raises(NotebookError, match="overwritten"):
        run_notebook(notebook, tmp_path / "x" / ".." / "a.ipynb")
    assert notebook.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "a.ipynb is empty: no notebook was saved"),
        (b"{}", "is not a Jupyter notebook: it is JSON, but"),
        (b"[1]", "is not a Jupyter notebook: it is JSON, but"),
        (b'{"cells": [', "cut off or damaged: its text is not JSON"),
        (b"\xff\xfe\x00", "its bytes are no text"),
        (b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}}', "damaged"),
        (b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}', "no code in any"),
    ],
)
def test_what_is_no_notebook_is_refused(tmp_path, content, words):
    (tmp_path / "a.ipynb").write_bytes(content)
    with pytest.raises(NotebookError, match=words):
        run_notebook(tmp_path / "a.ipynb", tmp_path / "o.ipynb")
    assert not (tmp_path / "o.ipynb").exists()


def test_a_notebook_that_is_not_there_cannot_be_read(tmp_path):
    with pytest.raises(NotebookError, match="cannot read"):
        run_notebook(tmp_path / "b.ipynb", tmp_path / "o.ipynb")


def test_stripped_outputs_keep_the_parameters_tag(tmp_path):
    source = write_notebook(tmp_path / "a.ipynb", "print(seed)", parameters="seed = 1")
    executed = run_notebook(source, tmp_path / "o.ipynb").executed
    by_jupyter = tmp_path / "cleared.ipynb"
    by_jupyter.write_bytes(executed.read_bytes())
    subprocess.run(
        [sys.executable, "-m", "jupyter", "nbconvert", "--clear-output", "--inplace", by_jupyter],
        check=True,
        capture_output=True,
    )
    assert strip_outputs(executed)
    assert not strip_outputs(executed)
    for cleaned in (executed, by_jupyter):
        assert "".join(outputs(cleaned)) == ""
        again = run_notebook(cleaned, tmp_path / "again.ipynb", {"seed": 5})
        assert outputs(again.executed)[-1] == "5\n"
