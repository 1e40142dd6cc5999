"""JupyterLab on loopback and a Chromium that uses it, for tests and for measuring."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from notebooks.source.build import NOTEBOOKS

#: No news, no autosave: nothing that comes up or changes files by itself.
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}

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
_OUTPUTS = """
() => window.jupyterapp.shell.currentWidget.content.widgets
  .filter((cell) => cell.model.type === "code")
  .map((cell) => ({ count: cell.model.executionCount, source: cell.model.sharedModel.getSource(), outputs: cell.model.outputs.toJSON() }))
"""

_ASK = """
async (code) => {
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  let printed = "", error = "";
  const future = kernel.requestExecute({ code, store_history: false, stop_on_error: false });
  future.onIOPub = ({ header, content }) => {
    if (header.msg_type === "stream") printed += content.text;
    if (header.msg_type === "error") error = `${content.ename}: ${content.evalue}`;
  };
  await future.done;
  return [printed, error];
}
"""

#: Go to the cell that displays a widget; JupyterLab draws a cell when it comes near the screen.
_GO = """
async (model) => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  const shows = (cell) => cell.model.type === "code" && JSON.stringify(cell.model.outputs.toJSON()).includes(model);
  notebook.activeCellIndex = notebook.widgets.findIndex(shows);
  notebook.activeCell.node.dataset.shows = model;
  await notebook.scrollToCell(notebook.activeCell, "start");
}
"""


class Lab:
    """A running JupyterLab whose folder holds a copy of the notebooks."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.token = secrets.token_hex(16)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        work = folder / "notebooks"
        work.mkdir()
        for notebook in NOTEBOOKS.glob("*.ipynb"):
            shutil.copy(notebook, work)
        for name, settings in SETTINGS.items():
            path = folder / "settings" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings), encoding="utf-8")
        own = {name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
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
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                urllib.request.urlopen(self.url("api/status"), timeout=5).close()
                return
            except OSError:
                time.sleep(0.2)
        self.stop()
        raise RuntimeError("JupyterLab did not start:\n" + (self.folder / "lab.log").read_text(encoding="utf-8")[-2000:])

    def stop(self) -> None:
        """End the server, and with it its kernels."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    @contextmanager
    def notebook(self, browser, name: str, width: int = 1280, height: int = 1000):
        """The notebook, open in a new page with a kernel that answers."""
        context = browser.new_context(viewport={"width": width, "height": height})
        page = context.new_page()
        page.set_default_timeout(60_000)
        opened = OpenNotebook(page)
        page.goto(self.url(f"doc/tree/{name}") + "&reset")
        wait_for_kernel(page)
        try:
            yield opened
        finally:
            page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
            context.close()


def wait_for_kernel(page) -> None:
    """Until the notebook in a page is there and its kernel answers."""
    page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.sessionContext")
    page.evaluate(_OPEN)


class OpenNotebook:
    """A notebook in the browser.  complaints: errors and warnings of the page since it was opened."""

    #: Said by JupyterLab itself on every start, whatever the notebook.
    HARMLESS = ("favicon", "was preloaded using link preload", "Download the React DevTools", "webpack")

    def __init__(self, page):
        self.page = page
        self.complaints: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._listen)

    def _listen(self, message) -> None:
        if message.type == "error" and not any(part in message.text for part in self.HARMLESS):
            self.complaints.append(message.text)

    def run_all(self) -> list[dict]:
        """Run all cells; for each code cell its count, source and outputs."""
        self.page.evaluate(_RUN_ALL)
        return self.page.evaluate(_OUTPUTS)

    def ask(self, code: str):
        """What ``code`` prints in the notebook's kernel, as JSON, beside the notebook's cells."""
        printed, error = self.page.evaluate(_ASK, code)
        if error:
            raise RuntimeError(error)
        return json.loads(printed)

    def go_to(self, model: str):
        """Bring the output that displays a widget on screen, and return its place in the page."""
        self.page.evaluate(_GO, model)
        return self.page.locator(f"[data-shows='{model}'] .jp-OutputArea-output").last

    def save_and_reload(self) -> None:
        """Save, and open the page again with the kernel still running."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        self.page.goto(self.page.url.replace("&reset", ""))
        wait_for_kernel(self.page)
