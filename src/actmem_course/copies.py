"""A learner's own copies of the labs and notebooks, in ``my/``.  ``make_copies`` is the command.

1. What is in ``my/`` belongs to the learner.  A copy is made once; only ``--fresh`` makes a new one, and
   keeps the old one under another name.
2. Nobody has to know about it: whoever runs ``labs/lab2_….py`` gets the copy judged, and answers that
   were written there are moved into ``my/labs``.  So git never sees a learner's work, and a pull can't conflict.
3. ``my/.given.json`` remembers what each copy was made from, to say when an exercise has changed since.

This is the only code that writes into ``my/``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from itertools import count
from pathlib import Path

from actmem_course.files import read_object
from actmem_course.launch import LABS
from actmem_course.strip_solutions import lab_names, lab_source

NOTEBOOKS = LABS.parent / "notebooks"
#: The learner's folder: in the checkout, or where one works if the package is installed without.
MINE = (LABS.parent if LABS.is_dir() else Path.cwd()) / "my"


def lab_files() -> dict[str, bytes]:
    """The labs as a learner gets them, by their path in ``my/``."""
    return {f"labs/{name}.py": lab_source(name).encode() for name in lab_names()}


def notebook_files() -> dict[str, bytes]:
    """The chapters by their path in ``my/``; none without a checkout."""
    return {f"notebooks/{path.name}": path.read_bytes() for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))}


class Copies:
    """Copies in ``folder`` of ``given``: contents by path."""

    def __init__(self, folder: Path, given: dict[str, bytes]):
        self.folder, self.given = folder, given
        self._record_file = folder / ".given.json"

    def make(self) -> list[str]:
        """Copy what isn't there yet, and return that."""
        missing = [name for name in self.given if not os.path.lexists(self.folder / name)]
        for name in missing:
            self._write(name, self.folder / name, self.given[name])
        return missing

    def renew(self, name: str) -> Path | None:
        """Put a new copy in place of the old one.  Returns where the old one is now; None if it had no edits."""
        path = self.folder / name
        kept = None
        if os.path.lexists(path) and not self._untouched(name):
            kept = _beside(path)
            path.rename(kept)
        path.unlink(missing_ok=True)
        self._write(name, path, self.given[name])
        return kept

    def take(self, name: str, contents: bytes) -> Path:
        """Store what a learner wrote elsewhere: as the copy, or beside it if that has edits of its own."""
        path = self.folder / name
        if os.path.lexists(path):
            if self._untouched(name):
                path.unlink()
            else:
                path = _beside(path)
        self._write(name, path, contents)
        return path

    def outdated(self) -> list[str]:
        """Copies of something that has changed since they were made."""
        record = read_object(self._record_file)
        return [
            name
            for name, contents in self.given.items()
            if (self.folder / name).is_file()
            and record.get(name, _digest(contents)) != _digest(contents)
            and (self.folder / name).read_bytes() != contents
        ]

    def _untouched(self, name: str) -> bool:
        path = self.folder / name
        untouched = read_object(self._record_file).get(name), _digest(self.given[name])
        return path.is_file() and _digest(path.read_bytes()) in untouched

    def _write(self, name: str, path: Path, contents: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:  # fails if someone was faster
            file.write(contents)
        if path == self.folder / name:
            record = read_object(self._record_file) | {name: _digest(self.given[name])}
            self._record_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _digest(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


def _beside(path: Path) -> Path:
    """A name that is free: lab2_2.py beside lab2.py, then lab2_3.py."""
    numbered = (path.with_stem(f"{path.stem}_{number}") for number in count(2))
    return next(other for other in numbered if not os.path.lexists(other))


def move_edits(name: str, labs: Path = LABS, mine: Path = MINE) -> Path | None:
    """Move what a learner wrote in labs/ into ``mine``, and put the lab back as it was.  Returns where it is now.

    None if there is nothing to move.
    """
    tracked = labs / f"{name}.py"
    if not tracked.is_file() or _is_as_given(tracked):
        return None
    contents = tracked.read_bytes()
    copy = Copies(mine, lab_files()).take(f"labs/{name}.py", contents)
    if copy.read_bytes() == contents == tracked.read_bytes():  # a full disk must lose nothing
        tracked.write_text(lab_source(name), encoding="utf-8")
    return copy


def _is_as_given(tracked: Path) -> bool:
    return tracked.read_text(encoding="utf-8", errors="replace") == lab_source(tracked.stem)


def file_to_judge(script: Path, may_write: bool, labs: Path = LABS, mine: Path = MINE) -> tuple[Path, str]:
    """What to judge when a learner runs ``script``, and one line to say about it, or none.

    A lab in labs/ leads to the learner's copy, which is made if there is none; what was written in
    labs/ is moved there.  may_write: False where several processes ask at once.
    """
    name, script = script.stem, script.resolve()
    copy, copies = mine / "labs" / f"{name}.py", Copies(mine, lab_files())
    if script != (labs / f"{name}.py").resolve() or name not in lab_names():
        if f"labs/{name}.py" in copies.outdated() and script == copy.resolve():
            return script, changed([f"labs/{name}.py"])
        return script, ""
    if may_write and (moved := move_edits(name, labs, mine)):
        return moved, f"what you wrote in {typed(script)} is now in {typed(moved)}: go on there"
    if not _is_as_given(script):
        return script, f"{typed(script)} belongs to the course: make labs moves what you wrote there to {typed(copy)}"
    if copy.is_file():
        return copy, f"judging your copy, {typed(copy)}"
    if not may_write:
        return script, f"{typed(script)} belongs to the course: make labs gives you a copy to write in"
    copies.make()
    return copy, f"{typed(copy)} is your copy of this lab: write there, and run python {typed(copy)}"


def typed(path: Path) -> str:
    """A path as one types it here."""
    path = path if path.is_absolute() else Path.cwd() / path
    short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return shlex.quote(str(short))


def changed(names: list[str]) -> str:
    """What to say about copies that are ``outdated``."""
    short = " ".join(Path(name).stem.partition("_")[0] for name in names)
    make = "make labs" if all(name.startswith("labs/") for name in names) else "make course"
    in_checkout = f"{make} FRESH={shlex.quote(short)}"
    command = in_checkout if LABS.is_dir() else f"python -m actmem_course.make_copies --fresh {short}"
    return f"changed since your copy was made: {', '.join(names)}; {command} gives the new one and keeps yours"
