"""What a session records, keeps and gives back, and what it says when it is used wrongly."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import logging
import math
import os
import pickle
import random
import re
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import stock

from labkit import bundled
from labkit.errors import BudgetError, LlamaError, OptionError, ReadError, SessionError
from labkit.gguf_map import open_gguf
from labkit.runtime import BudgetWarning, Session, budget, ggml
from labkit.runtime.abort import AbortFlag
from labkit.runtime.budget import layer_floor_bytes
from labkit.runtime.engine import Dense
from labkit.runtime.interrupt import InterruptGuard
from labkit.runtime.memory import PAGE, process_memory
from labkit.runtime.overlap import OverlapChoice

TEXT = "In the beginning God created the heaven and the earth."


@pytest.fixture(scope="module")
def model() -> Path:
    return bundled.model_path()


def long_prompt(session: Session) -> list[int]:
    return (session.tokenize(TEXT) * 400)[:2000]


# What is recorded


def test_a_row_for_every_choice_of_every_token(model: Path) -> None:
    with Session(model) as session:
        prompt = session.tokenize(TEXT)[:8]
        session.generate(prompt, 40)
        table, gguf = session.trace.table, session.map
    k = gguf.n_expert_used
    last = gguf.moe_layers[-1]
    tokens_of = table.groupby("layer")["step"].nunique()
    for layer in gguf.moe_layers:
        # llama.cpp drops all prompt tokens but the last before its last layer.
        assert tokens_of[layer] == (41 if layer == last else 48)
    prefill = table[table["phase"] == "prefill"]
    assert prefill.loc[prefill["layer"] == last, "step"].unique().tolist() == [7]
    cells = table.groupby(["step", "layer"])
    assert (cells.size() == k).all()
    assert (cells["expert"].nunique() == k).all()
    assert table["expert"].between(0, gguf.n_expert - 1).all()
    assert table["weight"].notna().all()


def test_choices_are_the_argsort_of_the_routers_own_probabilities(model: Path) -> None:
    with Session(model) as session:
        prompt = session.tokenize(TEXT)
        session.generate(prompt, 1)
        table = session.trace.table
    probabilities = stock.observe(model, prompt, (b"ffn_moe_probs-",))
    checked = 0
    for name, rows in probabilities.items():
        layer_text = name.removeprefix(b"ffn_moe_probs-")
        if not layer_text.isdigit():
            continue
        layer = int(layer_text)
        ours = table[(table["phase"] == "prefill") & (table["layer"] == layer)]
        chosen = ours["expert"].to_numpy().reshape(len(rows), -1)
        best = np.argsort(-rows, axis=1, kind="stable")[:, : chosen.shape[1]]
        assert np.array_equal(chosen, best)
        checked += 1
    assert checked > 1


def test_ids_are_read_by_strides_and_a_flat_read_would_differ(model: Path) -> None:
    with Session(model) as session:
        prompt = session.tokenize(TEXT)[:2]
        session.generate(prompt, 1)
        table = session.trace.table
        layer = session.map.moe_layers[0]
    nodes = stock.observe(model, prompt, (b"ffn_moe_topk-",))
    by_strides = nodes[b"ffn_moe_topk-%d" % layer]
    flat = nodes[b"ffn_moe_topk-%d flat" % layer]
    ours = table[(table["phase"] == "prefill") & (table["layer"] == layer)]
    assert ours["expert"].to_numpy().reshape(by_strides.shape).tolist() == by_strides.tolist()
    assert flat[1].tolist() != by_strides[1].tolist()


def test_weights_are_those_that_the_graph_applies(model: Path) -> None:
    with Session(model) as session:
        prompt = session.tokenize(TEXT)
        session.generate(prompt, 1)
        table, layer = session.trace.table, session.map.moe_layers[0]
        scale = session.map.metadata[f"{session.map.architecture}.expert_weights_scale"]
    rows = stock.observe(model, prompt, (b"ffn_moe_probs-",))[b"ffn_moe_probs-%d" % layer]
    ours = table[(table["phase"] == "prefill") & (table["layer"] == layer)]
    expected = rows[ours["step"], ours["expert"]] * scale
    np.testing.assert_allclose(ours["weight"], expected, rtol=1e-6)


def test_steps_and_trace_tell_the_same(model: Path) -> None:
    with Session(model, cache_mib=2) as session:
        steps = list(session.stream(TEXT, 12))
        table, prefill = session.trace.table, session.prefill_steps
        n_prompt = len(prefill)
    assert [step.index for step in prefill] == list(range(n_prompt))
    assert [step.index for step in steps] == list(range(n_prompt, n_prompt + 12))
    for step in steps:
        rows = table[table["step"] == step.index]
        assert rows["expert"].tolist() == step.experts.ravel().tolist()
        assert rows["resident"].tolist() == step.hit.ravel().tolist()
        assert step.misses == (~step.hit).sum()
        assert step.hits + step.misses == step.experts.size
        assert rows["read_bytes"].sum() <= step.bytes_read
        assert (step.bytes_read > 0) == (step.misses > 0)
        assert step.wall_s >= step.read_s > 0 or step.misses == 0
    # The last MoE layer routed only the prompt's last token.
    assert len(prefill[0].layers) == len(prefill[-1].layers) - 1


def test_the_budget_holds_as_the_kernel_counts(model: Path) -> None:
    with Session(model, cache_mib=1.5) as session:
        for _ in session.stream(TEXT, 30):
            held = session.resident_expert_bytes
            assert held is not None
            assert session.cache_bytes is not None
            slices = 3 * session.cache_bytes / session.map.entry_bytes(session.map.moe_layers[0])
            # A slice begins and ends within pages that count whole.
            assert held <= session.cache_bytes + (slices + 3) * 2 * PAGE


def test_the_text_is_whole_whatever_the_token_borders(model: Path) -> None:
    with Session(model) as session:
        text = "naïve 太初 🙂"
        assert session.detokenize(session.tokenize(text)).endswith(text)
        result = session.generate(TEXT, 30)
        assert session.detokenize(result.tokens) == result.text


# The conversation


def test_turns_continue_and_reset_starts_anew(model: Path) -> None:
    with Session(model) as session:
        first = session.generate(TEXT, 10)
        n = session.n_past
        second = session.generate(" And", 10)
        assert session.n_past == n + len(second.prompt_tokens) + 10
        assert set(session.trace.table["turn"]) == {0, 1}
        session.reset()
        assert session.n_past == 0
        assert len(session.trace.table) == 0
        again = session.generate(TEXT, 10, hash_logits=True)
    with Session(model, resident=True) as fresh:
        assert again.logits_sha256 == fresh.generate(TEXT, 10, hash_logits=True).logits_sha256
    assert again.tokens == first.tokens


def test_an_empty_prompt_goes_on_from_the_last_token(model: Path) -> None:
    with Session(model) as session:
        whole = session.generate(TEXT, 12).tokens
        session.reset()
        parts = session.generate(TEXT, 6).tokens + session.generate([], 6).tokens
    assert parts == whole


def test_a_seed_repeats_its_sampling(model: Path) -> None:
    def sample(seed: int) -> list[int]:
        with Session(model, temperature=1.0, seed=seed) as session:
            tokens = session.generate(TEXT, 20).tokens
            session.reset()
            assert session.generate(TEXT, 20).tokens == tokens
        return tokens

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


# Interrupts


def fresh_hash(path: Path, prompt, **options) -> str | None:
    with Session(path, **options) as session:
        return session.generate(prompt, 8, hash_logits=True).logits_sha256


def test_ctrl_c_during_a_long_prefill(model: Path) -> None:
    with Session(model, n_ctx=4096) as session:
        prompt = long_prompt(session)
        interrupt_after(session, 5)
        with pytest.raises(KeyboardInterrupt):
            session.generate(prompt, 8)
        assert session.n_past == 0
        assert len(session.trace.table) == 0
        after = session.generate(TEXT, 8, hash_logits=True)
    assert after.logits_sha256 == fresh_hash(model, TEXT)


def test_ctrl_c_during_decode_keeps_the_finished_tokens(model: Path) -> None:
    with Session(model) as session:
        n_prompt = len(session.tokenize(TEXT))
        stream = session.stream(TEXT, 50)
        for _ in range(5):
            next(stream)
        interrupt_after(session, 2)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        assert session.n_past == n_prompt + 5
        assert session.trace.table["step"].max() == n_prompt + 4
        session.reset()
        assert session.generate(TEXT, 8, hash_logits=True).logits_sha256 == fresh_hash(model, TEXT)


def test_a_hundred_interrupts_at_random_moments(model: Path) -> None:
    rng = random.Random(8)
    long = TEXT * 15
    expected = fresh_hash(model, TEXT)
    cut = 0
    with Session(model, cache_mib=1, n_ctx=512, n_ubatch=64, direct_io=False) as session:
        for _ in range(100):
            session.reset()
            # By layers routed, not by time: in prefill as well as in decode, on any machine.
            interrupt_after(session, rng.randrange(1, 80))
            try:
                session.generate(rng.choice([TEXT, long]), 6)
            except KeyboardInterrupt:
                cut += 1
        session._engine.hook._on_routing = session._recorder.on_routing
        session.reset()
        assert session.generate(TEXT, 8, hash_logits=True).logits_sha256 == expected
    assert cut > 60


def test_interrupt_from_another_thread(model: Path) -> None:
    with Session(model, n_ctx=4096) as session:
        prompt = long_prompt(session)
        interrupt_after(session, 5, by=session.interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.generate(prompt, 8)
        assert len(session.generate(TEXT, 3).tokens) == 3


def test_closing_from_another_thread_ends_a_generation(model: Path) -> None:
    session = Session(model)

    def close_soon() -> None:
        threading.Thread(target=session.close).start()
        while not session._gate.closing:
            pass

    at_layer(session, 9, close_soon)
    with pytest.raises(SessionError, match="closed in another thread"):
        session.generate(TEXT, 50)
    session.close()


def test_a_stop_that_comes_too_late_stops_nothing(model: Path) -> None:
    with Session(model) as session:
        session.generate(TEXT, 2)
        session.interrupt()
        assert len(session.generate(" And", 3).tokens) == 3


def test_a_recurrent_model_is_usable_after_an_interrupt(synth_model: Callable[..., Path]) -> None:
    path = synth_model("jamba")
    prompt = [i % 50 for i in range(40)]
    with Session(path) as session:
        session.generate(prompt, 2)
        interrupt_after(session, 1)
        with (
            pytest.raises(KeyboardInterrupt),
            pytest.warns(UserWarning, match="recurrent state"),
        ):
            session.generate(prompt, 8)
        assert session.n_past == 0
        after = session.generate(prompt, 8, hash_logits=True)
    assert after.logits_sha256 == fresh_hash(path, prompt)


def interrupt_after(session: Session, count: int, by: Callable[[], object] | None = None) -> None:
    """Interrupt after `count` more layers, from within a graph, as a signal would."""

    def interrupt() -> None:
        if by:
            thread = threading.Thread(target=by)
            thread.start()
            thread.join()
        else:
            os.kill(os.getpid(), signal.SIGINT)

    at_layer(session, count, interrupt)


def at_layer(session: Session, count: int, act: Callable[[], object]) -> None:
    """Call `act` from within a graph, when `count` more layers have been routed."""
    hook = session._engine.hook
    on_routing, seen = hook._on_routing, 0

    def counting(*routing) -> None:
        nonlocal seen
        on_routing(*routing)
        seen += 1
        if seen == count:
            hook._on_routing = on_routing
            act()

    hook._on_routing = counting


# Wrong use


def test_the_log_goes_to_logging_and_nothing_is_printed(
    model: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "labkit.llama"), Session(model) as session:
        session.generate(TEXT, 3)
    assert any("n_expert" in record.message for record in caplog.records)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_a_failed_load_says_why(synth_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    data = synth_model("qwen3moe").read_bytes()
    path.write_bytes(data.replace(b"blk.0.attn_norm.weight", b"blk.0.attn_nrom.weight"))
    with pytest.raises(LlamaError, match=r"tensor 'blk\.0\.attn_norm\.weight' not found"):
        Session(path)


def test_closed_means_closed(model: Path) -> None:
    session = Session(model)
    stream = session.stream(TEXT, 5)
    next(stream)
    session.close()
    session.close()
    calls: list[Callable[[], object]] = [
        lambda: next(stream),
        lambda: session.generate(TEXT, 1),
        lambda: session.stream(TEXT, 1),
        lambda: session.tokenize(TEXT),
        lambda: session.detokenize([1]),
        session.reset,
    ]
    for call in calls:
        with pytest.raises(SessionError, match="closed"):
            call()


def test_two_threads_on_one_session(model: Path) -> None:
    errors: list[BaseException] = []

    def second() -> None:
        try:
            session.generate(TEXT, 1)
        except BaseException as error:
            errors.append(error)

    with Session(model) as session:
        prompt = session.tokenize(TEXT)
        expected = fresh_hash(model, prompt)
        before, calls = session._recorder.on_routing, 0

        def on_routing(*args) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                thread = threading.Thread(target=second)
                thread.start()
                thread.join()
            before(*args)

        session._engine.hook._on_routing = on_routing
        assert session.generate(prompt, 8, hash_logits=True).logits_sha256 == expected
    assert len(errors) == 1
    assert isinstance(errors[0], SessionError)


def test_closing_waits_for_whoever_reads_a_text(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer is part of the model, and may be used beside a step."""
    reading, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    session = Session(model)
    expected = session.tokenize(TEXT)
    tokenize = ggml.llama().llama_tokenize

    def slow(*arguments: object) -> int:
        reading.set()
        go_on.wait()
        return tokenize(*arguments)

    def close() -> None:
        session.close()
        closed.set()

    monkeypatch.setattr(ggml.llama(), "llama_tokenize", slow)
    found: list[list[int]] = []
    reader = threading.Thread(target=lambda: found.append(session.tokenize(TEXT)))
    closer = threading.Thread(target=close)
    reader.start()
    assert reading.wait(60)
    closer.start()
    is_early = closed.wait(0.2)
    go_on.set()
    reader.join()
    closer.join()
    assert not is_early
    assert found == [expected]
    with pytest.raises(SessionError, match="is closed"):
        session._tokenizer.encode(TEXT, start=True)


