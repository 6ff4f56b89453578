"""The live view without a browser: frames, threads, errors, and the picture that stands in."""

from __future__ import annotations

import base64
import io
import re
import struct
import threading
from collections.abc import Iterator

import nbformat
import numpy as np
import pytest
from fake_session import FakeSession
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from PIL import Image

from labkit import charts
from labkit.bundled import model_path
from labkit.errors import LlamaError, NotMoEError, SessionError
from labkit.runtime import Session
from labkit.widgets import LiveRouting, front_end
from labkit.widgets.frames import (
    MAX_FRAME_BYTES,
    NOT_ROUTED,
    Decoded,
    Shape,
    encode,
    routing_bits,
)
from labkit.widgets.picture import run_picture

PROMPTS = {"english": ["In the beginning"], "python": ["def f(x):"]}
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def make_live() -> Iterator:
    views: list[LiveRouting] = []

    def make(session: FakeSession, **options) -> LiveRouting:
        views.append(LiveRouting(session, prompts=PROMPTS, **options))  # type: ignore[arg-type]
        return views[-1]

    yield make
    for view in views:
        view.close()


def shape_of(session: FakeSession) -> Shape:
    return Shape(tuple(session.map.moe_layers), session.map.n_expert_used, session.map.n_expert)


def header(frame: bytes) -> dict[str, float]:
    names = "version rows slots experts run first count unused tokens_per_s hit_rate read_mib"
    return dict(zip(names.split(), struct.unpack_from("<HHHHIIHHfff", frame), strict=True))


def sent_by(live: LiveRouting) -> list[bytes]:
    frames: list[bytes] = []
    live.observe(lambda change: frames.append(change["new"]), "frame")
    return frames


# ---- frames -------------------------------------------------------------------------------------


