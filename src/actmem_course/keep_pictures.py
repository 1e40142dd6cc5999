"""What a saved notebook keeps of its figures: a picture and words, since the next kernel has no widgets of this one.

JupyterLab shows "model not found" in place of a stored widget whose kernel has ended.  ``make course`` starts
it with ``notebooks/jupyter/jupyter_server_config.py``: saving adds the pictures, and opening a notebook whose
kernel has ended takes the widgets out of what is shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache

from actmem_course.copies import notebook_files

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
PICTURE = "image/png"


def add_pictures(notebook: dict, pictures: Mapping[str, dict] | None = None) -> None:
    """Put pictures beside the widgets in a notebook's outputs, in place.

    notebook: as JSON has it, nbformat 4.  pictures: outputs by their text, default those of the course's own
    notebooks.  A figure that the course has no picture of keeps its words.
    """
    known = course_pictures() if pictures is None else pictures
    for output in _displayed(notebook):
        stored = known.get(_text(output["data"].get("text/plain", ""))) if WIDGET_VIEW in output["data"] else None
        if stored:
            output["data"][PICTURE] = stored["data"][PICTURE]
            output["metadata"] = {**stored["metadata"], **output.get("metadata", {})}


def drop_widgets(notebook: dict) -> None:
    """Take the widgets out of a notebook's outputs, in place: what is left are pictures and words."""
    for output in _displayed(notebook):
        output["data"].pop(WIDGET_VIEW, None)


@cache
def course_pictures() -> dict[str, dict]:
    """The outputs with a picture in the course's notebooks, by their text, which has the figure's numbers."""
    notebooks = (json.loads(contents) for contents in notebook_files().values())
    outputs = (output for notebook in notebooks for output in _displayed(notebook) if PICTURE in output["data"])
    return {_text(output["data"]["text/plain"]): output for output in outputs}


def _displayed(notebook: dict) -> Iterator[dict]:
    for cell in notebook.get("cells", ()):
        yield from (output for output in cell.get("outputs", ()) if "data" in output)


def _text(text: str | list[str]) -> str:
    """Files have texts as lists of lines."""
    return text if isinstance(text, str) else "".join(text)