def test_a_session_in_a_thread_of_its_own(model: Path) -> None:
    results: list[str | None] = []
    threads = [
        threading.Thread(target=lambda: results.append(fresh_hash(model, TEXT))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [fresh_hash(model, TEXT)] * 2


def test_a_newer_stream_ends_the_older_one(model: Path) -> None:
    with Session(model) as session:
        old = session.stream(TEXT, 5)
        next(old)
        session.generate(" And", 2)
        with pytest.raises(SessionError, match="Another generation"):
            next(old)


def test_garbage_collection_does_not_take_the_callback(model: Path) -> None:
    with Session(model) as session:
        stream = session.stream(TEXT, 5)
        next(stream)
        for _ in range(3):
            gc.collect()
        assert len(list(stream)) == 4


def test_prompts_that_cannot_work(model: Path, synth_model: Callable[..., Path]) -> None:
    with Session(model, n_ctx=64) as session:
        for prompt, message in [
            ([], "empty"),
            ([10**6], "does not exist"),
            ([-1], "does not exist"),
            ([1] * 61, "do not fit in 64"),
            (b"bytes", "neither a text nor token ids"),
            ("half a \ud83d", "half a character"),
            ("long " * 10_000, "does not fit in a context of 64"),
        ]:
            with pytest.raises(SessionError, match=message):
                session.generate(prompt, 8)
        for prompt, n in (([1.5], 1), ([1], 1.5)):
            with pytest.raises(TypeError, match="float"):
                session.generate(prompt, n)  # pyright: ignore[reportArgumentType]
        assert len(session.generate((t for t in [1, 2]), 3).tokens) == 3  # pyright: ignore
    with Session(synth_model("qwen3moe")) as session:
        with pytest.raises(SessionError, match="no tokenizer"):
            session.generate("text", 1)
        assert session.generate([1, 2, 3], 2).text == ""


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 0}, {"n_ubatch": 0}, {"threads": 0}, {"threads": 10_000}, {"lanes": 0},
        {"temperature": -1}, {"top_p": 0}, {"n_ctx": 1 << 30}, {"dense": "disk"},
        {"temperature": math.nan}, {"temperature": math.inf}, {"seed": -1}, {"seed": 2**32 - 1},
        {"cache_mib": math.nan}, {"cache_mib": math.inf}, {"cache_mib": "64"},
    ],
)  # fmt: skip
def test_options_that_cannot_work(options: dict, model: Path) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        Session(model, **options)


