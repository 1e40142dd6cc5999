"""What a learner writes is never lost: copies, what is judged, and the tool that writes labs/."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from actmem_course import copies
from actmem_course.copies import lab_files, make, notebook_files, set_aside
from actmem_course.launch import LABS
from actmem_course.strip_solutions import lab_source
from tests.labs.learners import start
from tests.patience import SECONDS
from tests.tiers import at_night

ROOT = LABS.parent
LAB = "lab4_recompute"
COPY = f"labs/{LAB}.py"
EDIT = "    raise NotImplementedError  # my notes\n"


@pytest.fixture
def mine(tmp_path):
    return tmp_path / "my"


@pytest.fixture
def labs(tmp_path):
    """A folder of labs as the repository has them."""
    folder = tmp_path / "labs"
    make(tmp_path, lab_files())
    return folder


def edited(path, edit=EDIT):
    source = path.read_text(encoding="utf-8").replace("    raise NotImplementedError\n", edit, 1)
    path.write_text(source, encoding="utf-8")
    return path.read_bytes()


def everything(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_of_every_lab_and_chapter_and_nothing_that_is_there_is_written(mine):
    given = {**lab_files(), **notebook_files()}
    assert make(mine, given) == list(given) and everything(mine) == given
    assert {f"labs/{path.name}" for path in LABS.glob("lab*.py")} < set(given)
    assert {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")} < set(given)
    first = edited(mine / COPY)
    (mine / "labs" / "lab2_tensor_parallel.py").unlink()
    before = everything(mine)
    assert make(mine, given) == ["labs/lab2_tensor_parallel.py"]
    after = everything(mine)
    assert after.pop("labs/lab2_tensor_parallel.py") and after == before
    # What is set aside has a free name.
    for number in (2, 3):
        assert set_aside(mine / COPY) == mine / "labs" / f"{LAB}_{number}.py"
        (mine / COPY).write_bytes(b"second")
    contents = everything(mine)
    assert (contents[f"labs/{LAB}_2.py"], contents[f"labs/{LAB}_3.py"]) == (first, b"second")


# the commands


def run(folder, *arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "src"), **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def copied_package(folder):
    shutil.copytree(ROOT / "src", folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))


def test_a_lab_is_judged_where_it_is_and_a_fresh_copy_keeps_the_old_one(tmp_path, labs):
    copied_package(tmp_path / "src")
    run(tmp_path, "-m", "actmem_course.copies", "labs")
    for file in (COPY, f"my/{COPY}"):
        work = edited(tmp_path / file, "    raise ValueError('mine')\n")
        done = run(tmp_path, file, "--only", "4.1")
        assert "ValueError: mine" in done.stdout and f"{LAB}.py:" in done.stdout
        assert (tmp_path / file).read_bytes() == work
    done = run(tmp_path, "-m", "actmem_course.copies", "labs", "--fresh=lab4")
    aside, where, what = done.stdout.splitlines()
    assert aside == f"my/{COPY} is new; yours is now my/labs/{LAB}_2.py"
    assert where == "your copies are in my (made now)" and what.endswith("my/labs/lab1_count_bytes.py")
    assert (tmp_path / "my" / "labs" / f"{LAB}_2.py").read_bytes() == work
    assert (tmp_path / "my" / COPY).read_text(encoding="utf-8") == lab_source(LAB)


def test_without_a_checkout_labs_come_to_where_one_works(tmp_path):
    installed, here = tmp_path / "lib" / "site-packages", tmp_path / "here"
    copied_package(installed)
    here.mkdir()
    done = run(here, "-m", "actmem_course.copies", "course", PYTHONPATH=str(installed))
    assert done.stdout == "your copies are in my (made now)\n" and set(everything(here / "my")) == set(lab_files())


def test_wrong_use_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["copies", "labs", "--fresh=lab0"])
    monkeypatch.setattr(copies, "MINE", tmp_path)
    with pytest.raises(SystemExit, match="2"):
        copies.main()
    assert capsys.readouterr().err == "actmem_course.copies: --fresh: must be such as lab2 or 03, got lab0\n"
    assert everything(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "header", "judged"),
    [
        ("answers.py", "Lab 4: mine", True),
        at_night(("lab4_again.py", "no title", True)),
        ("answers.py", "no title", False),
    ],
)
def test_a_renamed_copy_is_judged_or_gets_one_line(name, header, judged, tmp_path):
    text = re.sub(r'""".*?"""', f'"""{header}"""', lab_source(LAB), count=1, flags=re.DOTALL)
    (tmp_path / name).write_text(text, encoding="utf-8")
    done = start(tmp_path / name, "--only", "4.1")
    if judged:
        assert done.returncode == 1 and "not written yet: 4.1" in done.stdout and done.stderr == ""
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("answers.py: file: which lab is it?") and len(done.stderr.splitlines()) == 1
