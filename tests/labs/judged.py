"""Judge functions as if they were in a learner's file, on virtual ranks."""

import importlib.util
import inspect

from actmem_course.judge.judging import Judge
from actmem_course.judge.outline import load_lab, solutions_of
from actmem_course.judge.workbench import Bench, RealRank
from actmem_course.rank_store import connect

_joined = {}


def judged(lab_name, number, function=None, target=None, size=4):
    """The verdict of one exercise, with ``function`` in place of our solution's ``target``.

    target: by default the function that the exercise asks for.
    """
    lab = load_lab(lab_name)
    functions = dict(solutions_of(lab_name))
    if function is not None:
        functions[target or lab.choose([number], "number")[0].function] = function
        functions["__file__"] = inspect.getsourcefile(function)
    return judged_names(lab_name, number, functions, size)


def judged_names(lab_name, number, functions, size=4):
    """The verdict of one exercise of a file with these names."""
    lab = load_lab(lab_name)
    spaces = [dict(functions) for _ in range(1 if lab.one_process else max(size, lab.fewest_virtual))]
    return Judge(lab, spaces).judge(lab.choose([number], "number")[0])


def judged_file(path, number, size=2):
    """The verdict of one exercise of a learner's file."""
    return judged_names(path.stem, number, names_in(path), size)


def names_in(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def real_bench(functions):
    """A bench on the ranks of a RankPool; the store outlives the test."""
    if "store" not in _joined:
        _joined["store"] = connect("judge")
    return Bench(functions, RealRank(_joined["store"]))
