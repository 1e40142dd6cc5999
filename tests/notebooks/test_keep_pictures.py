"""A notebook that is saved, and opened the next day with a new kernel: each figure is there as a picture."""

import copy
import runpy
from types import SimpleNamespace

from actmem_course.copies import NOTEBOOKS

SETTINGS = SimpleNamespace(ServerApp=SimpleNamespace(), ContentsManager=SimpleNamespace())
CONFIG = runpy.run_path(str(NOTEBOOKS / "jupyter/jupyter_server_config.py"), {"c": SETTINGS})
PICTURE, WIDGET_VIEW, course_pictures = CONFIG["PICTURE"], CONFIG["WIDGET_VIEW"], CONFIG["course_pictures"]
add_pictures, drop_widgets = CONFIG["add_pictures"], CONFIG["drop_widgets"]
VIEW = {"model_id": "a1", "version_major": 2, "version_minor": 0}


def saved(text, **data):
    output = {
        "output_type": "execute_result",
        "metadata": {},
        "execution_count": 1,
        "data": {"text/plain": text, **data},
    }
    return {"cells": [{"cell_type": "code", "outputs": [output]}, {"cell_type": "markdown"}]}, output


def test_a_figure_of_the_course_is_saved_as_its_picture():
    text, stored = next(iter(course_pictures().items()))
    for form in (text, text.splitlines(keepends=True)):
        notebook, output = saved(form, **{WIDGET_VIEW: VIEW})
        add_pictures(notebook)
        assert set(output["data"]) == {"text/plain", PICTURE, WIDGET_VIEW}  # a page that is loaded again needs it
        drop_widgets(notebook)
        assert set(output["data"]) == {"text/plain", PICTURE}
        assert output["data"][PICTURE] == stored["data"][PICTURE] and output["metadata"] == stored["metadata"]


def test_a_figure_that_a_learner_changed_is_saved_as_its_words():
    notebook, output = saved("Bars at s=3.", **{WIDGET_VIEW: VIEW})
    add_pictures(notebook)
    drop_widgets(notebook)
    assert output["data"] == {"text/plain": "Bars at s=3."}


def test_what_is_no_widget_is_saved_as_it_is():
    notebook, _ = saved("3", **{"text/html": "<b>3</b>"})
    before = copy.deepcopy(notebook)
    add_pictures(notebook)
    drop_widgets(notebook)
    assert notebook == before
