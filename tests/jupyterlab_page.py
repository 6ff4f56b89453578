"""A real JupyterLab on a free local port, and a headless Chromium that has no way to a network."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # names resolve to nothing: whatever asks for a host other than this one fails at once
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def chromium_or_skip() -> str:
    """Path of a Chromium that is installed; skips the test where it or playwright is missing."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("needs playwright: pip install -e '.[test]'")
    for name in _CHROMIUM_NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip("needs Chromium (Debian: apt-get install chromium)")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser."""
    path = chromium_or_skip()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        yield browser
        browser.close()


class JupyterLab:
    """A server over `root` with settings, kernels and workspaces of its own in `home`."""

    def __init__(self, root: Path, home: Path, theme: str = "JupyterLab Light") -> None:
        settings = {
            "apputils-extension/themes": {"theme": theme},
            "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
            # cells out of sight stay in the page, so that a test can look at them
            "notebook-extension/tracker": {"windowingMode": "none"},
        }
        for name, values in settings.items():
            path = home / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        self._token = secrets.token_hex(16)
        self._port = _free_port()
        env = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(home / "config"),
            "JUPYTER_DATA_DIR": str(home / "data"),
            "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
            "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        }
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
        command += [f"--port={self._port}", "--ServerApp.ip=127.0.0.1", "--port-retries=0"]
        command += [f"--IdentityProvider.token={self._token}", f"--ServerApp.root_dir={root}"]
        self.log = home / "server.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def wait(self, timeout_s: float = 120) -> None:
        """Return when the server answers; fail with its log when it does not."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(self._url("api")).close()
                return
            time.sleep(0.2)
        raise AssertionError(f"JupyterLab did not start:\n{self.log.read_text()}")

    def open(self, page: Page, notebook: str) -> None:
        """Open a notebook and wait until its kernel is idle."""
        page.goto(self._url(f"lab/tree/{notebook}"))
        page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=120_000)
        page.get_by_text("| Idle").wait_for(timeout=120_000)

    def close(self) -> None:
        """Stop the server and with it its kernels."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}/{path}?token={self._token}"


@contextlib.contextmanager
def jupyterlab(root: Path, home: Path, **options: Any) -> Iterator[JupyterLab]:
    """A running `JupyterLab`."""
    lab = JupyterLab(root, home, **options)
    try:
        lab.wait()
        yield lab
    finally:
        lab.close()


def run_all(page: Page) -> None:
    """Run all cells, and wait until the last code cell has its number."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