def test_a_frame_holds_what_its_tokens_were(make_live) -> None:
    session = FakeSession(layers=3, experts=16, slots=2)
    steps = list(session.stream("a b c", 2))
    steps = [*session.prefill_steps, *steps]
    shape = shape_of(session)
    frame = encode(steps, shape=shape, run=7, first=40, totals=Decoded().totals())
    head = header(frame)
    assert (head["version"], head["rows"], head["slots"], head["experts"]) == (1, 3, 2, 16)
    assert (head["run"], head["first"], head["count"]) == (7, 40, 5)

    cells = 5 * 3 * 2
    ids = np.frombuffer(frame, "<u2", cells, 32).reshape(5, 3, 2)
    assert np.array_equal(ids[4], steps[4].experts)
    # the last layer did not route the first two prompt tokens, and the frame says so
    assert (ids[:2, 2] == NOT_ROUTED).all()
    assert (ids[2:, 2] != NOT_ROUTED).all()
    at = 32 + 3 * cells
    bits = np.unpackbits(np.frombuffer(frame, "u1", -(-cells // 8), at), bitorder="little")
    assert np.array_equal(bits[:cells].reshape(5, 3, 2)[4].astype(bool), steps[4].hit)
    at += -(-cells // 8)
    entropy = np.frombuffer(frame, "<f4", 5, at)
    assert entropy[3] == pytest.approx(routing_bits(steps[3].weights))
    assert frame.endswith(b"a b c w0 w1 ")


def test_entropy_of_routing() -> None:
    assert routing_bits(np.full((3, 4), 0.25, np.float32)) == pytest.approx(2.0)
    assert routing_bits(np.array([[1.0, 0.0], [0.5, 0.5]])) == pytest.approx(0.5)
    # a scale on the weights does not change how decided the choice was
    assert routing_bits(np.array([[3.0, 1.0]])) == pytest.approx(
        routing_bits(np.array([[0.75, 0.25]]))
    )
    assert np.isnan(routing_bits(np.full((2, 2), np.nan)))


@pytest.mark.parametrize(("layers", "experts", "slots"), [(7, 32, 4), (48, 128, 8), (61, 512, 10)])
def test_frames_are_bounded_and_too_many_tokens_are_refused(
    layers: int, experts: int, slots: int
) -> None:
    session = FakeSession(layers, experts, slots)
    shape = shape_of(session)
    steps = list(session.stream("a", shape.tokens_per_frame + 1))
    for step in steps:
        step.text = "語" * 400
    options = {"shape": shape, "run": 1, "first": 0, "totals": Decoded().totals()}
    assert len(encode(steps[:-1], **options)) <= MAX_FRAME_BYTES
    with pytest.raises(ValueError, match="more than one frame"):
        encode(steps, **options)


def test_ten_frames_are_ten_bounded_messages_of_whole_new_bytes(make_live) -> None:
    live = make_live(FakeSession(48, 128, 8))
    frames = sent_by(live)
    steps = list(FakeSession(48, 128, 8).stream("a", 10))
    for step in steps:
        live._take_step(step)
        live._flush()
    assert len(frames) == 10
    assert len({id(frame) for frame in frames}) == 10
    assert all(isinstance(frame, bytes) and len(frame) <= MAX_FRAME_BYTES for frame in frames)
    assert [header(frame)["first"] for frame in frames] == list(range(10))


def test_frames_together_hold_every_token_once(make_live) -> None:
    live = make_live(FakeSession())
    frames = sent_by(live)
    live.run("one two three", 200)
    held = [(header(f)["first"], header(f)["count"]) for f in frames]
    assert [first for first, _ in held] == [sum(c for _, c in held[:i]) for i in range(len(held))]
    assert sum(count for _, count in held) == 203
    assert len(frames) < 203


# ---- running ------------------------------------------------------------------------------------


def test_a_run_shows_text_and_figures_and_fills_the_table(make_live) -> None:
    session = FakeSession()
    live = make_live(session)
    live.run("one two", 12)
    assert live.status["state"] == "finished"
    assert "12 tokens generated" in live.status["message"]
    table = live.table()
    assert list(table["phase"]) == ["prefill"] * 2 + ["decode"] * 12
    assert "".join(table["text"]).startswith("one two w0 w1 ")
    hits = sum(step.hits for step in live.steps[2:])
    misses = sum(step.misses for step in live.steps[2:])
    assert header(live.frame)["hit_rate"] == pytest.approx(hits / (hits + misses), rel=1e-6)
    assert session.resets == 1


@pytest.mark.parametrize("text", ["0", "-3", "99999", "2.5", "many", ""])
def test_a_count_that_makes_no_sense_is_refused_with_words_each_time(make_live, text: str) -> None:
    live = make_live(FakeSession())
    said = []
    live.observe(lambda change: said.append(change["new"]["message"]), "status")
    for _ in range(2):
        live._take_message(live, {"type": "play", "prompt": "a b", "tokens": text}, [])
    assert live.status["state"] == "error"
    assert [message for message in said if message] == [live.status["message"]] * 2
    assert "whole number from 1 to 4096" in live.status["message"]
    assert text in live.status["message"]
    assert not live.steps


def test_play_from_the_page_and_stop_from_the_page(make_live) -> None:
    live = make_live(FakeSession(pause_s=0.01))
    seen = threading.Event()
    live.observe(lambda change: seen.set(), "frame")
    page = lambda **message: live._take_message(live, message, [])  # noqa: E731
    page(type="play", prompt="a b", tokens=4096)
    assert seen.wait(10)
    assert live.playing
    page(type="play", prompt="another", tokens=3)  # refused: one run at a time
    assert live.status["state"] == "playing"
    assert "generating already" in live.status["message"]
    with pytest.raises(SessionError, match="generating already"):
        live.run("c", 1)
    page(type="stop")
    assert not live.playing
    assert live.status["state"] == "stopped"
    count = len(live.steps)
    assert 0 < count < 4098

    live.run("c", 3)  # and the session is as good as before
    assert len(live.steps) == 4


def test_an_error_of_the_generation_appears_in_the_view(make_live) -> None:
    live = make_live(FakeSession(error=LlamaError("llama.cpp could not decode: out of memory")))
    done = threading.Event()
    live.observe(lambda change: change["new"]["state"] == "error" and done.set(), "status")
    live.play("a", 20)
    assert done.wait(10)
    assert live.status["message"] == "llama.cpp could not decode: out of memory"
    assert len(live.steps) == 6  # what came before is still shown
    live.stop()

    with pytest.raises(LlamaError):
        live.run("a", 20)


def test_an_unexpected_error_is_shown_and_logged(make_live, caplog) -> None:
    live = make_live(FakeSession(error=ZeroDivisionError("a fault")))
    with pytest.raises(ZeroDivisionError):
        live.run("a", 20)
    assert live.status == {"state": "error", "message": "ZeroDivisionError: a fault"}
    assert "a fault" in caplog.text


def test_a_new_view_and_closing_end_the_thread(make_live) -> None:
    def workers() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "labkit-live-routing"]

    first = make_live(FakeSession(pause_s=0.01))
    first.play("a", 4096)
    assert len(workers()) == 1
    second = make_live(FakeSession(pause_s=0.01))  # the cell was run again
    assert workers() == []
    assert first.status["state"] == "stopped"
    second.play("a", 4096)
    second.close()
    assert workers() == []


def test_a_page_that_opens_late_gets_the_whole_run_in_bounded_messages(make_live) -> None:
    live = make_live(FakeSession(48, 128, 8))
    live.run("a b", 150)
    sent: list[bytes] = []
    live.send = lambda content, buffers=None: sent.extend(buffers or [])
    live._take_message(live, {"type": "history"}, [])
    assert sum(header(frame)["count"] for frame in sent) == 152
    assert all(len(frame) <= MAX_FRAME_BYTES for frame in sent)


def test_the_view_follows_a_real_session(make_live) -> None:
    with Session(model_path(), cache_mib=1) as session:
        live = make_live(session)
        live.run("In the beginning", 12)
        trace = session.trace.table
        for step in live.steps:
            rows = trace[trace["step"] == step.index]
            assert np.array_equal(rows["expert"].to_numpy(), step.experts.ravel())
        assert live.facts["budget"].startswith("1 of ")

        seen = threading.Event()
        live.observe(lambda change: len(live.steps) > 8 and seen.set(), "frame")
        live.play("And it came to pass", 300)
        assert seen.wait(60)
        live.stop()
        assert live.status["state"] == "stopped"
        assert len(live.steps) < 300

        live.run("In the beginning", 12)  # a stopped run leaves nothing behind
        assert [step.token for step in live.steps] == list(trace_tokens(session))

        with pytest.raises(SessionError, match="do not fit"):
            live.run("a", 4096)
        assert live.status["state"] == "error"


def test_interrupting_the_cell_ends_its_run_and_raises_in_the_cell(make_live) -> None:
    session = FakeSession()
    live = make_live(session)
    live.observe(lambda change: session.interrupt(), "frame")
    with pytest.raises(KeyboardInterrupt):
        live.run("a", 500)
    assert live.status["state"] == "stopped"
    assert not live.playing
    assert 0 < len(live.steps) < 501


def test_a_dense_model_is_refused(make_live) -> None:
    session = FakeSession()
    session.map.moe_layers = []
    with pytest.raises(NotMoEError, match="no routed experts"):
        make_live(session)


def test_a_resident_session_has_no_misses_to_show(make_live) -> None:
    with Session(model_path(), resident=True) as session:
        live = make_live(session)
        live.run("In the beginning", 4)
        assert live.facts["budget"].startswith("all ")
        assert live.table()["misses"].sum() == 0
        assert np.isnan(header(live.frame)["hit_rate"])


def trace_tokens(session: Session) -> Iterator[int]:
    session.reset()
    list(session.stream("In the beginning", 12))
    yield from (token for _, _, token, _ in session.trace.tokens)


# ---- the picture --------------------------------------------------------------------------------


def test_who_draws_widgets() -> None:
    python_client = "3b2d3a1c-0a1b2c3d4e5f60718293a4b5_4242_7"
    assert not front_end._draws_widgets(python_client)
    assert not front_end._draws_widgets(None)
    assert front_end._draws_widgets("0b25f0a0-3c0e-4a0c-9a2e-0f6a7c1b2d3e")


def test_the_client_of_today_numbers_its_messages_as_we_expect() -> None:
    from jupyter_client.session import Session

    assert front_end._PYTHON_CLIENT.fullmatch(Session().msg_id)


def test_the_override_says_it_outright(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(front_end.OVERRIDE, "1")
    assert front_end.draws_widgets()
    monkeypatch.setenv(front_end.OVERRIDE, "0")
    assert not front_end.draws_widgets()


@pytest.mark.parametrize(("layers", "experts", "slots"), [(7, 32, 4), (48, 128, 8)])
def test_the_picture_shows_the_last_token_in_the_heatmap(
    layers: int, experts: int, slots: int
) -> None:
    session = FakeSession(layers, experts, slots)
    steps = [*session.stream("one\n two three", 30)]
    png = charts.png(run_picture([*session.prefill_steps, *steps], shape_of(session)))
    image = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    near = lambda colour: (np.abs(image - colour).sum(axis=2) < 30).sum()  # noqa: E731
    hits, misses = near((0x00, 0x77, 0x5A)), near((0xD5, 0x5E, 0x00))
    share = steps[-1].hit.mean()
    assert hits / (hits + misses) == pytest.approx(share, abs=0.08)
    assert len(png) < 400_000


def test_an_empty_view_has_a_picture_too() -> None:
    assert charts.png(run_picture([], Shape((1,), 1, 2))).startswith(b"\x89PNG")


CELL = """
import sys; sys.path.insert(0, {tests!r})
from fake_session import FakeSession
from labkit.runtime import Session
from labkit.widgets import LiveRouting
live = LiveRouting(FakeSession(), prompts={prompts!r}, n_tokens=20)
live.show()
"""


@pytest.fixture(scope="module")
def executed() -> nbformat.NotebookNode:
    """A notebook with the view, run without a front end; a thread prints after its cell ended."""
    from pathlib import Path

    cells = [CELL.format(tests=str(Path(__file__).parent), prompts=PROMPTS), "live"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    return NotebookClient(notebook, timeout=120, kernel_name="python3").execute()


def test_without_a_front_end_a_picture_stands_in(executed: nbformat.NotebookNode) -> None:
    nbformat.validate(executed)
    for cell in executed.cells:
        (output,) = cell.outputs
        assert WIDGET not in output.data
        assert base64.b64decode(output.data["image/png"]).startswith(b"\x89PNG")


def test_the_picture_survives_conversion_to_html(executed: nbformat.NotebookNode) -> None:
    body, _ = HTMLExporter().from_notebook_node(executed)
    assert len(re.findall(r'<img[^>]*src="data:image/png;base64,', body)) == 2
    assert '<script type="application/vnd.jupyter.widget-view+json"' not in body
