"""Pages of a tour: each executed notebook as HTML, and an index that says what each found.

The pages hold no script and load nothing, so they read the same from a disk, a mail attachment or
a site that runs no script. A chart or widget appears as the PNG that its output carries.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from nbconvert import HTMLExporter
from PIL import Image
from pygments.formatters import HtmlFormatter
from traitlets.config import Config

from labkit.experiment.findings import Finding

#: A cell with this tag gives the index its picture; without one the first picture is taken.
THUMBNAIL_TAG = "thumbnail"
_THUMBNAIL_WIDTH_PX = 640

#: PNG before widgets and scripts: those need a kernel or a network to show anything.
_MIME_PRIORITY = [
    "text/html",
    "image/svg+xml",
    "image/png",
    "image/jpeg",
    "text/markdown",
    "text/latex",
    "text/plain",
]

_CSS = """
:root { color-scheme: light dark; --ink: #1d2733; --dim: #5b6875; --paper: #fff; --line: #d9dfe5;
  --tint: #f4f6f8; --link: #0b62a8; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --dim: #9aa7b3; --paper: #15191e;
  --line: #343c45; --tint: #1e242b; --link: #7ab8f5; --bad: #ff8a80; } }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 0 auto; padding: 1.5rem; overflow-wrap: break-word; }
a { color: var(--link); } h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin: 0 0 .4rem; }
.dim { color: var(--dim); font-size: .9rem; } .bad { color: var(--bad); }
pre { white-space: pre-wrap; background: var(--tint); padding: .6rem .8rem; border-radius: 4px;
  overflow-x: auto; font-size: .85rem; }
img { max-width: 100%; height: auto; }
article { display: grid; grid-template-columns: 18rem 1fr; gap: 1.2rem; padding: 1.2rem 0;
  border-top: 1px solid var(--line); }
article img { border: 1px solid var(--line); border-radius: 4px; background: #fff; }
@media (max-width: 44rem) { article { grid-template-columns: 1fr; } }
table { border: 0; border-collapse: collapse; font-size: .85rem; display: block; overflow-x: auto;
  margin: 1rem 0; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
.jp-InputPrompt, .jp-OutputPrompt, .prompt, .anchor-link { display: none; }
.jp-RenderedHTMLCommon img, .output_png img, .jp-OutputArea-output img { background: #fff; }
"""


@dataclass(frozen=True)
class Entry:
    """One notebook on the index page; `name` is its directory within the tour's."""

    name: str
    wall_s: float
    finding: Finding | None = None
    error: str | None = None
    peak_rss_mib: float | None = None
    files: Sequence[str] = field(default_factory=tuple)


def export_html(executed: Path, title: str, back: str | None = None) -> Path:
    """Write an executed notebook as a page beside it; `back` is a link to put on top."""
    notebook = nbformat.read(executed, as_version=4)
    notebook.metadata.pop("widgets", None)  # saved widget state asks for a script from the network
    config = Config()
    config.NbConvertBase.display_data_priority = _MIME_PRIORITY
    exporter = HTMLExporter(config=config, template_name="basic")
    body, _ = exporter.from_notebook_node(notebook)
    link = f'<p class="dim"><a href="{html.escape(back)}">All notebooks</a></p>' if back else ""
    page = executed.with_suffix(".html")
    page.write_text(_page(title, link + body, _code_css()), encoding="utf-8")
    return page


def write_thumbnail(executed: Path, target: Path) -> bool:
    """Write the picture that stands for an executed notebook; False when it shows none."""
    picture = _picture_of(nbformat.read(executed, as_version=4))
    if picture is None:
        return False
    with Image.open(io.BytesIO(picture)) as image:
        image.thumbnail((_THUMBNAIL_WIDTH_PX, 4 * _THUMBNAIL_WIDTH_PX))
        image.save(target, optimize=True)
    return True


def write_index(directory: Path, entries: Sequence[Entry], facts: Sequence[str]) -> Path:
    """Write `index.html` into `directory`; `facts` are lines on how the tour was run."""
    failed = sum(entry.error is not None for entry in entries)
    state = f'<p class="bad">{failed} of {len(entries)} notebooks failed.</p>' if failed else ""
    head = f'<p class="dim">{"<br>".join(map(html.escape, facts))}</p>'
    cards = "".join(_card(directory, entry) for entry in entries)
    page = directory / "index.html"
    page.write_text(
        _page("labkit tour", f"<h1>labkit tour</h1>{head}{state}{cards}"), encoding="utf-8"
    )
    return page


def _card(directory: Path, entry: Entry) -> str:
    name = html.escape(entry.name)
    title = html.escape(entry.finding.title) if entry.finding else name
    links = [
        f'<a href="{name}/{html.escape(file)}">{html.escape(_label(file))}</a>'
        for file in entry.files
        if (directory / entry.name / file).is_file()
    ]
    picture = ""
    if (directory / entry.name / "thumbnail.png").is_file():
        picture = (
            f'<a href="{name}/{name}.html"><img src="{name}/thumbnail.png" '
            f'alt="A picture from the notebook {name}"></a>'
        )
    said = f"<p>{html.escape(entry.finding.finding)}</p>" if entry.finding else ""
    if entry.error is not None:
        said = f'<p class="bad">failed</p><pre>{html.escape(entry.error)}</pre>' + said
    elif entry.finding is None:
        said = '<p class="dim">This notebook wrote no finding.</p>'
    cost = f"{name}, {entry.wall_s:.0f} s"
    if entry.peak_rss_mib is not None:
        cost += f", peak memory {entry.peak_rss_mib:.0f} MiB"
    return (
        f"<article><div>{picture}</div><div><h2>{title}</h2>{said}"
        f'<p>{" · ".join(links)}</p><p class="dim">{cost}</p></div></article>'
    )


def _label(file: str) -> str:
    return {".html": "read", ".ipynb": "notebook"}.get(Path(file).suffix, file)


def _picture_of(notebook: nbformat.NotebookNode) -> bytes | None:
    tagged = [c for c in notebook.cells if THUMBNAIL_TAG in c.metadata.get("tags", [])]
    for cell in [*tagged, *notebook.cells]:
        for output in cell.get("outputs", []):
            data: Any = output.get("data", {}).get("image/png")
            if data:
                return base64.b64decode("".join(data))
    return None


def _code_css() -> str:
    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    # Backgrounds come from the page, so that code looks like the rest in both schemes.
    light, dark = (re.sub(r"\.highlight \{ background[^}]*\}", "", css) for css in (light, dark))
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def _page(title: str, body: str, css: str = "") -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_CSS}{css}</style></head>\n"
        f"<body>{body}</body></html>\n"
    )
