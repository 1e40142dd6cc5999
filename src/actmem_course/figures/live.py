"""Figures that move in a notebook: what ``in_page`` shows, drawn by ``figures.js`` in a widget.

plotly's own FigureWidget sends plotly.js (5 MB) with every figure, and after each change answers with the whole state
of the figure. Here PlotlyScript sends plotly.js once for each kernel. The widget's state is the current one, so a
reloaded page shows what was there.

anywidget gives a widget two seconds to start; a widget that takes longer never receives another message. On a slow page
plotly.js takes longer. ipywidgets' own models have no such limit, so later changes are sent through such a model, to
which the widget's script listens (``Carried``).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from actmem_course.figures.in_page import LiveCell

#: The environment variable that the build of the notebooks sets: figures then also display the data of a picture.
PICTURES = "ACTMEM_PICTURES"
PICTURE_MIME = "application/vnd.actmem.drawing+json"
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"


def script(*files: str) -> str:
    """Return the contents of some files, joined to one JavaScript module or style sheet for a widget.

    Args:
        files: Names of files in this module's folder, such as "figures.js".
    """
    return "\n".join(Path(__file__).with_name(file).read_text(encoding="utf-8") for file in files)


class Carried(anywidget.AnyWidget):
    """A base class of widgets whose values the kernel can still change, by ``carry``, when the widget is on screen.

    Args:
        carried: The first values by name, of any type that JSON can hold; the widget's script reads them.
        traits: Further traits of the anywidget, by name.
    """

    carrier = traitlets.Instance(ipywidgets.HTML).tag(sync=True, **ipywidgets.widget_serialization)

    def __init__(self, carried: dict[str, Any], **traits: object):
        self.carried = carried
        super().__init__(carrier=ipywidgets.HTML(json.dumps(carried)), **traits)

    def carry(self, **values: object) -> None:
        """Replace some of the values, and send all values to the page in one message.

        Args:
            values: The new values by name, of any type that JSON can hold.
        """
        self.carried = {**self.carried, **values}
        self.carrier.value = json.dumps(self.carried)


# plotly.js is written for <script>, CommonJS and AMD; inside a module it takes CommonJS.
_MODULE = "const module = {{ exports: {{}} }};\n{}\nexport default module.exports;\n"


class PlotlyScript(anywidget.AnyWidget):
    """Holds plotly.js for all figures of this kernel. The first figure makes it; it is never displayed.

    A reloaded page gets all widgets of its kernel in one message, and ipywidgets gives up on an output whose widget is
    late. So plotly.js is not part of that message: the page requests it afterwards.

    Args:
        source: plotly.js as the text of a JavaScript module.
    """

    @classmethod
    def send(cls) -> PlotlyScript:
        """Make sure that pages can get plotly.js from this kernel: make its PlotlyScript unless there is an open one.

        Returns: the kernel's PlotlyScript.
        """
        if cls._sent is None or cls._sent.comm is None:
            import plotly

            source = (Path(plotly.__file__).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
            cls._sent = cls(source=_MODULE.format(source))
        return cls._sent

    _sent: PlotlyScript | None = None
    _esm = script("meeting.js", "plotly_script.js")
    source = traitlets.Unicode().tag(sync=True)

    def __init__(self, source: str):
        super().__init__(source=source)
        self.on_msg(lambda widget, content, buffers: self.send_state("source"))

    def get_state(self, key=None, drop_defaults=False) -> dict:
        state = super().get_state(key, drop_defaults)
        if key is None and self.comm is not None:
            state["source"] = ""
        return state


class Widget(Carried):
    """The widget that shows a LiveCell in a notebook.

    Args:
        shown: The cell's figures, controls and question.
    """

    _esm = script("meeting.js", "carried.js", "figures.js", "widget.js")
    _css = script("figures.css")
    asked = traitlets.Dict().tag(sync=True)

    def __init__(self, shown: LiveCell):
        PlotlyScript.send()
        super().__init__({**shown.stored(), "number": 0})
        self.shown = shown
        self.layout.width = "100%"
        self.observe(self._answer, "asked")

    def _answer(self, change: Any) -> None:
        self.carry(state=self.shown.next(change["new"]), number=change["new"]["number"])


def widget_bundle(shown: LiveCell) -> dict:
    """Return what a notebook displays for a LiveCell, by MIME type: a widget and a text.

    While the site is built, the dict has a third entry: the figures as plotly's data, from which pictures are drawn.

    Args:
        shown: The cell's figures, controls and question.
    """
    bundle: dict[str, Any] = mime_bundle(Widget(shown), repr(shown))
    if os.environ.get(PICTURES):
        drawings = shown.moves.drawings
        bundle[PICTURE_MIME] = [{**drawing.spec(), "fingerprint": drawing.fingerprint()} for drawing in drawings]
    return bundle


def mime_bundle(widget: anywidget.AnyWidget, text: str) -> dict:
    """Return what a notebook displays for a widget, by MIME type.

    Args:
        widget: The widget.
        text: What is shown where widgets can't run.
    """
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"text/plain": text, WIDGET_MIME: view}
