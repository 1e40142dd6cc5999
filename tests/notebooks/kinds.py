"""What a chapter has for a browser to show: kinds of control, of figure and of question.

A notebook takes most of a minute in JupyterLab, and a kind behaves there as it does in every chapter.
So a browser opens the few chapters below as notebooks; test_kinds.py asserts that they have every kind
there is, and moves every control of every chapter without a browser.
"""

from __future__ import annotations

import nbformat

from actmem_course.figures.in_page import run_cell
from notebooks.site.slices import figures
from notebooks.source.build import NOTEBOOKS

NAMES = sorted(path.name for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
#: The chapters that are used in JupyterLab.
IN_JUPYTERLAB = ["01_memory_wall.ipynb", "05_recomputation.ipynb", "07_time.ipynb"]


def stored(name):
    return nbformat.read(NOTEBOOKS / name, as_version=4)


def kinds(name) -> set[str]:
    """The kinds of a chapter's figures and of what stands beside them."""
    found: set[str] = set()
    for code in figures(stored(name)).values():
        shown = run_cell(code)
        controls, drawings = shown.moves.controls.values(), shown.moves.drawings
        found |= {control.look for control in controls}
        found |= {"offers what fits others" for control in controls if callable(control.values)}
        found |= {f"draws {trace.get('type', 'scatter')}" for drawing in drawings for trace in drawing.traces}
        found |= {"several figures in a panel"} if len(drawings) > 1 else set()
        found |= {"a question" if shown.question else "no question"}
        found |= {"controls" if shown.moves.controls else "a figure alone"}
    return found
