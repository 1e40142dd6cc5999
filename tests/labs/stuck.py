"""A learner's file with bodies of one's own, started as a learner starts it."""

import os
import re
import subprocess
import sys

from actmem_course.cut import lab_source
from tests.labs.faults import TORCHRUN
from tests.patience import SECONDS

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
        source = source.replace(
            '\nif __name__ == "__main__":', _SHORT.format(name=name, seconds=seconds) + '\nif __name__ == "__main__":'
        )
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    return path


def start(path, *arguments, torchrun=False, **environment):
    """Run a file by itself, or by torchrun with two ranks, to its end."""
    return subprocess.run(
        [*(TORCHRUN if torchrun else [sys.executable]), str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
