"""Reads that fail and memory that is refused: an error of labkit, and no token from it."""

from __future__ import annotations

import itertools
import json
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from broken_files import WORDS, broken, needs_linux

from labkit import bundled, host
from labkit.errors import LabkitError, ReadError, ResourceError
from labkit.runtime import Session
from labkit.runtime.expert_memory import ExpertMemory
from labkit.runtime.reader import FileReader
from labkit.runtime.streaming import Streaming

pytestmark = pytest.mark.filterwarnings("ignore::labkit.runtime.BudgetWarning")

TEXT = "In the beginning God created the heaven and the earth."
LONG = TEXT * 6
OVERLAPS: list[Any] = ["serial", "pipeline"] + ["userfaultfd"] * (
    host.userfaultfd_problem() is None
)
EXPERT = r"projection of expert \d+ in layer \d+ \(bytes \d+ to \d+\)"
LAYER = r"projections of layer \d+ \(bytes \d+ to \d+\)"


@pytest.fixture(scope="module")
def model() -> Path:
    return bundled.model_path().resolve()


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, str | None]:
    """Hashes of the logits after each prompt, of a resident run."""
    found = {}
    with Session(model, resident=True) as session:
        for prompt in (TEXT, LONG):
            session.reset()
            found[prompt] = session.generate(prompt, 6, hash_logits=True).logits_sha256
    return found


