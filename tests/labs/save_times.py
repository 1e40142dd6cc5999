"""How long after a save --watch has its verdicts: ``python -m tests.labs.save_times [lab …]``, on an idle machine.

Each lab starts solved.  The saves go through its functions in turn, once wrong and once right in other
words; what uses a function is judged with it.  Printed are the seconds until the changed function has its
verdict, and until all have theirs.
"""

import ast
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

from actmem_course.cut import SOLUTIONS, lab_source
from actmem_course.judge.outline import LAB_NAMES, load_lab
from tests.labs.test_watch import Watched

SAVES = 20


def solved(name):
    """Our solution as a learner's file: with the lines that call the judge."""
    solution = (SOLUTIONS / f"{name}.py").read_text(encoding="utf-8")
    call = re.search(r'\nif __name__ == "__main__":.*?globals\(\)\)\)\n', lab_source(name), re.DOTALL)[0]
    lines = solution.splitlines(keepends=True)
    docstring = ast.parse(solution).body[0].end_lineno
    return "".join(lines[:docstring]) + call + "".join(lines[docstring:])


def changed(source, function, number, wrong):
    """The file with another body of one function: ours again, or a wrong result."""
    if not wrong:
        return re.sub(
            rf'(def {function}\(.*?\n    """.*?"""\n)', rf"\1    _ = {number}\n", source, count=1, flags=re.DOTALL
        )
    right = f"_right_{function}"
    wrapper = (
        f"def {function}(*args, **kwargs):\n    found = {right}(*args, **kwargs)\n"
        f"    return found * {number + 2} if hasattr(found, 'dim') else found[1:] if isinstance(found, (list, tuple)) else None\n\n\n"
    )
    return source.replace(f"def {function}(", f"{wrapper}def {right}(", 1)


def times_of(name):
    """Seconds from each save to the verdict of the function that it changes, and to the last one."""
    exercises = load_lab(name).exercises
    functions = list(dict.fromkeys(exercise.function for exercise in exercises))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(solved(name), encoding="utf-8")
        run = Watched(path)
        try:
            first, _ = run.verdicts()
            assert f"{len(exercises)} of {len(exercises)} passed" in first, first
            found = []
            for number in range(SAVES):
                rounds, which = divmod(number, len(functions))
                beside = path.with_suffix(".new")
                beside.write_text(
                    changed(solved(name), functions[which], number, wrong=rounds % 2 == 0), encoding="utf-8"
                )
                beside.replace(path)
                saved = time.monotonic()
                run.verdicts()
                own = max(run.said[e.number] for e in exercises if e.function == functions[which])
                found.append((own - saved, max(run.said.values()) - saved))
        finally:
            run.end()
    return found


def main():
    for name in sys.argv[1:] or LAB_NAMES[:5]:
        said = [
            f"{what}: median {statistics.median(times):.1f} s, longest {max(times):.1f} s"
            for what, times in zip(("the changed one", "all"), zip(*times_of(name)))
        ]
        print(f"{name:24} {'; '.join(said)}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
