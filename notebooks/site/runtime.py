"""The Python that runs in the reader's browser: Pyodide, and every wheel that the notebooks import.

Pyodide's npm package has the interpreter and a list (the lock file) of packages that it would
fetch from a server of its own.  Here the list names only wheels beside it.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import tempfile
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from notebooks.site import cache

#: What the kernel loads before the first cell; everything else comes in as what these need.
PRELOADED = ("micropip", "piplite", "ipykernel", "comm", "pyodide-kernel", "jedi", "ipython", "actmem", "ipywidgets", "anywidget", "plotly")
#: Wheels from the package index that nothing else leads to.
ROOTS = ("micropip", "ipython", "ipython-pygments-lexers", "comm", "jedi", "ipywidgets", "anywidget", "plotly", "rich")
#: Wheels that come with JupyterLite's kernel.
KERNEL_WHEELS = ("piplite", "ipykernel", "pyodide_kernel")
#: Required by ipywidgets for servers; the page has their JavaScript as extensions.
LEFT_OUT = {"widgetsnbextension", "jupyterlab-widgets"}
#: Of plotly only plotly.js is used: 1.5 of 10 MB, and 1,500 files fewer to unpack at each start.
PLOTLY_PARTS = ("plotly/__init__.py", "plotly/package_data/plotly.min.js", "_plotly_utils/")
#: The interpreter itself, of Pyodide's npm package.
PYTHON_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
_BROWSER: dict[str, Any] = {
    **default_environment(), "extra": "", "sys_platform": "emscripten", "platform_system": "Emscripten",
    "python_version": cache.PYTHON, "python_full_version": f"{cache.PYTHON}.0",
}  # fmt: skip


def write_runtime(folder: Path) -> None:
    """Fill ``folder`` with Pyodide, the wheels and the lock file.  Raises cache.SiteError if a part can't be had."""
    npm = cache.npm_package(cache.PYODIDE)
    folder.mkdir(parents=True)
    for name in PYTHON_FILES:
        shutil.copy(npm / name, folder)
    lock = json.loads((npm / "pyodide-lock.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as temporary:
        own = Path(temporary)
        found = [*cache.wheels(versions(lock["packages"])), *_kernel_wheels(own / "kernel"), cache.own_wheel(own / "course")]
        for wheel in found:
            if wheel.name.startswith("plotly-"):
                cache.cut(wheel, folder, PLOTLY_PARTS)
            else:
                shutil.copy(wheel, folder)
    lock["packages"] = _entries(sorted(folder.glob("*.whl")))
    (folder / "pyodide-lock.json").write_text(json.dumps(lock, indent=1), encoding="utf-8")


def versions(locked: dict[str, dict]) -> dict[str, str]:
    """Name and version of every wheel that ROOTS lead to: Pyodide's own choice, or else what is installed here."""
    known: dict[str, dict] = {canonicalize_name(name): entry for name, entry in locked.items()}
    found: dict[str, str] = {}
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        if name in found or name in LEFT_OUT:
            continue
        if name in known:
            found[name] = known[name]["version"]
            waiting += map(canonicalize_name, known[name]["depends"])
        else:
            found[name] = importlib.metadata.version(name)
            waiting += _required(importlib.metadata.requires(name) or ()) if name != "plotly" else ()
    return found


def _required(requirements: list[str] | tuple[str, ...]) -> list[str]:
    """The names of those requirements that hold in a browser."""
    parsed = map(Requirement, requirements)
    return [canonicalize_name(one.name) for one in parsed if one.marker is None or one.marker.evaluate(_BROWSER)]


def kernel() -> Path:
    """The wheel of JupyterLite's kernel, which is also its extension."""
    (wheel,) = cache.wheels(cache.KERNEL)
    return wheel


def _kernel_wheels(folder: Path) -> list[Path]:
    """The wheels that are inside the kernel's extension, put into ``folder``."""
    folder.mkdir()
    found = []
    with zipfile.ZipFile(kernel()) as archive:
        for name in KERNEL_WHEELS:
            inside = next(file for file in archive.namelist() if f"/static/pypi/{name}-" in file)
            found.append(folder / Path(inside).name)
            found[-1].write_bytes(archive.read(inside))
    return found


def _entries(found: list[Path]) -> dict[str, dict]:
    """The lock file's entry for each wheel, whose file lies beside the lock file."""
    entries: dict[str, dict] = {}
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
        name, version = canonicalize_name(wheel.name.split("-")[0]), wheel.name.split("-")[1]
        modules = {file.split("/")[0].removesuffix(".py") for file in names if file.endswith(".py") and ".data/" not in file}
        entries[name] = {
            "name": name, "version": version, "file_name": wheel.name, "install_dir": "site", "package_type": "package",
            "sha256": sha256(wheel.read_bytes()).hexdigest(), "imports": sorted(modules), "unvendored_tests": False,
            "depends": _required(re.findall(r"^Requires-Dist: (.+)$", metadata.partition("\n\n")[0], re.MULTILINE)),
        }  # fmt: skip
    for entry in entries.values():
        # ipython without its terminal, actmem without torch: what is not there is not used.
        entry["depends"] = [name for name in entry["depends"] if name in entries]
    return entries
