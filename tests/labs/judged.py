"""Judge functions as if they were in a learner's file, on the ranks of a RankPool or in this process."""

import importlib.util
import inspect

from actmem_course.judge.catalogue import load_lab, solutions_of
from actmem_course.judge.judging import judge
from actmem_course.judge.workbench import Bench
from actmem_course.rank_store import RankStore, connect

_joined = {}


def judged(lab_name, number, function=None, target=None):
    """The verdict of one exercise, with ``function`` in place of our solution's ``target``.

    target: by default the function that the exercise asks for.
    """
    return judge_with(joined(), lab_name, number, function, target)


def joined():
    """This process's place among the ranks of its pool; the store outlives the test."""
    if "store" not in _joined:
        _joined["store"] = connect("judge")
    return _joined["store"]


def judge_with(store, lab_name, number, function=None, target=None):
    lab = load_lab(lab_name)
    (exercise,) = lab.choose([number], "number")
    functions = dict(solutions_of(lab_name))
    if function is not None:
        functions[target or exercise.function] = function
        functions["__file__"] = inspect.getsourcefile(function)
    (verdict,) = judge(lab, [exercise], Bench(functions, store))
    return verdict


def judged_file(path, number):
    """The verdict of one exercise of a learner's file."""
    lab = load_lab(path.stem)
    (verdict,) = judge(lab, lab.choose([number], "number"), Bench(names_in(path), joined()))
    return verdict


def names_in(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def judged_alone(lab_name, number, function=None, target=None):
    """The same with a single rank and no process group."""
    return judge_with(RankStore(), lab_name, number, function, target)
