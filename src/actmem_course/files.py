"""Files that labs write. They are checked before any work is done, and written under another name and then renamed."""

import argparse
import json
import os
from pathlib import Path

from actmem.config import ConfigError


def check_files(args: argparse.Namespace, *names: str) -> None:
    """Check that the files that options such as --json name can be written, and that they are different files.

    Every rank compares the paths; only rank 0 tries to write.

    Args:
        args: the parsed options.
        names: names of the options in ``args`` whose values are paths or None, such as "json".

    Raises: ConfigError if a file can't be written, or if two options name the same file.
    """
    named: dict[Path, str] = {}
    for name in names:
        path = getattr(args, name)
        if path is None:
            continue
        try:
            if (other := named.setdefault(path.resolve(), name)) != name:
                raise ConfigError(name, f"{path} is the file of --{other} already")
            if int(os.environ.get("RANK", "0")) == 0:
                _try_to_write(path)
        except (OSError, RuntimeError) as error:  # resolve() raises RuntimeError on links that lead to themselves
            reason = error.strerror if isinstance(error, OSError) else "its links lead to themselves"
            raise ConfigError(name, f"cannot write {path}: {reason}") from None


def _try_to_write(path: Path) -> None:
    """Raise OSError if ``path``, or the file beside it, can't be written; an existing file keeps its contents."""
    for place in {path, _beside(path)}:
        existed = place.exists()
        with open(place, "a"):
            pass
        if not existed:
            place.unlink()


def write_text(path: Path, text: str) -> None:
    """Replace the contents of a file by ``text``; if that fails (the disk is full), the old contents stay.

    A regular file is written under another name and then renamed; a device or a pipe is written directly.

    Args:
        path: the file.
        text: its new contents, which are written in UTF-8.

    Raises: OSError, with ``path`` as its file name.
    """
    beside = _beside(path)
    try:
        beside.write_text(text, encoding="utf-8")
        if beside != path:
            beside.replace(path.resolve())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:  # also if a signal ends the process here
        if beside != path:
            beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """Return where contents are written before they replace ``path``; itself for a device or a pipe."""
    if path.exists() and not path.is_file():  # a device or a pipe
        return path
    return path.resolve().with_name(path.name + ".part")


def read_object(path: Path) -> dict:
    """Return the JSON object in a file; an empty dict if the file can't be read or has no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the last: nested too deeply
        return {}
    return value if isinstance(value, dict) else {}
