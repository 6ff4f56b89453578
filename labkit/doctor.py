"""`examine`: does this machine have what labkit needs? One plain verdict per line.

ok: nothing to do. note: works, with a limit that one should know. problem: labkit or a part of it
will not work until something is done. Everything is tried, not looked up, where it can be.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil

from labkit import __version__, bundled, host
from labkit.errors import LabkitError, SeamError

Verdict = Literal["ok", "note", "problem"]

_MIB = 2**20
_SMALL_MEMORY_MIB = 700  # the notebooks on the bundled model, with JupyterLab beside them
_SMALL_DISK_MIB = 512


@dataclass(frozen=True)
class Check:
    """One line of the report: what was looked at, the verdict, what was found, what to do."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def examine(model: Path | None = None, runs_dir: Path | None = None) -> list[Check]:
    """Look at this machine, for `model` (default: the bundled one) and results in `runs_dir`.

    A check that fails in a way nobody thought of is a problem in the report, never an exception.
    """
    checks: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("python", _python),
        ("labkit", _own_data),
        ("llama.cpp", _llama_cpp),
        ("seam", _seam),
        ("graph stops", _graph_stops),
        ("packages", _packages),
        ("jupyter", _jupyter),
        ("cores", _cores),
        ("memory", _memory),
        ("locked memory", _locked_memory),
        ("userfaultfd", _userfaultfd),
        ("model", lambda: _model(model)),
        ("results", lambda: _disk(runs_dir or Path("runs"))),
    ]
    found: list[Check] = []
    for name, check in checks:
        try:
            found += check()
        except LabkitError as error:
            found.append(Check(name, "problem", str(error)))
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            found.append(Check(name, "problem", f"could not look: {what}"))
    return found


def _python() -> Iterator[Check]:
    where = f"{platform.python_version()} ({sys.executable}) on {platform.platform()}"
    yield Check("python", "ok", where)


def _own_data() -> Iterator[Check]:
    models = bundled.model_names()
    if models:
        yield Check("labkit", "ok", f"{__version__}, with models {', '.join(models)}")
    else:
        yield Check(
            "labkit",
            "note",
            f"{__version__}, without its data at {bundled.DATA_DIR}",
            "The tour needs a clone: `pip install -e .` in it. Your own GGUF files work as they "
            "are.",
        )


def _llama_cpp() -> Iterator[Check]:
    import ctypes

    from labkit.runtime import ggml

    llama = ggml.llama()
    parts = [ggml.version()]
    for name in ("llama_version", "ggml_version", "ggml_commit"):
        try:
            text = ggml.function(name, ctypes.c_char_p)()
        except LabkitError:
            continue
        parts.append(f"{name.replace('_', ' ')} {text.decode('utf-8', 'replace')}")
    yield Check("llama.cpp", "ok", ", ".join(parts))

    features = llama.llama_print_system_info().decode("utf-8", "replace")
    on = [
        part.split("=")[0].split(":")[-1].strip() for part in features.split("|") if "= 1" in part
    ]
    slow = platform.machine() in ("x86_64", "AMD64") and "AVX2" not in on
    yield Check(
        "cpu features",
        "note" if slow else "ok",
        " ".join(on) or features.strip() or "none reported",
        "llama.cpp was built without AVX2 and will be slow: reinstall it on this machine with "
        "`pip install --force-reinstall --no-binary llama-cpp-python llama-cpp-python`."
        if slow
        else "",
    )


def _seam() -> Iterator[Check]:
    from labkit.runtime import ggml

    rows = ggml.self_check()
    yield Check("seam", "ok", f"{len(rows)} properties of ggml_tensor are as labkit expects")


def _graph_stops() -> Iterator[Check]:
    from labkit.runtime import node_counter
    from labkit.runtime.native import scheduler_functions

    reason = "" if node_counter.is_available() else "this C library cannot count computed nodes"
    try:
        scheduler_functions()
    except SeamError as error:
        reason = str(error)
    if reason:
        advice = "Works, but every token asks about every node of its graph, which takes time."
        yield Check("graph stops", "note", reason, advice)
    else:
        yield Check("graph stops", "ok", "counted in the C library while a graph runs again")


def _packages() -> Iterator[Check]:
    names = ("gguf", "numpy", "pandas", "altair", "vl-convert-python", "papermill", "pyarrow")
    missing = [name for name in names if _version(name) is None]
    found = ", ".join(f"{name} {_version(name) or 'absent'}" for name in names)
    if missing:
        yield Check("packages", "problem", found, f"pip install {' '.join(missing)}")
    else:
        yield Check("packages", "ok", found)


def _jupyter() -> Iterator[Check]:
    names = ("jupyterlab", "ipykernel", "ipywidgets", "anywidget", "jupyterlab-widgets")
    missing = [name for name in names if _version(name) is None]
    found = ", ".join(f"{name} {_version(name) or 'absent'}" for name in names)
    if missing:
        yield Check("jupyter", "problem", found, f"pip install {' '.join(missing)}")
        return
    if int((_version("jupyterlab") or "0").split(".")[0]) < 4:
        yield Check("jupyter", "problem", found, "pip install 'jupyterlab>=4.2'")
        return
    extensions = ("@jupyter-widgets/jupyterlab-manager", "anywidget")
    absent = [name for name in extensions if not _lab_sees(name)]
    if absent:
        yield Check(
            "jupyter",
            "note",
            f"{found}; JupyterLab of this Python does not see {', '.join(absent)}",
            "Live views need both in the Python that runs JupyterLab: "
            "`pip install --force-reinstall jupyterlab-widgets anywidget`.",
        )
    else:
        yield Check("jupyter", "ok", f"{found}; live views can be drawn")