def test_an_exception_that_c_throws_away_ends_the_step() -> None:
    def raising(_: int) -> int:
        raise SystemExit("a signal handler wants to end the program")

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(raising)
    with pytest.raises(SystemExit, match="wants to end"), InterruptGuard(AbortFlag()):
        callback(1)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no such signal here")
@pytest.mark.parametrize("number", ["SIGALRM", "SIGTERM"])
def test_a_handler_that_raises_while_reads_are_asked_for(model: Path, number: str) -> None:
    """Nothing is half asked for: what the policy keeps is there when a token uses it."""

    def handler(*_: object) -> None:
        raise TimeoutError("too late")

    expected = fresh_hash(model, TEXT)
    previous = signal.signal(getattr(signal, number), handler)
    try:
        with Session(model, cache_mib=20, overlap="serial", trial=False) as session:
            streaming = session._engine.streaming
            assert streaming is not None
            make_way, calls = streaming.source._make_way, 0

            def interrupted(lookup) -> None:
                nonlocal calls
                calls += 1
                if calls in (3, 9, 14):
                    os.kill(os.getpid(), getattr(signal, number))
                make_way(lookup)

            streaming.source._make_way = interrupted
            for _ in range(3):
                session.reset()
                with pytest.raises(TimeoutError, match="too late"):
                    session.generate(TEXT, 8)
            assert signal.getsignal(getattr(signal, number)) is handler
            session.reset()
            assert session.generate(TEXT, 8, hash_logits=True).logits_sha256 == expected
    finally:
        signal.signal(getattr(signal, number), previous)


