"""JupyterLab on loopback and a Chromium that uses it, for tests and measurements."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

from actmem_course.copies import make, notebook_files
from notebooks.source.build import NOTEBOOKS
from tests.patience import SECONDS as PATIENCE_SECONDS

#: No autosave: nothing that changes files by itself.
SETTINGS = {"@jupyterlab/docmanager-extension/plugin": {"autosave": False}}
#: As for `make course`.
CONFIG = NOTEBOOKS / "jupyter"


def not_here(message):
    """Skip, with a warning; on CI nothing is left out."""
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    warnings.warn(message, stacklevel=2)
    pytest.skip(message)


class Lab:
    """A running JupyterLab whose folder holds a learner's copies of the notebooks."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.token = secrets.token_hex(16)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        make(folder, notebook_files())
        work = folder / "notebooks"
        for name, settings in SETTINGS.items():
            path = folder / "settings" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings), encoding="utf-8")
        own = {name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
        own["JUPYTER_CONFIG_PATH"] = str(CONFIG)
        self.log = open(folder / "lab.log", "w", encoding="utf-8")
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser",
                "--ip=127.0.0.1", f"--port={self.port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={work}",
                f"--IdentityProvider.token={self.token}",
                f"--LabApp.user_settings_dir={folder / 'settings'}", f"--LabApp.workspaces_dir={folder / 'workspaces'}",
            ],
            env={**os.environ, **own}, stdout=self.log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._wait()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}?token={self.token}"

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                urllib.request.urlopen(self.url("api/status"), timeout=60).close()
                return
            except OSError:
                time.sleep(0.2)
        self.stop()
        raise RuntimeError("JupyterLab did not start:\n" + (self.folder / "lab.log").read_text(encoding="utf-8")[-2000:])

    def stop(self) -> None:
        """Stop the server and its kernels."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    @contextmanager
    def notebook(self, browser, name: str, width: int = 1280, height: int = 1000):
        """Open the notebook in a new page, and wait for its kernel."""
        context = browser.new_context(viewport={"width": width, "height": height})
        page = context.new_page()
        page.set_default_timeout(1000 * PATIENCE_SECONDS)
        opened = OpenNotebook(page)
        page.goto(self.url(f"doc/tree/{name}") + "&reset")
        wait_for_kernel(page)
        try:
            yield opened
        finally:
            page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
            context.close()


_OPEN = """
async () => {
  const app = window.jupyterapp;
  await app.restored;
  const panel = app.shell.currentWidget;
  await panel.context.ready;
  await panel.sessionContext.ready;
  await panel.sessionContext.session.kernel.info;
}
"""
_RUN_ALL = "() => window.jupyterapp.commands.execute('notebook:run-all-cells')"
#: Code cells with what they display.
OUTPUTS = """
() => window.jupyterapp.shell.currentWidget.content.widgets
  .filter((cell) => cell.model.type === "code")
  .map((cell) => ({ count: cell.model.executionCount, source: cell.model.sharedModel.getSource(), outputs: cell.model.outputs.toJSON() }))
"""

#: Go to a code cell, by its number among code cells; JupyterLab draws a cell when it comes near the screen.
_GO = """
async (number) => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  const cell = notebook.widgets.filter((one) => one.model.type === "code")[number];
  notebook.activeCellIndex = notebook.widgets.indexOf(cell);
  await notebook.scrollToCell(cell, "start");
}
"""

LOST = "Error displaying widget: model not found"


def wait_for_kernel(page) -> None:
    """Wait until the notebook in a page is there and its kernel answers."""
    page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.sessionContext")
    page.evaluate(_OPEN)


class OpenNotebook:
    """A notebook in the browser.  complaints: errors and warnings of the page since it was opened."""

    #: Said by JupyterLab itself on every start, whatever the notebook.
    HARMLESS = ("favicon", "was preloaded using link preload", "Download the React DevTools", "webpack")

    #: anywidget's word for a widget that needed over two seconds to start; ours take changes all the same.
    LATE = "[anywidget] Failed to initialize model."

    def __init__(self, page):
        self.page = page
        self.complaints: list[str] = []
        page.on("pageerror", lambda error: self.LATE in str(error) or self.complaints.append(str(error)))
        page.on("console", self._listen)

    def _listen(self, message) -> None:
        if message.type == "error" and not any(part in message.text for part in self.HARMLESS):
            self.complaints.append(message.text)

    def run_all(self) -> list[dict]:
        """Run all cells; for each code cell its count, source and outputs."""
        self.page.evaluate(_RUN_ALL)
        return self.page.evaluate(OUTPUTS)

    def go_to(self, number: int):
        """Bring a code cell on screen, and return its place in the page."""
        self.page.evaluate(_GO, number)
        return self.page.locator(".jp-Notebook .jp-Cell.jp-mod-active")
