"""Take the picture of the live view that the README shows, from notebook 02 in JupyterLab.

    python tests/bench/live_picture.py [--out data/pictures/live_heatmap.png] [--dark]

It writes a PNG of at most 256 colours.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

from jupyterlab_page import chromium, jupyterlab, run_all  # noqa: E402

NOTEBOOK = TESTS.parent / "notebooks" / "02_live_routing.ipynb"
OUT = TESTS.parent / "data" / "pictures" / "live_heatmap.png"


def main() -> None:
    """Run the notebook, play a Python prompt, go back to a token, and take the picture."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=OUT)
    options.add_argument("--dark", action="store_true")
    chosen = options.parse_args()
    theme = "JupyterLab Dark" if chosen.dark else "JupyterLab Light"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        root, home = Path(name) / "lab", Path(name) / "home"
        root.mkdir()
        shutil.copy(NOTEBOOK, root / "live.ipynb")
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_bytes(small(take(root, home, theme)))


def take(root: Path, home: Path, theme: str) -> bytes:
    """Return a PNG of the view."""
    with jupyterlab(root, home, theme=theme) as lab, chromium() as browser:
        page = browser.new_page(viewport={"width": 1600, "height": 1100})
        page.set_default_timeout(120_000)
        lab.open(page, "live.ipynb")
        run_all(page)
        view = page.locator(".lk-live")
        view.wait_for()
        last = page.locator(".jp-Notebook .jp-Cell .jp-InputPrompt", has_text="[14]:")
        last.wait_for(timeout=300_000)
        view.locator(".lk-domain").select_option("python")
        view.locator(".lk-play").click()
        page.wait_for_function(
            """() => {
              const d = document.querySelector('.lk-live').dataset;
              return d.run === '2' && d.state === 'finished';
            }"""
        )
        tokens = view.locator(".lk-token")
        tokens.nth(readable(tokens.all_inner_texts())).click()
        page.mouse.move(2, 2)
        page.evaluate("() => new Promise((done) => setTimeout(done, 500))")
        view.scroll_into_view_if_needed()
        return view.screenshot()


def readable(texts: list[str]) -> int:
    """Index of a token near the end that has a word to show, and not spaces or a bracket alone."""
    near = range(len(texts) - 12, 0, -1)
    return next(i for i in near if sum(letter.isalpha() for letter in texts[i]) >= 4)


def small(png: bytes) -> bytes:
    """The same picture with a palette."""
    with Image.open(io.BytesIO(png)) as image:
        flat = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    out = io.BytesIO()
    flat.save(out, "PNG", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    main()
