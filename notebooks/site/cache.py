"""What `make site` takes from the npm registry: fetched once, kept in build/cache, never asked for again."""

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "cache"
#: The MathJax that Sphinx writes its pages for.
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


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "ERROR" in line.upper()), lines[-1] if lines else "it said nothing")