def _cores() -> Iterator[Check]:
    physical, logical = psutil.cpu_count(logical=False), psutil.cpu_count()
    usable = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else 0
    found = f"{physical} physical, {logical} logical"
    if usable and usable != logical:
        found += f", {usable} for this process"
    load = psutil.getloadavg()[0]
    found += f"; load {load:.1f}"
    if load > (usable or logical or 1):
        yield Check(
            "cores", "note", found, "The machine is busy: timings will be noisy, results will not."
        )
    else:
        yield Check("cores", "ok", found)
    policy = os.environ.get("OMP_WAIT_POLICY")
    if policy:
        yield Check(
            "threads' wait",
            "note",
            f"OMP_WAIT_POLICY={policy}: compute threads that wait for each other "
            + ("never sleep" if policy.lower() == "active" else "sleep at every node of a graph"),
            "Unset it: labkit has them spin for a moment and then sleep, which is faster.",
        )
    else:
        yield Check("threads' wait", "ok", "compute threads spin for a moment, then sleep")


def _memory() -> Iterator[Check]:
    memory = psutil.virtual_memory()
    found = f"{memory.total / _MIB:.0f} MiB, {memory.available / _MIB:.0f} MiB available"
    limit = host.cgroup_memory_limit()
    if limit is None:
        found += "; no cgroup limit"
    else:
        found += f"; cgroup limit {limit.limit_bytes / _MIB:.0f} MiB ({limit.source})"
    usable = min(memory.available, limit.limit_bytes if limit else memory.available) / _MIB
    if usable < _SMALL_MEMORY_MIB:
        yield Check(
            "memory",
            "problem",
            found,
            f"Free memory or raise the limit: the notebooks want {_SMALL_MEMORY_MIB} MiB. For a "
            "model of your own add its dense weights, KV and expert cache.",
        )
    else:
        yield Check("memory", "ok", found)


def _locked_memory() -> Iterator[Check]:
    from labkit.runtime.native import may_lock_memory

    if may_lock_memory():
        yield Check("locked memory", "ok", "no limit: a model opens without being read whole")
        return
    found = "limited, so opening a model reads the whole file once"
    if sys.platform != "win32":
        import resource

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if _has_memlock() else None
        if limit is not None and limit != resource.RLIM_INFINITY:
            found = f"{limit / _MIB:.0f} MiB, so opening a model reads the whole file once"
    advice = "Only speed of opening: `ulimit -l unlimited` (or CAP_IPC_LOCK) makes it quick."
    yield Check("locked memory", "note", found, advice if sys.platform == "linux" else "")


def _userfaultfd() -> Iterator[Check]:
    reason = host.userfaultfd_problem()
    if reason is None:
        yield Check("userfaultfd", "ok", "available: compute and reads can overlap")
    else:
        yield Check(
            "userfaultfd",
            "note",
            reason,
            "Nothing to do: reads then overlap with compute by whole projections only.",
        )


def _model(model: Path | None) -> Iterator[Check]:
    from labkit.gguf_map import open_gguf
    from labkit.runtime.direct_io import direct_io_problem

    if model is None:
        try:
            model = bundled.model_path()
        except bundled.BundledDataError:
            yield Check("model", "note", "none was named", "labkit doctor MODEL.gguf")
            return
    gguf = open_gguf(model)
    size = sum(path.stat().st_size for path in gguf.paths) / _MIB
    found = f"{gguf.paths[0]}: {gguf.architecture}, {size:.1f} MiB in {len(gguf.paths)} file(s)"
    try:
        gguf.require_streamable()
        yield Check("model", "ok", f"{found}, {gguf.n_expert} experts a layer, can be streamed")
    except LabkitError as error:
        yield Check("model", "note", f"{found}; cannot be streamed", str(error))

    system = host.file_system_of(gguf.paths[0])
    reason = next(filter(None, map(direct_io_problem, gguf.paths)), None)
    if reason is None:
        yield Check("direct I/O", "ok", f"a direct read of the model works ({system})")
    else:
        yield Check(
            "direct I/O",
            "note",
            f"{reason} ({system})",
            "Results are the same; the page cache then holds expert bytes on top of the budget. "
            "On Linux, ext4, xfs and btrfs on a local disk have direct I/O.",
        )


def _disk(runs_dir: Path) -> Iterator[Check]:
    place = runs_dir.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / _MIB
    found = f"{free:.0f} MiB free for {runs_dir}"
    if not os.access(place, os.W_OK):
        yield Check("results", "problem", f"{place} cannot be written", "Use `-o DIRECTORY`.")
    elif free < _SMALL_DISK_MIB:
        yield Check("results", "note", found, "A tour writes about 20 MiB; free some space.")
    else:
        yield Check("results", "ok", found)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _lab_sees(extension: str) -> bool:
    """Whether JupyterLab finds a prebuilt extension in this Python's or the user's directories."""
    if importlib.util.find_spec("jupyter_core") is None:
        return False
    from jupyter_core.paths import jupyter_path

    return any(
        (Path(path) / extension / "package.json").is_file()
        for path in jupyter_path("labextensions")
    )


def _has_memlock() -> bool:
    import resource

    return hasattr(resource, "RLIMIT_MEMLOCK")
