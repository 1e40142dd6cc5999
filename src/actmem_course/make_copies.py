"""``make labs`` and the first step of ``make course``: ``python -m actmem_course.make_copies``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from actmem.config import ConfigError
from actmem_course.arguments import LabParser
from actmem_course.copies import MINE, Copies, changed, lab_files, move_edits, notebook_files, typed
from actmem_course.strip_solutions import lab_names


def _chosen(names: list[str], given: dict[str, bytes]) -> list[str]:
    """The files that ``names`` mean: lab2, 03, a whole name, or all.  Raises ConfigError on one that means none."""
    found: list[str] = []
    for short in names:
        stem = Path(short).stem
        means = [name for name in given if stem in ("all", Path(name).stem, Path(name).stem.partition("_")[0])]
        if not means:
            raise ConfigError("fresh", f"must be all, or such as lab2 or 03, got {short}")
        found += [name for name in means if name not in found]
    return found


def _python() -> str:
    """How to call this Python here, where .venv may not be activated."""
    on_path = shutil.which("python")
    own = Path(sys.executable)
    return "python" if on_path and Path(on_path) == own else typed(own)


def main() -> int:
    parser = LabParser(
        prog="actmem_course.make_copies", description="Make your own copies of the labs and notebooks, in my/."
    )
    parser.add_argument("what", nargs="*", metavar="labs|notebooks", help="default: both")
    parser.add_argument(
        "--fresh", action="append", default=[], metavar="NAME", help="a new copy of lab2, of 03, or of all"
    )
    args = parser.parse_args()
    kinds = {"labs": lab_files, "notebooks": notebook_files}
    with parser.refusing():
        if unknown := set(args.what) - set(kinds):
            raise ConfigError("what", f"must be labs or notebooks, got {min(unknown)}")
        given = {name: data for kind in args.what or kinds for name, data in kinds[kind]().items()}
        fresh = _chosen(args.fresh, given)
        if not given:
            raise ConfigError("notebooks", "they are in the repository, not in the installed package")
    try:
        _make(Copies(MINE, given), fresh)
    except OSError as error:
        parser.error(f"cannot write {error.filename}: {error.strerror}")
    return 0


def _make(copies: Copies, fresh: list[str]) -> None:
    """Make what is missing and what is asked for anew, and say where it is."""
    kinds = sorted({name.partition("/")[0] for name in copies.given})
    for name in lab_names() if "labs" in kinds else ():
        if moved := move_edits(name):
            print(f"what you wrote in labs/{name}.py is now in {typed(moved)}: go on there")
    new = copies.make()
    for name in fresh:
        if name not in new:
            kept = copies.renew(name)
            print(f"{typed(MINE / name)} is new; yours {f'is now {typed(kept)}' if kept else 'had no edits'}")
    if outdated := copies.outdated():
        print(changed(outdated))
    for kind in kinds:
        made = " (made now)" if any(name.startswith(kind) for name in new) else ""
        print(f"your copies of the {kind} are in {typed(MINE / kind)}{made}")
    if kinds == ["labs"]:
        print(f"write in them, and have one judged: {_python()} {typed(MINE / next(iter(copies.given)))}")


if __name__ == "__main__":
    sys.exit(main())
