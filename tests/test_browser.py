"""Notebook 02 in a real JupyterLab and a real browser: what is drawn is what the model routed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import pytest
from jupyterlab_page import JupyterLab, chromium, chromium_or_skip, jupyterlab, run_all

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "02_live_routing.ipynb"
TOKENS = 40

#: Last cell of the copy under test: what the run in the notebook routed, for comparison.
SAVE_RUN = """
import json, pathlib
rows = [
    {"text": s.text, "layers": s.layers.tolist(), "experts": s.experts.tolist(),
     "hit": s.hit.tolist(), "phase": s.phase}
    for s in live.steps
]
pathlib.Path("run.json").write_text(json.dumps({"rows": rows, "layers": session.map.moe_layers}))
"""

pytestmark = pytest.mark.browser


@dataclass
class Opened:
    """The notebook after all its cells ran."""

    page: Page
    steps: list[dict[str, Any]]
    layers: list[int]
    complaints: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    def part(self, name: str) -> Locator:
        """An element of the view."""
        return self.page.locator(f".lk-live .lk-{name}")

    def state(self, name: str) -> str:
        """A data attribute of the view."""
        return self.page.locator(".lk-live").get_attribute(f"data-{name}") or ""

    def wait_for(self, condition: str) -> None:
        """Wait until a condition on the view's data attributes `d` holds."""
        self.page.wait_for_function(
            f"() => {{ const d = document.querySelector('.lk-live').dataset; return {condition}; }}"
        )

    def play(self) -> None:
        """Press Play and wait until the new run shows its first tokens."""
        run = int(self.state("run"))
        self.part("play").click()
        self.wait_for(f"Number(d.run) === {run + 1} && Number(d.tokens) > 0")

    def settle(self) -> None:
        """Wait until everything asked for has been drawn."""
        self.page.evaluate(
            "() => new Promise((f) => requestAnimationFrame(() => requestAnimationFrame(f)))"
        )

    def cell_centre(self, row: int, expert: int) -> tuple[float, float]:
        """Where a cell of the heatmap is, in CSS pixels of the canvas."""
        data = self.page.evaluate("() => ({...document.querySelector('.lk-map').dataset})")
        left, top, width, height = (
            float(data[name]) for name in ("left", "top", "cellWidth", "cellHeight")
        )
        return left + (expert + 0.5) * width, top + (row + 0.5) * height

    def drawn_choices(self) -> dict[tuple[int, int], bool]:
        """Cells of the heatmap that are drawn as chosen: (row, expert) -> hit."""
        self.settle()
        pixels = self.page.evaluate(READ_CELLS)
        out = {}
        for row, expert, red, green, blue in pixels:
            if green > red + 40 and green > blue + 10:
                out[row, expert] = True
            elif red > blue + 60 and red > green + 30:
                out[row, expert] = False
        return out

    def true_choices(self, step: dict[str, Any]) -> dict[tuple[int, int], bool]:
        """The same from what Python recorded."""
        return {
            (self.layers.index(layer), expert): hit
            for layer, experts, hits in zip(
                step["layers"], step["experts"], step["hit"], strict=True
            )
            for expert, hit in zip(experts, hits, strict=True)
        }


#: The colour of each cell, read from the canvas beside the cell's centre (a miss has a hole there).
READ_CELLS = """() => {
  const canvas = document.querySelector('.lk-map');
  const g = Object.fromEntries(Object.entries(canvas.dataset).map(([k, v]) => [k, Number(v)]));
  const pen = canvas.getContext('2d');
  const rows = Math.round((g.height - g.top - 42) / g.cellHeight);
  const experts = Math.round((g.width - g.left - 8) / g.cellWidth);
  const out = [];
  for (let r = 0; r < rows; r++) for (let e = 0; e < experts; e++) {
    const x = (g.left + (e + 0.2) * g.cellWidth) * g.ratio;
    const y = (g.top + (r + 0.2) * g.cellHeight) * g.ratio;
    out.push([r, e, ...pen.getImageData(Math.round(x), Math.round(y), 1, 1).data.slice(0, 3)]);
  }
  return out;
}"""