@needs_linux
@pytest.mark.parametrize("fault", ["EIO", "end"])
@pytest.mark.parametrize("direct_io", [None, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("prefetch", [None, "previous"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_token_whose_reads_fail_is_taken_back(
    model: Path, expected: dict, overlap: Any, prefetch: Any, direct_io: bool | None, fault: str
) -> None:
    options: dict = {"overlap": overlap, "prefetch": prefetch, "direct_io": direct_io}
    with Session(model, cache_mib=0.3, trial=False, **options) as session:
        stream = session.stream(TEXT, 20)
        for _ in range(3):
            next(stream)
        n_past, rows = session.n_past, len(session.trace.table)
        with broken(model, fault) as break_now:
            break_now()
            with pytest.raises(ReadError, match=EXPERT) as caught:
                next(stream)
        assert WORDS[fault] in str(caught.value)
        assert str(model) in str(caught.value)
        assert (session.n_past, len(session.trace.table)) == (n_past, rows)
        session.reset()
        again = session.generate(TEXT, 6, hash_logits=True)
        assert again.logits_sha256 == expected[TEXT]


@pytest.mark.skipif("userfaultfd" not in OVERLAPS, reason="no userfaultfd here")
def test_a_read_ahead_that_fails_leaves_no_zeros_to_its_neighbours(
    model: Path, expected: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slices share a page, and the one that fails is there before the one that comes."""
    failed = threading.Semaphore(0)
    read, give_up = FileReader._read_one, ExpertMemory.give_up
    with Session(model, cache_mib=20, overlap="userfaultfd", lanes=8, trial=False) as session:
        streaming = session._engine.streaming
        assert streaming is not None
        layer, last = session.map.moe_layers[-1], session.map.n_expert - 1

        def fail_last(reader: FileReader, request: Any) -> int:
            if request.what.expert == last:
                raise OSError("broken")
            failed.acquire()
            return read(reader, request)

        def tell(*failure: Any) -> None:
            give_up(*failure)
            failed.release()

        with monkeypatch.context() as patch:
            patch.setattr(FileReader, "_read_one", fail_last)
            patch.setattr(ExpertMemory, "give_up", tell)
            streaming.source.preload([(layer, last - 1), (layer, last)])
            for ahead in streaming.source._ahead.under_way:
                assert streaming.reader.drain(ahead.batch)
        with pytest.raises(ReadError, match=EXPERT):
            session.generate(TEXT, 6)
        again = session.generate(TEXT, 6, hash_logits=True)
        assert again.logits_sha256 == expected[TEXT]
        assert session.trace.table.query(f"layer == {layer}")["expert"].eq(last - 1).any()


def unread_in_last_layer(session: Session) -> tuple[Streaming, int, list[int]]:
    """What streams, the last MoE layer, and its experts that are not in memory."""
    streaming = session._engine.streaming
    assert streaming is not None
    layer = session.map.moe_layers[-1]
    policy = streaming.source.policy
    return streaming, layer, [e for e in range(session.map.n_expert) if (layer, e) not in policy]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_read_ahead_that_fails_in_part_is_a_read_error(
    model: Path, overlap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the graph while other reads of the same expert still go on."""
    read, never = FileReader._read_one, threading.Event()

    def fail_gate(reader: FileReader, request: Any) -> int:
        if request.what.part.tensor.projection == "gate":
            raise OSError("broken")
        never.wait(0.2)
        return read(reader, request)

    with Session(model, cache_mib=20, overlap=overlap, trial=False) as session:
        expected = session.generate(TEXT, 6, hash_logits=True).logits_sha256
        session.reset()
        streaming, layer, unread = unread_in_last_layer(session)
        stream = session.stream(TEXT, 6)
        next(stream)
        with monkeypatch.context() as patch:
            patch.setattr(FileReader, "_read_one", fail_gate)
            streaming.source.prefetch(layer, unread[:1], ())
            with pytest.raises(ReadError, match=EXPERT):
                list(stream)
        session.reset()
        assert session.generate(TEXT, 6, hash_logits=True).logits_sha256 == expected


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_read_ahead_that_fails_between_two_steps_is_told_once_by_the_next(
    model: Path, overlap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(reader: FileReader, request: Any) -> int:
        raise OSError("broken")

    with Session(model, cache_mib=20, overlap=overlap, trial=False) as session:
        expected = session.generate(TEXT, 6, hash_logits=True).logits_sha256
        session.reset()
        streaming, layer, unread = unread_in_last_layer(session)
        session.generate(TEXT, 2)
        n_past, rows = session.n_past, len(session.trace.table)
        with monkeypatch.context() as patch:
            patch.setattr(FileReader, "_read_one", fail)
            streaming.source.prefetch(layer, unread[:1], ())
            for ahead in streaming.source._ahead.under_way:
                assert streaming.reader.drain(ahead.batch)
        # The disk works again, and this step may need the entry or not.
        with pytest.raises(ReadError, match=rf"expert {unread[0]} in layer {layer} .*no layer had"):
            session.generate([], 1)
        assert (session.n_past, len(session.trace.table)) == (n_past, rows)
        session.reset()
        assert session.generate(TEXT, 6, hash_logits=True).logits_sha256 == expected


@needs_linux
@pytest.mark.parametrize("fault", ["EIO", "end"])
@pytest.mark.parametrize("prefill", ["experts", "layers"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_prompt_whose_reads_fail_is_taken_back(
    model: Path, expected: dict, overlap: Any, prefill: Any, fault: str
) -> None:
    with Session(
        model, cache_mib=5, prefill=prefill, overlap=overlap, n_ubatch=512, trial=False
    ) as session:
        with broken(model, fault) as break_now:
            break_now()
            words = LAYER if prefill == "layers" else EXPERT
            with pytest.raises(ReadError, match=words) as caught:
                session.generate(LONG, 6)
        assert WORDS[fault] in str(caught.value)
        assert (session.n_past, len(session.trace.table)) == (0, 0)
        again = session.generate(LONG, 6, hash_logits=True)
        assert again.logits_sha256 == expected[LONG]


@needs_linux
def test_a_disk_that_breaks_between_two_graphs_of_a_prompt(model: Path) -> None:
    options: dict = {"n_ubatch": 32, "all_logits": True, "trial": False}
    with Session(model, resident=True, **options) as session:
        expected = session.generate(LONG, 6, hash_logits=True).logits_sha256
    for prefill, fault in itertools.product(("experts", "layers"), ("EIO", "end")):
        with Session(model, cache_mib=2, prefill=prefill, **options) as session:
            session.generate(TEXT, 2)
            n_past, seen = session.n_past, []

            with broken(model, fault) as break_now:

                def on_logits(row, seen=seen, break_now=break_now) -> None:
                    seen.append(row)
                    if len(seen) == 10:  # after the first of three graphs
                        break_now()

                session.on_logits = on_logits
                with pytest.raises(ReadError, match=WORDS[fault]):
                    session.generate(LONG, 6)
            session.on_logits = None
            assert session.n_past == n_past
            session.reset()
            assert session.generate(LONG, 6, hash_logits=True).logits_sha256 == expected


@needs_linux
def test_a_disk_that_breaks_while_a_model_opens(model: Path, tmp_path: Path) -> None:
    """Dense weights come from the file as well."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes())
    from labkit.runtime.dense import DenseWeights

    real = DenseWeights._load

    def load(self, run, reader):
        with broken(cut, "EIO") as break_now:
            break_now()
            return real(self, run, reader)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DenseWeights, "_load", load)
        with pytest.raises(ReadError, match=r"Input/output error") as caught:
            Session(cut, trial=False)
    assert str(cut) in str(caught.value)
    with Session(cut, trial=False) as session:
        assert len(session.generate(TEXT, 2).tokens) == 2


HUNGRY = """
import json, resource, sys, warnings
from pathlib import Path
from labkit.errors import LabkitError
from labkit.runtime import Session, ggml
warnings.simplefilter("ignore")
ggml.llama()
model, mib, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (mib << 20),) * 2)
try:
    with Session(model, trial=False, **options) as session:
        session.generate([7] * 300, 12)
        session.generate([8] * 3, 12)
    print("ran")
except LabkitError as error:
    print(type(error).__name__, error)
"""


@needs_linux
def test_memory_that_is_refused_is_an_error_and_not_the_end_of_the_process(model: Path) -> None:
    options = {"cache_mib": 5, "prefill": "layers"}

    def under_limit(mib: int) -> str:
        child = subprocess.run(
            [sys.executable, "-c", HUNGRY, str(model), str(mib), json.dumps(options)],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert child.returncode == 0, f"{mib} MiB: {child.returncode} {child.stderr[-1500:]}"
        return child.stdout.strip()

    # llama.cpp and libgomp end the process at many of these, were they to try.
    for mib in (40, 75):
        assert re.match(r"BudgetError .*`ulimit -v`", under_limit(mib))
    assert under_limit(1200) == "ran"


@needs_linux
def test_threads_that_are_refused_are_an_error_that_leaves_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of lanes, of what watches over sleepers, and of llama.cpp, which would end the process."""
    start, left = threading.Thread.start, [0]

    def refusing(thread: threading.Thread) -> None:
        if thread.name.startswith("labkit-"):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("can't start new thread")
        start(thread)

    def attempt() -> None:
        with Session(
            model, cache_mib=5, overlap=OVERLAPS[-1], dense="mmap", threads=2, trial=False
        ) as session:
            session.generate(TEXT, 2)

    attempt()
    monkeypatch.setattr(threading.Thread, "start", refusing)
    before = descriptors_and_threads()
    n_threads = 4 + 1 + ("userfaultfd" in OVERLAPS)
    for n in range(n_threads):
        left[0] = n
        with pytest.raises(ResourceError, match=r"does not start the thread labkit-.*ulimit -u"):
            attempt()
        assert descriptors_and_threads() == before
    left[0] = n_threads
    attempt()


@needs_linux
def test_descriptors_that_are_refused_are_an_error_that_leaves_nothing(model: Path) -> None:
    def attempt() -> None:
        with Session(model, cache_mib=5, overlap=OVERLAPS[-1], trial=False) as session:
            session.generate(TEXT, 2)

    attempt()
    before = descriptors_and_threads()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    outcomes = []
    for extra in range(12):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] + extra, hard))
        try:
            attempt()
            outcomes.append("ran")
        except LabkitError as error:
            outcomes.append(type(error).__name__)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert descriptors_and_threads() == before
    assert outcomes[0] != "ran"
    assert outcomes[-1] == "ran"


def descriptors_and_threads() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


STOPPED = """
import os, signal, subprocess, sys, time, warnings
from labkit.runtime import Session
warnings.simplefilter("ignore")
stopper = "import os, signal, sys, time; pid = int(sys.argv[1]); os.kill(pid, signal.SIGSTOP);"
stopper += "time.sleep(0.8); os.kill(pid, signal.SIGCONT)"
with Session(sys.argv[1], cache_mib=5, trial=False, prefill="layers") as session:
    reader = session._engine.streaming.reader
    reader.slow_read_s = 0.4
    real, at = reader._read_one, []

    def stopped_at_the_third(request):
        at.append(request)
        if len(at) == 3:
            subprocess.run([sys.executable, "-c", stopper, str(os.getpid())], check=True)
        return real(request)

    reader._read_one = stopped_at_the_third
    print(session.generate([7] * 300, 3, hash_logits=True).logits_sha256)
"""


@needs_linux
def test_a_process_that_was_stopped_for_a_while_goes_on(model: Path) -> None:
    with Session(model, resident=True, trial=False) as session:
        expected = session.generate([7] * 300, 3, hash_logits=True).logits_sha256
    child = subprocess.run(
        [sys.executable, "-c", STOPPED, str(model)], capture_output=True, text=True, timeout=120
    )
    assert child.stdout.strip() == expected, child.stderr[-1500:]
