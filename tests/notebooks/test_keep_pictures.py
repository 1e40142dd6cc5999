"""A notebook that is saved, and opened the next day with a new kernel: each figure is there as a picture."""

import copy
import json

import nbformat

from actmem_course.keep_pictures import PICTURE, WIDGET_VIEW, add_pictures, course_pictures, drop_widgets
from notebooks.source.build import NOTEBOOKS

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


def test_every_stored_picture_can_be_found_by_its_words():
    found = []
    for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        as_run = copy.deepcopy(notebook)
        pictures = 0
        for cell in as_run.cells:
            for output in cell.get("outputs", []):
                if output.get("data", {}).pop(PICTURE, None):
                    output["data"][WIDGET_VIEW] = VIEW
                    output["metadata"] = {}
                    pictures += 1
        as_json = json.loads(nbformat.writes(as_run))
        add_pictures(as_json)
        drop_widgets(as_json)
        again = [o for cell in as_json["cells"] for o in cell.get("outputs", []) if PICTURE in o.get("data", {})]
        assert len(again) == pictures and WIDGET_VIEW not in json.dumps(as_json)
        found.append(pictures)
    assert sum(found) > len(found)  # a chapter whose figures all wait for a guess stores none