def test_a_handler_that_a_step_sets_stays() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with InterruptGuard(AbortFlag()):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_layer_whose_routing_was_lost_is_noticed(model: Path) -> None:
    expected = fresh_hash(model, TEXT)
    with Session(model, cache_mib=0) as session:
        hook = session._engine.hook
        see = hook._dull._on_node
        layer = session.map.moe_layers[2]

        def blind(address: int) -> bool:
            # As if an exception had left the callback before it did anything.
            name = ctypes.string_at(address + ggml.NAME_OFFSET)
            return hook._places.get(name) != ("routing", layer) and see(address)

        hook._dull._on_node = blind
        with pytest.raises(LlamaError, match=f"routing of layer {layer} did not reach"):
            session.generate(TEXT, 30)
        hook._dull._on_node = see
        session.reset()
        assert session.generate(TEXT, 8, hash_logits=True).logits_sha256 == expected


def test_a_callback_may_not_close_the_session_that_calls_it(model: Path) -> None:
    with Session(model) as session:
        session.on_logits = lambda _: session.close()
        with pytest.raises(SessionError, match="inside a step of this very thread"):
            session.generate(TEXT, 2)
        session.on_logits = None
        assert session.n_past == 0
        assert len(session.generate(TEXT, 2).tokens) == 2


