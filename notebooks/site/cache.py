"""What `make site` takes from registries: fetched once, kept in build/cache, never asked for again."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "cache"
#: JupyterLite's kernel.  Only unpacked: where it is installed, JupyterLab tries to load it and complains.
KERNEL = {"jupyterlite-pyodide-kernel": "0.8.6"}
#: The Pyodide that this kernel was made for, its Python, and the MathJax that Sphinx writes its pages for.
PYODIDE, PYTHON = "pyodide@314.0.6", "3.14"
MATHJAX = "mathjax@3.2.2"


class SiteError(RuntimeError):
    """The site can't be built.  The message is one line that says what is missing."""


def npm_package(name: str) -> Path:
    """The unpacked folder of an npm package, given as ``name@version``.

    Raises SiteError if it is not in the cache and npm is missing or can't get it.
    """
    folder = CACHE / "npm" / name.replace("@", "-")
    if folder.exists():
        return folder
    if shutil.which("npm") is None:
        raise SiteError(f"npm is missing, and {name} comes from the npm registry: install Node.js with npm (Debian: apt-get install npm)")
    with _private_folder(folder.parent) as download:
        done = subprocess.run(["npm", "pack", "--silent", name], cwd=download, capture_output=True, text=True)
        archives = list(download.glob("*.tgz"))
        if done.returncode or len(archives) != 1:
            raise SiteError(f"npm could not get {name} (no network?): {_last_line(done.stderr or done.stdout)}")
        with tarfile.open(archives[0]) as archive:
            safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # newer Pythons have it
            archive.extractall(download, **safe)
        _put(download / "package", folder)
    return folder


@contextmanager
def _private_folder(parent: Path) -> Iterator[Path]:
    """A folder of this process alone: two builds may fetch the same thing at once."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="download-", dir=parent) as folder:
        yield Path(folder)


def _put(made: Path, folder: Path) -> None:
    """Rename to ``folder``, unless another process was first with the same contents."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def wheels(requirements: dict[str, str]) -> list[Path]:
    """Wheels of pure Python from the package index, by name and version, for any machine.

    Raises SiteError if one is not in the cache and pip can't get it.
    """
    wanted = sorted(f"{name}=={version}" for name, version in requirements.items())
    folder = CACHE / "wheels" / hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:16]
    if not folder.exists():
        pure = ["--no-deps", "--only-binary=:all:", "--implementation=py", "--abi=none", "--platform=any", f"--python-version={PYTHON}"]
        with _private_folder(folder.parent) as download:
            _pip("download", *pure, "--dest", str(download / "wheels"), *wanted)
            _put(download / "wheels", folder)
    return sorted(folder.glob("*.whl"))


def own_wheel(folder: Path) -> Path:
    """This package as a wheel in ``folder``, made without network by the setuptools that torch brings."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, source / name)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _pip(*arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*pip, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SiteError(f"pip {arguments[0]} failed (no network?): {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "ERROR" in line.upper()), lines[-1] if lines else "it said nothing")


def cut(wheel: Path, target: Path, keep: tuple[str, ...]) -> Path:
    """A copy of a wheel with only those files whose paths begin with one of ``keep``, and its metadata."""
    made = target / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as part:
        for item in whole.infolist():
            if item.filename.startswith(keep) or ".dist-info/" in item.filename:
                part.writestr(zipfile.ZipInfo(item.filename), whole.read(item), zipfile.ZIP_DEFLATED)  # no dates
    return made
