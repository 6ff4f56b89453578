"""The hot list: kept across sessions when asked, read in at opening, and never trusted."""

from __future__ import annotations

import json
import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from labkit import bundled
from labkit.errors import OptionError
from labkit.gguf_map import open_gguf
from labkit.runtime import Session
from labkit.runtime.hot_list import HotList, HotListWarning, model_identity
from labkit.runtime.reader import FileReader, ReadRequest

TEXT = "In the beginning God created the heaven and the earth."

pytestmark = pytest.mark.filterwarnings("ignore::labkit.runtime.BudgetWarning")


@pytest.fixture(scope="module")
def model() -> Path:
    return bundled.model_path()


@pytest.fixture(scope="module")
def expected(model: Path) -> str | None:
    with Session(model, resident=True) as session:
        return session.generate(TEXT, 8, hash_logits=True).logits_sha256


@pytest.fixture
def known(model: Path, tmp_path: Path) -> Path:
    """A directory with the hot list of one session."""
    with Session(model, hot_list=tmp_path / "hot") as session:
        session.generate(TEXT, 8)
    return tmp_path / "hot"


@pytest.fixture
def file(known: Path) -> Path:
    (path,) = known.iterdir()
    return path


@pytest.fixture
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HotListWarning)
        yield


# Round trip


@pytest.mark.usefixtures("without_warnings")
def test_uses_are_counted_and_come_back_the_hottest_first(model: Path, tmp_path: Path) -> None:
    with Session(model, hot_list=tmp_path, prefill="experts") as session:
        session.generate(TEXT, 8)
        table = session.trace.table
    counts = table.groupby(["layer", "expert"]).size()
    found = HotList(tmp_path, open_gguf(model)).hottest()
    assert set(found) == set(counts.index)
    ordered = [counts[entry] for entry in found]
    assert ordered == sorted(ordered, reverse=True)


@pytest.mark.usefixtures("without_warnings")
def test_earlier_sessions_fade(model: Path, tmp_path: Path) -> None:
    gguf = open_gguf(model)
    layer = gguf.moe_layers[0]
    for experts in ([1] * 8 + [2] * 3, [2, 3]):
        hot = HotList(tmp_path, gguf)
        hot.note(layer, np.array([experts], np.int32))
        hot.save()
    content = json.loads(hot.path.read_text())
    assert content["uses"][str(layer)][:5] == [0, 4, 3, 1, 0]
    assert HotList(tmp_path, gguf).hottest() == [(layer, 1), (layer, 2), (layer, 3)]


def test_whole_layers_count_as_well(model: Path, tmp_path: Path) -> None:
    with Session(model, cache_mib=3, hot_list=tmp_path, prefill="layers") as session:
        session.generate(TEXT * 8, 0)
        assert {step.path for step in session.prefill_steps} == {"layers"}
    assert HotList(tmp_path, open_gguf(model)).hottest()


@pytest.mark.usefixtures("without_warnings")
@pytest.mark.parametrize("overlap", ["serial", "auto"])
def test_a_known_model_opens_with_its_hottest_experts(
    model: Path, known: Path, overlap, expected: str
) -> None:
    hottest = HotList(known, open_gguf(model)).hottest()
    with Session(model, cache_mib=2, hot_list=known, overlap=overlap) as session:
        source = session._streaming.source  # pyright: ignore[reportOptionalMemberAccess]
        source.finish_reads()
        fit = len(source.memory.resident)
        assert source.memory.resident == set(hottest[:fit])
        assert 2 * 2**20 - source.policy.resident_bytes < session.map.entry_bytes(
            session.map.moe_layers[0]
        )
        kernel = session.resident_expert_bytes
        assert kernel is not None
        assert kernel >= source.policy.resident_bytes
        session.reset()
        result = session.generate(TEXT, 8, hash_logits=True)
    assert result.logits_sha256 == expected
    assert sum(step.prefetch_hits for step in result.steps + session.prefill_steps) > 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "s3-fifo", "layer-lru", "echo"])
def test_reading_it_in_keeps_the_budget_under_any_policy(
    model: Path, known: Path, policy: str, expected: str
) -> None:
    for cache_mib in (0, 0.3, 2):
        with Session(model, cache_mib=cache_mib, hot_list=known, policy=policy) as session:
            source = session._streaming.source  # pyright: ignore[reportOptionalMemberAccess]
            assert source.policy.resident_bytes <= cache_mib * 2**20
            assert (source.policy.resident_bytes > 0) == (cache_mib > 0)
            assert session.generate(TEXT, 8, hash_logits=True).logits_sha256 == expected


def test_with_prefetch_by_the_router(model: Path, known: Path, expected: str) -> None:
    with Session(model, cache_mib=2, hot_list=known, prefetch="router") as session:
        assert session.generate(TEXT, 8, hash_logits=True).logits_sha256 == expected