def test_a_refused_call_leaves_a_running_one_alone(model: Path) -> None:
    expected, refused = fresh_hash(model, TEXT), []
    with Session(model) as session:

        def on_logits(_: np.ndarray) -> None:
            for prompt, n in (([5], 10**6), ([5], 1), ([5], -1)):
                try:
                    session.generate(prompt, n, hash_logits=True)
                except SessionError as error:
                    refused.append(error)

        session.on_logits = on_logits
        assert session.generate(TEXT, 8, hash_logits=True).logits_sha256 == expected
        assert session.on_logits is on_logits
    assert len(refused) == 3 * 9


def test_a_session_is_neither_copied_nor_pickled_nor_taken_over_by_a_fork(model: Path) -> None:
    with Session(model) as session:
        for copier in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="neither copied nor pickled"):
                copier(session)
        session._gate.home._pid += 1
        with pytest.raises(SessionError, match="forked from"):
            session.generate(TEXT, 1)
        session._gate.home._pid -= 1


# Budgets


def test_a_budget_that_memory_cannot_hold_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = open_gguf(model)
    free = gguf.dense_bytes + gguf.expert_bytes // 4
    monkeypatch.setattr(budget, "usable_memory_bytes", lambda: free)
    with pytest.raises(BudgetError, match="would end the process"):
        Session(model, cache_mib=gguf.expert_bytes / 2**20)
    with Session(model) as session:
        assert session.cache_bytes == gguf.expert_bytes // 8


