"""make's commands do what they say.

make runs here in a folder of its own with stand-ins for Python and pip: no network, no waiting.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

STAND_IN_VENV_PYTHON = """#!/bin/sh
echo "$@" >> "{log}"
case "$*" in *"pip install"*) echo "Collecting torch"; {pip};; *"pip index"*) {index};; esac
"""
STAND_IN_PYTHON = """#!/bin/sh
case "$*" in
  *version_info*) exit {too_old};;
  --version) echo "Python 3.x";;
  *venv*) {venv};;
esac
"""


class Workshop:
    """A copy of the set-up files, and a Python that only notes what it is asked to do."""

    def __init__(self, folder):
        self.folder = folder
        self.log = folder / "log"
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)

    def script(self, path, text):
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return path

    def python(self, too_old=0, venv_works=True, pip="true", index="true"):
        text = STAND_IN_VENV_PYTHON.format(log=self.log, pip=pip, index=index)
        inner = self.script(self.folder / "inner", text)
        copied = f'mkdir -p .venv/bin && cp "{inner}" .venv/bin/python'
        make_venv = copied if venv_works else "mkdir -p .venv/bin; exit 1"
        return self.script(self.folder / "outer", STAND_IN_PYTHON.format(too_old=too_old, venv=make_venv))

    def make(self, *arguments):
        # A make that runs these tests hands its own options on; they are not for this make.
        makes = "MAKEFLAGS", "MFLAGS", "MAKELEVEL"
        environment = {name: value for name, value in os.environ.items() if name not in makes}
        command = ["make", "--no-print-directory", *arguments]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)

    def calls(self):
        return self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []


@pytest.fixture
def workshop(tmp_path):
    return Workshop(tmp_path)


def test_setup_installs_once_and_again_when_a_list_changed(workshop):
    python = workshop.python()
    first = workshop.make("setup", f"PYTHON={python}")
    assert (first.returncode, first.stderr) == (0, "")
    (call,) = workshop.calls()
    assert call.split()[:3] == ["-m", "pip", "install"] and call.endswith("-c constraints.txt -e .[course]")
    assert workshop.make("setup").returncode == 0
    assert len(workshop.calls()) == 1
    for name in ("pyproject.toml", "constraints.txt"):
        stamp = (workshop.folder / ".venv" / ".course-installed").stat().st_mtime
        os.utime(workshop.folder / name, (stamp + 10, stamp + 10))
        before = len(workshop.calls())
        assert workshop.make("setup").returncode == 0
        assert len(workshop.calls()) == before + 1
        os.utime(workshop.folder / name, (0, 0))


def test_cpu_adds_pytorchs_index(workshop):
    workshop.make("setup", "CPU=1", f"PYTHON={workshop.python()}")
    asked, installed = workshop.calls()
    assert "pip index versions torch --index-url https://download.pytorch.org/whl/cpu" in asked
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in installed


def test_course_and_labs_make_copies_and_a_new_one_only_when_asked(workshop):
    workshop.make("course", f"PYTHON={workshop.python()}")
    workshop.make("course", "FRESH=03")
    workshop.make("labs", "FRESH=lab2 lab4")
    copies = [call for call in workshop.calls() if "actmem_course.copies" in call]
    asked = [call.partition("actmem_course.copies")[2] for call in copies]
    assert asked == [" course", " course --fresh=03", " labs --fresh=lab2 --fresh=lab4"]


def own_lines(done):
    """What is on stderr without make's own closing line."""
    return [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]


@pytest.mark.parametrize(
    ("words", "stand_ins", "said"),
    [
        (["setup"], {"too_old": 1}, ["No Python 3.10 to 3.14 found"]),
        (["setup"], {"venv_works": False}, ["outer can't make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"]),
        (["setup"], {"pip": "echo ERROR: no such thing >&2; exit 3"}, ["ERROR: no such thing", "pip failed; its whole log is in .venv/pip.log"]),
        (["course", "CPU=1"], {"index": "exit 1"}, ["https://download.pytorch.org/whl/cpu did not answer: leave CPU=1 out"]),
    ],
)  # fmt: skip
def test_what_fails_is_said_in_a_line_and_leaves_nothing_half_made(workshop, words, stand_ins, said):
    done = workshop.make(*words, f"PYTHON={workshop.python(**stand_ins)}")
    assert done.returncode == 2
    assert all(part in line for part, line in zip(said, own_lines(done), strict=True)), own_lines(done)
    left = {path.name for path in (workshop.folder / ".venv").rglob("*")}
    assert left == (
        {"bin", "python", "pip.log"} if "pip" in stand_ins else {"bin", "python"} if "index" in stand_ins else set()
    )
    if "pip" in stand_ins:
        assert "Collecting torch" in (workshop.folder / ".venv" / "pip.log").read_text(encoding="utf-8")
    assert any("pip install" in call for call in workshop.calls()) == ("pip" in stand_ins)


def test_clean_leaves_the_course_and_nothing_else(workshop):
    before = {path.name for path in workshop.folder.iterdir()}
    workshop.make("setup", f"PYTHON={workshop.python()}")
    made = "src/actmem.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache tests/__pycache__"
    for name in (*made.split(), "notebooks/.ipynb_checkpoints", "my/notebooks/.ipynb_checkpoints"):
        (workshop.folder / name).mkdir(parents=True)
    mine = {"my", "my/notebooks", "my/notebooks/.ipynb_checkpoints"}
    assert workshop.make("clean").returncode == 0
    left = {path.relative_to(workshop.folder).as_posix() for path in workshop.folder.rglob("*")}
    assert left == before | {"src", "tests", "notebooks", "inner", "outer", "log"} | mine
