"""A learner's file: with bodies of one's own, started as a learner starts it, or judged here on virtual ranks."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys

from actmem_course.judge.judging import Judge
from actmem_course.judge.outline import ALL_LABS, load_lab, solution_module
from actmem_course.strip_solutions import lab_source
from tests.labs.faults import TORCHRUN
from tests.patience import SECONDS


def lab_of(number):
    """The lab of an exercise."""
    (lab,) = (lab for lab in ALL_LABS if number in {exercise.number for exercise in lab.exercises})
    return lab


def judged(number, function=None, size=4):
    """The verdict of one exercise, with ``function`` in place of what our solution has for it."""
    lab = lab_of(number)
    functions = dict(vars(solution_module(lab.name)))
    if function is not None:
        functions[lab.choose([number], "number")[0].function] = function
        functions["__file__"] = inspect.getsourcefile(function)
    return judged_names(lab.name, number, functions, size, {exercise.function for exercise in lab.exercises})


def judged_names(lab_name, number, functions, size=4, passed=()):
    """The verdict of one exercise of a file with these names, of which ``passed`` are right."""
    lab = load_lab(lab_name)
    spaces = [dict(functions) for _ in range(1 if lab.one_process else max(size, lab.fewest_virtual))]
    judge, (exercise,) = Judge(lab, spaces), lab.choose([number], "number")
    judge.passed = set(passed) - {exercise.function}
    return judge.judge(exercise)


def judged_file(path, number, size=2):
    """The verdict of one exercise of a learner's file."""
    return judged_names(path.stem, number, names_in(path), size)


def names_in(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


#: So that a test waits for seconds where a learner would for half a minute.
_SHORT = """
from actmem_course.judge.outline import load_lab
for _exercise in load_lab({name!r}).exercises:
    object.__setattr__(_exercise, "seconds", {seconds})
"""


def learner_file(folder, name, seconds=None, **bodies):
    """A copy of a lab in ``folder`` where the functions named have other bodies.

    bodies: the lines of each function, without the first one's indentation.  seconds: how long a
    rank may work on an exercise.
    """
    source = lab_source(name)
    for function, body in bodies.items():
        pattern = rf"(def {function}\(.*?)    raise NotImplementedError\n"
        source, count = re.subn(pattern, lambda match: f"{match[1]}    {body}\n", source, count=1, flags=re.DOTALL)
        assert count == 1, function
    if seconds:
        call = '\nif __name__ == "__main__":'
        source = source.replace(call, _SHORT.format(name=name, seconds=seconds) + call)
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    return path


def start(path, *arguments, torchrun=False, **environment):
    """Run a file by itself, or by torchrun with two ranks, to its end."""
    return subprocess.run(
        [sys.executable, *(TORCHRUN[1:] if torchrun else ()), str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