def test_a_budget_below_one_layer_is_refused_with_the_figure(model: Path) -> None:
    gguf = open_gguf(model)
    floor = layer_floor_bytes(gguf) / 2**20
    with pytest.raises(BudgetError, match=re.escape(f"{floor:.2f} MiB")):
        Session(model, cache_mib=floor * 0.9)
    with pytest.raises(BudgetError, match="makes no sense"):
        Session(model, cache_mib=-1)


def test_a_budget_below_the_token_cycle_warns_with_both_figures(model: Path) -> None:
    cycle = open_gguf(model).token_cycle_bytes / 2**20
    with pytest.warns(BudgetWarning, match=re.escape(f"token cycle of {cycle:.2f} MiB")):
        Session(model, cache_mib=cycle * 0.9).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Session(model, cache_mib=cycle * 1.1).close()
        Session(model, cache_mib=0).close()


# Faults


@pytest.mark.parametrize("direct_io", [None, False], ids=["direct", "buffered"])
def test_a_read_that_fails_spoils_nothing(model: Path, direct_io: bool | None) -> None:
    expected = fresh_hash(model, TEXT)
    with Session(model, cache_mib=0, direct_io=direct_io) as session:
        for fail_at in (0, 3, 40):
            with (
                reads_fail_from(session, fail_at),
                pytest.raises(ReadError, match=r"projection of expert \d+ in layer \d+ \(bytes"),
            ):
                session.generate(TEXT, 8)
            session.reset()
            assert session.generate(TEXT, 8, hash_logits=True).logits_sha256 == expected
            session.reset()


@contextlib.contextmanager
def reads_fail_from(session: Session, call: int) -> Iterator[None]:
    """From the reader's call number `call` on, its file is an empty one."""
    assert session._engine.streaming
    reader = session._engine.streaming.reader
    submit, calls, kept = reader.submit, 0, os.dup(reader._files[0])

    def failing(requests, *, urgent=True):
        nonlocal calls
        if calls == call:
            empty = os.open(os.devnull, os.O_RDONLY)
            os.dup2(empty, reader._files[0])
            os.close(empty)
        calls += 1
        return submit(requests, urgent=urgent)

    reader.submit = failing
    try:
        yield
    finally:
        reader.submit = submit
        os.dup2(kept, reader._files[0])
        os.close(kept)


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_read_that_does_not_end_during_a_prompt_by_layers(model: Path, lanes: int) -> None:
    gate = threading.Event()
    with Session(model, cache_mib=20, prefill="layers", lanes=lanes) as session:
        assert session._engine.streaming
        reader = session._engine.streaming.reader
        reader.slow_read_s = 0.3
        real = reader._read_one

        def stuck(request):
            if "layer 3" in request.what:
                gate.wait()
            return real(request)

        reader._read_one = stuck
        with pytest.raises(ReadError, match=r"layer 3 .* has not ended after 0\.3 seconds"):
            session.generate(TEXT * 4, 2)
        with pytest.raises(SessionError, match="in doubt"):
            session.generate(TEXT, 2)
        gate.set()


