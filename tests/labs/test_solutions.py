"""Every lab as a learner gets it is unsolved, every solution passes, and the two can't drift apart."""

import re
import subprocess

import pytest

from actmem_course.judge.judging import Judge
from actmem_course.judge.outline import load_lab, solution_module
from actmem_course.judge.real_ranks import verdicts_here
from actmem_course.launch import LABS as FOLDER
from actmem_course.strip_solutions import lab_names, lab_source
from tests.labs.learners import learner_file, names_in
from tests.tiers import at_night


def verdicts(name, lab_file=None, size=4):
    """Every exercise's status, function by function: of our solution, or of a file."""
    lab = load_lab(name)
    functions = names_in(lab_file) if lab_file else vars(solution_module(name))
    judge = Judge(lab, [dict(functions) for _ in range(1 if lab.one_process else size)])
    found = [judge.judge(exercise) for exercise in lab.exercises]
    return [(verdict.exercise, verdict.status, verdict.diagnosis) for verdict in found]


def in_repository(name):
    """A lab's text in git, which a learner's edit in the folder doesn't change; in the folder if git isn't there."""
    try:
        shown = subprocess.run(["git", "show", f":labs/{name}.py"], cwd=FOLDER.parent, capture_output=True, check=True)
        return shown.stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", lab_names())
def test_a_learner_is_sent_to_a_section_that_is_there(name):
    lab = load_lab(name)
    for exercise in lab.exercises:
        source = FOLDER.parent / "notebooks" / "source" / f"{exercise.chapter or lab.chapter}.py"
        headings = re.findall(r"^# #+ (.*)$", source.read_text(encoding="utf-8"), re.MULTILINE)
        assert exercise.section in headings, exercise.number


@pytest.mark.parametrize("name", lab_names())
def test_labs_are_cut_from_solutions(name):
    # Cut anew and not yet staged, it is right too.
    there = (in_repository(name), (FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    assert lab_source(name) in there, "not what its solution gives (actmem_course/strip_solutions.py)"
    assert not re.search(r"^(def|class) _", lab_source(name), re.MULTILINE)  # nothing of the answers


@pytest.mark.parametrize("name", lab_names())
def test_unsolved(name, tmp_path):
    found = verdicts(name, learner_file(tmp_path, name))
    assert {status for _, status, _ in found} == {"todo"}
    assert {diagnosis for *_, diagnosis in found} <= {"", "it calls make_model, which is not written yet"}


SIZES: list = [(name, 4) for name in lab_names()]
SIZES += [at_night((name, size)) for name in lab_names() if not load_lab(name).one_process for size in (1, 2)]


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_solved(name, size):
    assert [entry for entry in verdicts(name, size=size) if entry[1] != "passed"] == []


def on_this_rank(name):
    lab = load_lab(name)
    return [v.status for v in verdicts_here(lab, lab.exercises, dict(vars(solution_module(name))), "cpu")]


@pytest.mark.parametrize("name", [name for name in lab_names() if not load_lab(name).one_process])
def test_solved_on_real_ranks(pools, name):
    for found in pools[2].run(on_this_rank, name):
        assert set(found) == {"passed"}
