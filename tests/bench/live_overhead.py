"""What the live view costs, and how smooth it is: JupyterLab in headless Chromium, two figures.

    python tests/bench/live_overhead.py [--rounds 9] [--tokens 256] [--model FILE.gguf]

Overhead: the same greedy generation with and without the view, taking turns in one kernel while the
page is open; the ratio of their times, median over the rounds, and the processor time of server and
browser on top (seconds a second of generation). Frames: how often the page draws while random
routing of 48 layers x 128 experts, top 8, arrives at up to 50 tokens a second. Prints JSON.
Run it on a quiet machine: everything shares its cores, as for a user.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

from jupyterlab_page import chromium, jupyterlab, run_all  # noqa: E402

from labkit.bundled import model_path  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Page

OPEN = """
import json, pathlib, threading, time
from labkit.runtime import Session
from labkit.widgets import LiveRouting
session = Session({model!r}, temperature=0)
live = LiveRouting(session, prompts={{"text": [{prompt!r}]}}, n_tokens=8)
live.show()
"""

COMPARE = """
import os, psutil
lab = psutil.Process().parent().parent()  # of kernel and server: this script, with its browser

def page_cpu_s():
    total = 0.0
    for process in lab.children(recursive=True):
        try:
            if process.pid != os.getpid():
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.Error:
            pass
    return total

def generate(n, counts):
    session.reset()
    counts.append(sum(1 for _ in session.stream({prompt!r}, n)))

def plain(n):
    counts = []
    worker = threading.Thread(target=generate, args=(n, counts))  # as the view does
    start = time.perf_counter()
    worker.start()
    worker.join()
    return counts[0], time.perf_counter() - start

def with_view(n):
    done = threading.Event()
    ended = lambda change: change["new"]["state"] != "playing" and done.set()
    live.observe(ended, "status")
    start = time.perf_counter()
    live.play({prompt!r}, n)
    done.wait()
    seconds = time.perf_counter() - start
    live.unobserve(ended, "status")
    while live.playing:
        time.sleep(0.001)
    return sum(step.phase != "prefill" for step in live.steps), seconds

def measured(run):
    before = page_cpu_s()
    count, seconds = run({tokens})
    time.sleep(0.3)  # what the page still draws belongs to this run
    return count, seconds, page_cpu_s() - before

for run in (plain, with_view):
    measured(run)
rounds = []
for number in range({rounds}):
    order = (plain, with_view) if number % 2 == 0 else (with_view, plain)
    rounds.append({{run.__name__: measured(run) for run in order}})
pathlib.Path("rounds.json").write_text(json.dumps(rounds))
"""

WIDE = """
import sys
sys.path.insert(0, {tests!r})
from fake_session import FakeSession
from labkit.widgets import LiveRouting
live = LiveRouting(FakeSession(48, 128, 8, pause_s=0.021), prompts={{"text": ["a b"]}})
live.show(n_tokens=8)
"""

PROMPT = "And it came to pass"


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--model", type=Path)
    chosen = options.parse_args()
    model = str((chosen.model or model_path()).resolve())
    values = {"prompt": PROMPT, "tokens": chosen.tokens, "rounds": chosen.rounds, "model": model}
    compare = [OPEN.format(**values), COMPARE.format(**values)]
    result = {
        "overhead": in_lab(compare, compared),
        "frames_48x128": in_lab([WIDE.format(tests=str(TESTS))], frames),
    }
    print(json.dumps(result, indent=2))  # noqa: T201


def in_lab(cells: list[str], measure: Any) -> dict[str, float]:
    """Run `cells` as a notebook on a page, and return what `measure(page, root)` finds."""
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        )
        nbformat.write(notebook, root / "bench.ipynb")
        lab = stack.enter_context(jupyterlab(root, home))
        page = stack.enter_context(chromium()).new_page(viewport={"width": 1400, "height": 1000})
        lab.open(page, "bench.ipynb")
        run_all(page)
        page.locator(".lk-live").wait_for(timeout=120_000)
        page.locator(".lk-live").scroll_into_view_if_needed()
        return measure(page, root)


def compared(page: Page, root: Path) -> dict[str, float]:
    """Time of a run with the view over the time without, and both speeds."""
    path = root / "rounds.json"
    end = time.monotonic() + 900
    while not (path.exists() and path.read_text().endswith("]")):
        if time.monotonic() > end:
            raise TimeoutError(page.locator(".jp-OutputArea").last.inner_text())
        page.wait_for_timeout(200)
    rounds = json.loads(path.read_text())
    ratios = sorted(r["with_view"][1] / r["plain"][1] for r in rounds)
    cpu = [r["with_view"][2] - r["plain"][2] for r in rounds]
    speed = {name: statistics.median(r[name][0] / r[name][1] for r in rounds) for name in rounds[0]}
    return {
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_lowest": round(ratios[0], 3),
        "ratio_highest": round(ratios[-1], 3),
        "rounds": len(rounds),
        "tokens_a_run": rounds[0]["plain"][0],
        "plain_tok_s": round(speed["plain"], 1),
        "with_view_tok_s": round(speed["with_view"], 1),
        "page_cpu_s_per_s": round(sum(cpu) / sum(r["with_view"][1] for r in rounds), 3),
        "frames_drawn": int(page.locator(".lk-live").get_attribute("data-drawn") or 0),
    }


def frames(page: Page, _root: Path) -> dict[str, float]:
    """Frames that arrive and that the page draws in five seconds of a run."""
    view = page.locator(".lk-live")
    page.wait_for_function("() => document.querySelector('.lk-live').dataset.state === 'finished'")
    view.locator(".lk-count").fill("2000")
    view.locator(".lk-play").click()
    page.wait_for_function("() => Number(document.querySelector('.lk-live').dataset.tokens) > 20")
    seen = page.evaluate(
        """async () => {
          const view = document.querySelector('.lk-live');
          const look = () => ({ at: performance.now(), ...view.dataset });
          const before = look();
          await new Promise((done) => setTimeout(done, 5000));
          return [before, look()];
        }"""
    )
    view.locator(".lk-stop").click()
    seconds = (seen[1]["at"] - seen[0]["at"]) / 1e3
    rates = {
        name: round((float(seen[1][name]) - float(seen[0][name])) / seconds, 1)
        for name in ("drawn", "frames", "tokens")
    }
    return {f"{name}_a_second": rate for name, rate in rates.items()}


if __name__ == "__main__":
    main()
