"""Read by the JupyterLab that `make course` starts, which gives it ``c``.

JupyterLab shows "model not found" in place of a stored widget whose kernel has ended.  So saving a notebook adds the
course's picture to each figure that it has one of, and opening a notebook whose kernel has ended takes the widgets out
of what is shown: left are pictures and words.
"""

import json
from functools import cache
from pathlib import Path

from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
PICTURE = "image/png"
NOTEBOOKS = Path(__file__).resolve().parents[1]


class NotebooksWithPictures(AsyncLargeFileManager):
    """Files as always, but a notebook whose kernel has ended opens with pictures in place of widgets."""

    async def get(self, path, content=True, **options):
        model = await super().get(path, content=content, **options)
        if content and model["type"] == "notebook":
            sessions = await self.parent.session_manager.list_sessions()
            if not any(session["path"].strip("/") == path.strip("/") for session in sessions):
                drop_widgets(model["content"])
        return model


def add_pictures(notebook):
    """Put the course's pictures beside the widgets in a notebook's outputs, in place."""
    for output in displayed(notebook):
        stored = course_pictures().get(words(output)) if WIDGET_VIEW in output["data"] else None
        if stored:
            output["data"][PICTURE] = stored["data"][PICTURE]
            output["metadata"] = {**stored["metadata"], **output.get("metadata", {})}


def drop_widgets(notebook):
    """Take the widgets out of a notebook's outputs, in place."""
    for output in displayed(notebook):
        output["data"].pop(WIDGET_VIEW, None)


@cache
def course_pictures():
    """The outputs with a picture in the course's notebooks, by their words, which have the figure's numbers."""
    notebooks = (json.loads(path.read_bytes()) for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")))
    outputs = (output for notebook in notebooks for output in displayed(notebook) if PICTURE in output["data"])
    return {words(output): output for output in outputs}


def displayed(notebook):
    """The outputs that show something."""
    for cell in notebook.get("cells", ()):
        yield from (output for output in cell.get("outputs", ()) if "data" in output)


def words(output):
    """An output as text; files have it as a list of lines."""
    text = output["data"].get("text/plain", "")
    return text if isinstance(text, str) else "".join(text)


def _before_save(model, **more):
    if model["type"] == "notebook" and model.get("content"):
        add_pictures(model["content"])


c.ServerApp.contents_manager_class = NotebooksWithPictures  # noqa: F821
c.ContentsManager.pre_save_hook = _before_save  # noqa: F821