def copy_of_notebook(root: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = (c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    parameters.source += f"\nn_tokens = {TOKENS}\nout_dir = 'run'\ntemperature = 0.0\n"
    notebook.cells.append(nbformat.v4.new_code_cell(SAVE_RUN))
    nbformat.write(notebook, root / "live.ipynb")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    chromium_or_skip()
    root, home = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("home")
    copy_of_notebook(root)
    with jupyterlab(root, home) as lab, chromium() as browser:
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(60_000)
        notebook = Opened(page, [], [])
        watch(page, notebook)
        execute(lab, page, root, notebook)
        yield notebook
        shutil.rmtree(home, ignore_errors=True)


def watch(page: Page, notebook: Opened) -> None:
    page.on("pageerror", lambda error: notebook.complaints.append(str(error)))
    page.on("request", lambda request: note_stranger(request.url))

    def note_stranger(url: str) -> None:
        if url.startswith(("http:", "https:", "ws:", "wss:")) and "//127.0.0.1:" not in url:
            notebook.strangers.append(url)


def execute(lab: JupyterLab, page: Page, root: Path, notebook: Opened) -> None:
    lab.open(page, "live.ipynb")
    run_all(page)
    page.locator(".lk-live").wait_for(timeout=120_000)
    page.locator(".jp-Notebook .jp-Cell").last.locator(".jp-InputPrompt", has_text="[1").wait_for(
        timeout=120_000
    )
    notebook.wait_for(f"d.state === 'finished' && Number(d.tokens) > {TOKENS}")
    run = json.loads((root / "run.json").read_text())
    notebook.steps, notebook.layers = run["rows"], run["layers"]
    page.locator(".lk-live").scroll_into_view_if_needed()


def test_the_heatmap_shows_what_the_last_token_chose(opened: Opened) -> None:
    assert int(opened.state("tokens")) == len(opened.steps)
    assert opened.drawn_choices() == opened.true_choices(opened.steps[-1])
    text = opened.part("text").inner_text().replace("⏎", "")
    for step in opened.steps:
        if step["text"].strip():
            assert step["text"].strip() in text


def test_the_scrubber_goes_back_to_any_token(opened: Opened) -> None:
    slider = opened.part("range")
    in_sight = """(token) => {
      const [word, pane] = [token, token.parentElement].map((e) => e.getBoundingClientRect());
      return word.top >= pane.top && word.bottom <= pane.bottom;
    }"""
    opened.part("text").evaluate("(pane) => { pane.style.height = '60px'; }")
    slider.press("Home")
    opened.settle()
    assert opened.page.locator(".lk-current").evaluate(in_sight)
    # in a prompt the last MoE layer routes only the last token: its row stays empty
    assert opened.drawn_choices() == opened.true_choices(opened.steps[0])
    slider.press("ArrowRight")
    slider.press("ArrowRight")
    assert opened.drawn_choices() == opened.true_choices(opened.steps[2])
    opened.part("text").locator("[data-token]").nth(len(opened.steps) - 5).click()
    assert opened.drawn_choices() == opened.true_choices(opened.steps[-5])
    assert slider.input_value() == str(len(opened.steps) - 5)
    assert opened.page.locator(".lk-current").evaluate(in_sight)
    opened.part("last").click()
    assert opened.drawn_choices() == opened.true_choices(opened.steps[-1])


def test_selecting_an_expert_shows_the_tokens_that_chose_it(opened: Opened) -> None:
    row = 1
    expert = opened.steps[-1]["experts"][row][0]
    x, y = opened.cell_centre(row, expert)
    opened.part("map").click(position={"x": x, "y": y})
    opened.settle()
    chose = [i for i, step in enumerate(opened.steps) if (row, expert) in opened.true_choices(step)]
    marked = opened.page.locator(".lk-live .lk-chose")
    assert [int(n) for n in marked.evaluate_all("all => all.map((e) => e.dataset.token)")] == chose
    detail = opened.part("detail").inner_text()
    assert f"Layer {opened.layers[row]}, expert {expert}" in detail
    n_tokens = len(opened.steps)
    assert f"Token {n_tokens} of {n_tokens}," in opened.part("at").inner_text()
    assert f"chosen by {len(chose)} of {len(opened.steps)} tokens" in detail

    opened.part("map").press("Escape")
    assert marked.count() == 0


def test_the_heatmap_works_from_the_keyboard(opened: Opened) -> None:
    heatmap = opened.part("map")
    opened.page.mouse.move(2, 2)
    heatmap.press("Escape")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "Enter"):
        heatmap.press(key)
    opened.settle()
    assert f"Layer {opened.layers[1]}, expert 2" in opened.part("detail").inner_text()
    heatmap.press("Escape")


def test_the_colouring_can_be_chosen(opened: Opened) -> None:
    def shades() -> int:
        look = "all => new Set(all.map((e) => e.style.background)).size"
        return opened.page.locator(".lk-live .lk-token").evaluate_all(look)

    assert shades() > 5
    opened.part("colour").select_option("misses")
    assert "misses" in opened.part("scale").inner_text()
    assert shades() > 3
    opened.part("colour").select_option("none")
    assert shades() == 1
    opened.part("colour").select_option("entropy")


def test_play_with_a_prompt_of_the_picker(opened: Opened) -> None:
    opened.part("domain").select_option("python")
    prompt = opened.part("prompt-box").input_value()
    opened.part("count").fill("12")
    drawn = int(opened.state("drawn"))
    opened.play()
    opened.wait_for("d.state === 'finished'")
    opened.settle()
    opened.page.wait_for_function(
        """(text) => {
          const shown = document.querySelector('.lk-text').textContent;
          return shown.replaceAll('⏎', '').includes(text);
        }""",
        arg=prompt,
    )
    assert "12 tokens generated" in opened.part("message").inner_text()
    assert opened.part("at").evaluate("(e) => e.scrollWidth <= e.clientWidth")  # not cut
    assert opened.page.locator(".lk-live .lk-token:not(.lk-of-prompt)").count() == 12
    assert int(opened.state("drawn")) > drawn


def test_a_count_that_makes_no_sense_is_not_put_right_in_silence(opened: Opened) -> None:
    opened.part("count").fill("99999")
    opened.part("play").click()
    opened.wait_for("d.state === 'error'")
    assert "from 1 to 4096; '99999'" in opened.part("message").inner_text()
    assert opened.part("count").input_value() == "99999"
    opened.part("count").fill("12")


def test_stop_ends_a_run_and_play_works_again(opened: Opened) -> None:
    opened.part("prompt-box").fill("And")
    opened.part("count").fill("400")
    opened.play()
    opened.wait_for("Number(d.tokens) > 4")
    assert opened.part("play").is_disabled()
    opened.part("stop").click()
    opened.wait_for("d.state === 'stopped'")
    opened.settle()
    assert int(opened.state("tokens")) < 400
    assert opened.part("stop").is_disabled()

    opened.part("count").fill("3")
    opened.play()
    opened.wait_for("d.state === 'finished'")
    opened.settle()
    assert opened.page.locator(".lk-live .lk-token:not(.lk-of-prompt)").count() == 3


def test_what_goes_wrong_is_said_in_the_view(opened: Opened) -> None:
    opened.part("prompt-box").fill("")
    opened.part("play").click()
    opened.wait_for("d.state === 'error'")
    assert "prompt is empty" in opened.part("message").inner_text()


def test_the_static_charts_are_drawn(opened: Opened) -> None:
    titles = opened.page.locator(".vega-embed").count()
    assert titles >= 3
    blank = """all => all.filter((c) => {
      const p = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
      return new Set(p.filter((_, i) => i % 4 === 0)).size < 8;
    }).length"""
    assert opened.page.locator(".vega-embed canvas").evaluate_all(blank) == 0


def test_a_dark_theme(opened: Opened) -> None:
    def background() -> int:
        opened.settle()
        return opened.page.evaluate(
            """() => {
              const c = getComputedStyle(document.querySelector('.lk-live')).backgroundColor;
              return Number(c.match(/\\d+/)[0]);
            }"""
        )

    assert background() > 200
    assert opened.state("dark") == "false"
    opened.page.get_by_role("menuitem", name="Settings", exact=True).click()
    opened.page.locator(".lm-Menu-item[data-type=submenu]", has_text="Theme").first.click()
    opened.page.get_by_role("menuitem", name="JupyterLab Dark", exact=True).click()
    opened.wait_for("d.dark === 'true'")
    assert background() < 60


def test_nothing_was_loaded_from_elsewhere_and_no_script_failed(opened: Opened) -> None:
    assert opened.strangers == []
    assert opened.complaints == []