def test_a_prompt_that_ends_between_its_graphs_leaves_nothing_to_the_next(model: Path) -> None:
    def fail(_: object) -> None:
        raise ValueError("a callback of the user")

    prompt = TEXT * 6
    options: dict = {"n_ubatch": 32, "all_logits": True, "n_ctx": 512}
    expected = fresh_hash(model, prompt, resident=True, **options)
    with Session(model, cache_mib=20, prefill="layers", **options) as session:
        session.on_logits = fail
        with pytest.raises(ValueError, match="of the user"):
            session.generate(prompt, 2)
        session.on_logits = None
        assert session.generate(prompt, 8, hash_logits=True).logits_sha256 == expected
        table = session.prefill_layers
        n_graphs = -(-len(session.prefill_steps) // 32)
        assert table["chunk"].tolist() == sorted(table["chunk"])
        assert len(table) == len(session.map.moe_layers) * (
            n_graphs - (len(session.prefill_steps) % 32 == 1)
        )


def test_a_file_that_is_emptied_during_a_graph_ends_in_an_error(
    model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "model.gguf"
    shutil.copy(model, copy)
    with Session(copy, cache_mib=0) as session:
        session.generate(TEXT, 2)
        # Whatever is still mapped from the file would now end the process when it is touched.
        at_layer(session, 3, lambda: os.truncate(copy, 0))
        with pytest.raises(ReadError, match=r"file ends at byte|was changed"):
            session.generate(" And", 8)


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "streamed"])
@pytest.mark.parametrize("change", ["cut", "rewritten", "replaced", "removed"])
def test_a_file_that_changes_while_open_is_noticed(
    model: Path, change: str, resident: bool, tmp_path: Path
) -> None:
    copy, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    shutil.copy(model, copy)
    shutil.copy(model, other)
    with Session(copy, resident=resident) as session:
        session.generate(TEXT, 2)
        if change == "cut":
            os.truncate(copy, 100)
        elif change == "rewritten":
            with copy.open("r+b") as file:
                file.seek(-1000, os.SEEK_END)
                file.write(bytes(1000))
        elif change == "replaced":
            other.replace(copy)
        else:
            copy.unlink()
        with pytest.raises(ReadError, match="changed, replaced or removed"):
            session.generate(" And", 8)


@pytest.mark.filterwarnings("ignore::labkit.runtime.BudgetWarning")
@pytest.mark.parametrize("overlap", ["serial", "pipeline", "auto"])
def test_reading_ahead_changes_no_bit_and_is_counted(model: Path, overlap: OverlapChoice) -> None:
    expected = fresh_hash(model, TEXT, resident=True)
    for cache_mib in (0.3, 1, 3):
        with Session(model, cache_mib=cache_mib, prefetch="previous", overlap=overlap) as session:
            result = session.generate(TEXT, 8, hash_logits=True)
            assert result.logits_sha256 == expected
            if cache_mib == 0.3:  # below the token cycle all that the next layer used is gone
                assert sum(step.prefetch_bytes for step in result.steps) > 0
                assert sum(step.prefetch_hits for step in result.steps) > 0


@pytest.mark.parametrize("dense", ["anonymous", "warm", "mmap"])
def test_dense_weights_in_every_place(model: Path, dense: Dense) -> None:
    assert fresh_hash(model, TEXT, dense=dense) == fresh_hash(model, TEXT, resident=True)


# Leftovers


def test_fifty_sessions_leave_nothing_behind(model: Path) -> None:
    def once() -> None:
        with Session(model) as session:
            session.generate(TEXT, 4)

    for _ in range(5):
        once()
    gc.collect()
    before = process_memory()["anonymous"] or 0
    files, threads = open_files(), threading.active_count()
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(50):
        once()
    gc.collect()
    assert (process_memory()["anonymous"] or 0) - before < 20 * 2**20
    assert open_files() == files
    assert threading.active_count() == threads
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= maps + 20


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
