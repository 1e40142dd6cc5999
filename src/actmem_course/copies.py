"""Copy the labs and notebooks to ``my/``, where a learner works on them (``make labs``, ``make course``).

Each file is copied once and never overwritten: ``--fresh`` renames the learner's file and makes a new copy.
"""

import argparse
import os
import shlex
import shutil
import sys
from itertools import count
from pathlib import Path

from actmem.config import ConfigError
from actmem_course.arguments import LabParser
from actmem_course.launch import LABS
from actmem_course.strip_solutions import lab_names, lab_source

NOTEBOOKS = LABS.parent / "notebooks"
#: The learner's folder: in the checkout, or in the working directory if the package is installed without a checkout.
MINE = (LABS.parent if LABS.is_dir() else Path.cwd()) / "my"


def lab_files() -> dict[str, bytes]:
    """Return the content of each lab's exercise file, by its path below the learner's folder: "labs/….py"."""
    return {f"labs/{name}.py": lab_source(name).encode() for name in lab_names()}


def notebook_files() -> dict[str, bytes]:
    """Return the content of each chapter's notebook, by its path below the learner's folder: "notebooks/….ipynb".

    Returns: the dict; empty if the package is installed without a checkout, which has the notebooks.
    """
    return {f"notebooks/{path.name}": path.read_bytes() for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))}


def make(folder: Path, given: dict[str, bytes]) -> list[str]:
    """Write the files that aren't in ``folder`` yet, and return their paths.

    Args:
        folder: the folder to write to, such as ``MINE``; folders that are missing are made.
        given: the content of each file by its path below ``folder``, from ``lab_files`` or ``notebook_files``.
    """
    missing = [name for name in given if not os.path.lexists(folder / name)]
    for name in missing:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with open(folder / name, "xb") as file:  # fails if someone was faster
            file.write(given[name])
    return missing


def set_aside(path: Path) -> Path:
    """Rename a file to a free name: lab2_2.py beside lab2.py, then lab2_3.py. Returns the new path."""
    numbered = (path.with_stem(f"{path.stem}_{number}") for number in count(2))
    free = next(other for other in numbered if not os.path.lexists(other))
    path.rename(free)
    return free


def typed(path: Path) -> str:
    """Return a path in the form to type in a shell: quoted, and relative if it is below the working directory."""
    path = path if path.is_absolute() else Path.cwd() / path
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def main() -> int:
    """Make the copies that the command line asks for, and print the folder that has them.  Returns the exit code 0."""
    parser = LabParser(
        prog="actmem_course.copies", description="Make your own copies of the labs and notebooks, in my/."
    )
    parser.add_argument("what", choices=("labs", "course"), help="course: the notebooks too")
    parser.add_argument("--fresh", action="append", default=[], metavar="NAME", help="a new copy, of lab2 or of 03")
    args = parser.parse_args()
    given = lab_files() | (notebook_files() if args.what == "course" else {})
    try:
        with parser.refusing():
            _make_fresh(args, given)
        new = make(MINE, given)
    except OSError as error:
        parser.error(f"cannot write {error.filename}: {error.strerror}")
    print(f"your copies are in {typed(MINE)}{' (made now)' if new else ''}")
    if args.what == "labs":
        python = "python" if shutil.which("python") == sys.executable else typed(Path(sys.executable))
        print(f"write in them, and have one judged: {python} {typed(MINE / next(iter(given)))}")
    return 0


def _make_fresh(args: argparse.Namespace, given: dict[str, bytes]) -> None:
    """Set aside the copies that ``--fresh`` names, so that new ones are made.  Raises ConfigError on another name."""
    for short in args.fresh:
        means = [name for name in given if Path(short).stem in (Path(name).stem, Path(name).stem.partition("_")[0])]
        if not means:
            raise ConfigError("fresh", f"must be such as lab2 or 03, got {short}")
        for name in means:
            if os.path.lexists(MINE / name):
                print(f"{typed(MINE / name)} is new; yours is now {typed(set_aside(MINE / name))}")


if __name__ == "__main__":
    sys.exit(main())
