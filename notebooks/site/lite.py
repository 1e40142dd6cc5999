"""The page beside each chapter that runs in the browser: JupyterLite, with no server behind it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

from notebooks.site import book, cache
from notebooks.site.browser import for_browser
from notebooks.site.runtime import PRELOADED, kernel, write_runtime

#: Added to JupyterLite's pages, which have no setting for it.
ADDED = tuple(Path(__file__).with_name(name) for name in ("lite.css", "lite.js"))
_HEAD = '<link rel="stylesheet" href="../lite.css"><script src="../lite.js"></script><link rel="icon" href="favicon.ico">'
PLUGIN = "@jupyterlite/pyodide-kernel-extension:kernel"
CONFIG = {
    "jupyter-lite-schema-version": 0,
    "jupyter-config-data": {
        "appName": "actmem in your browser",
        "exposeAppInBrowser": True,  # for the tests, which run the commands that the menus run
        "litePluginSettings": {
            PLUGIN: {
                "pyodideUrl": "./static/pyodide/pyodide.mjs",
                "disablePyPIFallback": True,
                "loadPyodideOptions": {"packages": list(PRELOADED)},
            }
        },
    },
}
#: The reader's light or dark; no news; nothing saved by itself, so that a fresh page is the stored one.
SETTINGS = {
    "@jupyterlab/apputils-extension:themes": {"adaptive-theme": True},
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}
EXTENSIONS = ("@jupyter-widgets/jupyterlab-manager", "anywidget", "jupyterlab_pygments")
#: Notebooks, and an editor for the labs that they link to.
APPS = ("notebooks", "edit", "tree")


def extensions() -> dict:
    """JupyterLite's setting of what to add: the kernel, and of JupyterLab's extensions those that cells need."""
    installed = Path(sys.prefix) / "share" / "jupyter" / "labextensions"
    return {"ignore_sys_prefix": ["federated_extensions"], "federated_extensions": [str(kernel()), *(str(installed / name) for name in EXTENSIONS)]}


def write_sources(folder: Path) -> None:
    """Fill ``folder`` with what JupyterLite builds from.  Raises cache.SiteError if a part can't be had."""
    files = folder / "files"
    (files / "notebooks").mkdir(parents=True)
    for path in book.chapters():
        notebook = for_browser(nbformat.read(path, as_version=4))
        nbformat.write(notebook, files / "notebooks" / path.name)
    (files / "labs").mkdir()
    for name, source in book.labs().items():
        (files / "labs" / name).write_text(source, encoding="utf-8")
    (folder / "jupyter-lite.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (folder / "overrides.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    (folder / "jupyter_lite_config.json").write_text(json.dumps({"LiteBuildConfig": extensions()}), encoding="utf-8")
    write_runtime(folder / "runtime")


def build_lite(sources: Path, target: Path) -> None:
    """Run JupyterLite over ``sources``; the folder ``target`` is made anew.  Raises cache.SiteError if it fails."""
    command = [sys.executable, "-m", "jupyterlite_core", "build", "--contents", "files", "--output-dir", str(target), "--no-sourcemaps", "--no-unused-shared-packages"]
    for app in APPS:
        command += ["--apps", app]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True)
    if done.returncode:
        log = cache.CACHE / "jupyterlite.log"
        log.write_text(done.stdout + done.stderr, encoding="utf-8")
        raise cache.SiteError(f"JupyterLite failed, see {log}: {(done.stdout + done.stderr).strip().splitlines()[-1]}")
    shutil.copytree(sources / "runtime", target / "static" / "pyodide")
    for path in ADDED:
        shutil.copy(path, target)
    for app in APPS:
        page = target / app / "index.html"
        head, end, rest = page.read_text(encoding="utf-8").partition("</head>")
        page.write_text(head + _HEAD + end + rest, encoding="utf-8")
