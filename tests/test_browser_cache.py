"""Notebook 03 in a real JupyterLab: the budget slider moves the marker and the figures with it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest
from jupyterlab_page import chromium, chromium_or_skip, jupyterlab, run_all

if TYPE_CHECKING:
    from playwright.sync_api import Page

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "03_cache_curves.ipynb"

pytestmark = pytest.mark.browser

#: Columns of the first panel in which a slider's move changed something, in CSS pixels.
CHANGED = """([before, after]) => new Promise((done) => {
  const load = (url) => new Promise((f) => {
    const i = new Image(); i.onload = () => f(i); i.src = url;
  });
  Promise.all([load(before), load(after)]).then(([a, b]) => {
    const pixels = [a, b].map((image) => {
      const canvas = document.createElement('canvas');
      canvas.width = image.width; canvas.height = image.height;
      const pen = canvas.getContext('2d'); pen.drawImage(image, 0, 0);
      return pen.getImageData(0, 0, image.width, image.height / 2).data;
    });
    const columns = new Set();
    for (let i = 0; i < pixels[0].length; i += 4) {
      if (pixels[0][i] !== pixels[1][i]) columns.add((i / 4) % a.width);
    }
    done([...columns].map((x) => x / a.width));
  });
})"""


@pytest.fixture(scope="module", params=["JupyterLab Light", "JupyterLab Dark"])
def page(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    chromium_or_skip()
    root, home = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("home")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = (c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    parameters.source += "\nn_tokens = 12\nout_dir = 'run'\n"
    stop = next(i for i, c in enumerate(notebook.cells) if c.source.endswith("curve_chart"))
    notebook.cells = notebook.cells[: stop + 1]
    nbformat.write(notebook, root / "curves.ipynb")
    with jupyterlab(root, home, theme=request.param) as lab, chromium() as browser:
        page = browser.new_page(viewport={"width": 1400, "height": 1100})
        page.set_default_timeout(60_000)
        lab.open(page, "curves.ipynb")
        run_all(page)
        page.locator(".vega-bind input[type=range]").wait_for(timeout=120_000)
        yield page
        if folder := os.environ.get("LABKIT_SCREENSHOTS"):
            name = request.param.replace(" ", "-").lower()
            page.locator(".vega-embed").screenshot(path=f"{folder}/curves-{name}.png")
        shutil.rmtree(home, ignore_errors=True)


def picture(page: Page) -> str:
    page.evaluate("() => new Promise((f) => requestAnimationFrame(() => requestAnimationFrame(f)))")
    return page.locator(".vega-embed canvas").evaluate("(canvas) => canvas.toDataURL()")


def test_the_slider_moves_the_marker_and_the_figures(page: Page) -> None:
    slider = page.locator(".vega-bind input[type=range]")
    low, high, step = (float(slider.get_attribute(name) or 0) for name in ("min", "max", "step"))
    assert 0 < low < high
    before = picture(page)
    value = low + round((high - low) * 0.75 / step) * step
    slider.fill(str(value))
    assert float(page.locator(".vega-bind").inner_text().split()[-1]) == pytest.approx(
        value, rel=0.01
    )
    changed = page.evaluate(CHANGED, [before, picture(page)])
    # The marker leaves one place among the curves for another, and the figures are right of them.
    assert any(0.1 < x < 0.45 for x in changed)
    assert any(0.5 < x < 0.75 for x in changed)
    assert any(x > 0.8 for x in changed)
    slider.fill(str(low))
    assert picture(page) != before
    slider.press("End")
    assert float(slider.input_value()) == high  # no further than its last whole step


def test_the_chart_is_light_on_a_light_page_and_dark_on_a_dark_one(page: Page) -> None:
    dark = page.evaluate("() => document.body.dataset.jpThemeLight === 'false'")
    corner = page.locator(".vega-embed canvas").evaluate(
        "(canvas) => [...canvas.getContext('2d').getImageData(2, 2, 1, 1).data.slice(0, 3)]"
    )
    assert (max(corner) < 80) if dark else (min(corner) > 240)
