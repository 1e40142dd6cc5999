"""Every lab as it stands in labs/ is unsolved, every solution passes, and the two can't drift apart."""

import ast
import importlib.util

import pytest

from actmem.lab.cut import SOLUTIONS, cut
from actmem.lab.judge.bench import Bench
from actmem.lab.judge.exercise import LABS, load_lab, solutions_of
from actmem.lab.judge.judging import judge
from actmem.lab.judge.together import Together
from actmem.lab.launch import LABS as FOLDER
from tests.labs.judged import joined
from tests.rank_pool import RankPool

README = FOLDER.parent / "README.md"


def verdicts(name, solved, together=None):
    """Every exercise's status, function by function, on this rank."""
    lab = load_lab(name)
    functions = dict(solutions_of(name)) if solved else unsolved(name)
    found = judge(lab, lab.exercises, Bench(functions, together or joined()))
    return [(verdict.exercise, verdict.status, verdict.diagnosis) for verdict in found]


def unsolved(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


@pytest.mark.parametrize("name", LABS)
def test_labs_are_cut_from_solutions(name):
    solution = (SOLUTIONS / f"{name}.py").read_text(encoding="utf-8")
    assert (FOLDER / f"{name}.py").read_text(encoding="utf-8") == cut(solution), "run python -m actmem.lab.cut"


@pytest.mark.parametrize("name", LABS)
def test_the_cut_keeps_signatures_and_docstrings_and_nothing_of_the_answers(name):
    solution = ast.parse((SOLUTIONS / f"{name}.py").read_text(encoding="utf-8"))
    lab = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    asked = {exercise.function for exercise in load_lab(name).exercises}

    def functions(tree):
        return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in asked}

    assert functions(lab).keys() == asked
    for function, node in functions(lab).items():
        answer = functions(solution)[function]
        assert ast.dump(node.args) == ast.dump(answer.args)
        assert ast.get_docstring(node) == ast.get_docstring(answer) and "2205.05198" in ast.get_docstring(node)
        assert [type(statement) for statement in node.body] == [ast.Expr, ast.Raise]
    assert not [node for node in lab.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name.startswith("_")]


@pytest.mark.parametrize("name", LABS)
def test_hints_go_from_a_nudge_to_the_answer(name):
    for exercise in load_lab(name).exercises:
        assert len(exercise.hints) >= 3 and all(len(hint) > 20 for hint in exercise.hints)


@pytest.mark.parametrize("name", LABS)
def test_the_readme_lists_it(name):
    (row,) = [line for line in README.read_text(encoding="utf-8").splitlines() if f"`python labs/{name}.py`" in line]
    _, _, what, ranks, minutes, _ = (cell.strip() for cell in row.split("|"))
    assert what and minutes.isdigit()
    assert (ranks[0] == "1") == load_lab(name).one_process


@pytest.mark.parametrize("name", LABS)
def test_unsolved(pools, name):
    alone = load_lab(name).one_process
    for found in [verdicts(name, False, Together())] if alone else pools[2].run(verdicts, name, False):
        assert [(status, diagnosis) for _, status, diagnosis in found] == [("todo", "")] * len(found)


@pytest.fixture(scope="module")
def one_rank():
    pool = RankPool(1)
    yield pool
    pool.stop()


@pytest.mark.parametrize("name", [name for name in LABS if load_lab(name).one_process])
def test_solved_in_one_process(name):
    assert [entry for entry in verdicts(name, True, Together()) if entry[1] != "passed"] == []


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name in LABS if not load_lab(name).one_process])
def test_solved(pools, one_rank, name, size):
    for found in ({1: one_rank} | pools)[size].run(verdicts, name, True):
        assert [entry for entry in found if entry[1] != "passed"] == []