def test_a_session_that_closes_at_once_takes_its_reads_back(
    model: Path, known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    go_on = threading.Event()

    def hold(self: FileReader, request: ReadRequest) -> int:
        begun.append(request)
        assert go_on.wait(30)
        return read_one(self, request)

    read_one = FileReader._read_one
    monkeypatch.setattr(FileReader, "_read_one", hold)
    before = threading.active_count()
    session = Session(model, cache_mib=2, hot_list=known, dense="mmap", lanes=2)
    source = session._streaming.source  # pyright: ignore[reportOptionalMemberAccess]
    n_entries = len(source.memory.resident)
    threading.Timer(0.2, go_on.set).start()
    session.close()
    assert threading.active_count() <= before + 1  # the timer may still be there
    assert len(begun) < n_entries  # of three reads each


# Nothing is written unless asked


def test_nothing_is_written_without_being_asked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with Session(model, prefetch="router") as session:
        session.generate(TEXT, 4)
    assert not list(tmp_path.iterdir())
    with Session(model, hot_list=tmp_path / "hot"):
        pass  # nothing was used
    assert not list(tmp_path.iterdir())


def test_another_model_has_a_file_of_its_own(model: Path, known: Path) -> None:
    other = bundled.model_path("main-q4_0")
    assert model_identity(open_gguf(other)) != model_identity(open_gguf(model))
    with Session(other, hot_list=known) as session:
        session.generate(TEXT, 2)
    assert len(list(known.iterdir())) == 2


def test_a_copy_is_the_same_model(model: Path, known: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copy(model, copy)
    assert HotList(known, open_gguf(copy)).hottest()
    with copy.open("r+b") as raw:  # the same header, other experts
        raw.seek(open_gguf(copy).expert_tensors[0].tensor.offset)
        raw.write(b"\1" * 64)
    assert not HotList(known, open_gguf(copy)).hottest()


# Never trusted


def damage(name: str, good: dict) -> bytes:
    layer = next(iter(good["uses"]))
    counts = good["uses"][layer]

    def uses(values: object) -> bytes:
        return json.dumps(good | {"uses": good["uses"] | {layer: values}}).encode()

    return {
        "empty": b"",
        "binary": bytes(range(256)) * 50,
        "not utf-8": b'{"format": "\xff\xfe"}',
        "cut": json.dumps(good).encode()[:-40],
        "list": b"[]",
        "number": b"1e400",
        "deep": b"[" * 200_000,
        "large": b" " * (17 << 20) + b"{}",
        "other format": json.dumps(good | {"format": "labkit hot list 9"}).encode(),
        "other model": json.dumps(good | {"model": "0" * 64}).encode(),
        "no uses": json.dumps({k: v for k, v in good.items() if k != "uses"}).encode(),
        "uses a list": json.dumps(good | {"uses": [1, 2]}).encode(),
        "a layer more": json.dumps(good | {"uses": good["uses"] | {"99": counts}}).encode(),
        "a layer less": json.dumps(good | {"uses": {layer: counts}}).encode(),
        "an expert more": uses([*counts, 1]),
        "text": uses("1" * len(counts)),
        "negative": uses([-1, *counts[1:]]),
        "fraction": uses([0.5, *counts[1:]]),
        "nan": uses([float("nan"), *counts[1:]]),
        "true": uses([True, *counts[1:]]),
        "huge": uses([10**30, *counts[1:]]),
        "endless": uses([1, *counts[1:]]).replace(b"[1,", b"[" + b"9" * 5000 + b",", 1),
        "null": uses([None, *counts[1:]]),
        "nested": uses([[1], *counts[1:]]),
    }[name]


HOSTILE = [
    *("empty", "binary", "not utf-8", "cut", "list", "number", "deep", "large", "other format"),
    *("other model", "no uses", "uses a list", "a layer more", "a layer less", "an expert more"),
    *("text", "negative", "fraction", "nan", "true", "huge", "endless", "null", "nested"),
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_not_used_and_then_replaced(
    name: str, model: Path, file: Path, expected: str
) -> None:
    file.write_bytes(damage(name, json.loads(file.read_text())))
    with pytest.warns(HotListWarning, match="is not used"):
        session = Session(model, hot_list=file.parent)
    with session:
        source = session._streaming.source  # pyright: ignore[reportOptionalMemberAccess]
        assert source.policy.resident_bytes == 0
        assert session.generate(TEXT, 8, hash_logits=True).logits_sha256 == expected
    assert HotList(file.parent, open_gguf(model)).hottest()


@pytest.mark.parametrize("what", ["directory", "pipe"])
def test_what_is_no_file_is_neither_read_nor_waited_for(what: str, model: Path, file: Path) -> None:
    file.unlink()
    if what == "directory":
        file.mkdir()
        (file / "inside").touch()  # so that nothing can take its place
    else:
        os.mkfifo(file)
    with pytest.warns(HotListWarning, match="is not used: it is no file"):
        session = Session(model, hot_list=file.parent)
    session.generate(TEXT, 2)
    if what == "directory":
        with pytest.warns(HotListWarning, match="cannot be written"):
            session.close()
    session.close()
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_file_in_place_of_the_directory_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "hot").touch()
    with pytest.raises(OptionError, match="no directory"):
        Session(model, hot_list=tmp_path / "hot")


def test_a_disk_that_takes_nothing_is_a_warning(
    model: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    session = Session(model, hot_list=file.parent)
    session.generate(TEXT, 2)
    monkeypatch.setattr("labkit.runtime.hot_list.os.fdopen", full)
    with pytest.warns(HotListWarning, match="cannot be written"):
        session.close()
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]
