"""Figures that change in place in a notebook.

plotly's own FigureWidget sends plotly.js (5 MB) with every figure, and after each change answers
with the whole state of the figure.  Here plotly.js is sent once for each kernel, by
PlotlyScript; a LiveFigure holds one Drawing, and plotly.js changes the figure on screen to it.
The widget's state is the current drawing, so a reloaded page shows what was there.

anywidget gives a widget two seconds to start; one that needs longer starts, but never receives another
message.  plotly.js keeps a slow page busy for longer than that.  A model of ipywidgets' own has no such
limit, so what the kernel changes later travels in one, and the widget's script listens to it: ``Carried``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from actmem_course.show.marks import Drawing

#: Set by the build of the notebooks: figures then also display the data of a picture.
PICTURES = "ACTMEM_PICTURES"
PICTURE_MIME = "application/vnd.actmem.drawing+json"
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"

#: For a widget's script: ``const state = await carried(model)``, then as with a model of the carried values.
CARRIED = """
async function carried(model) {
  const carrier = await model.widget_manager.get_model(model.get("carrier").slice("IPY_MODEL_".length));
  return {
    get: (name) => JSON.parse(carrier.get("value"))[name],
    on: (change) => carrier.on("change:value", change),
    off: (change) => carrier.off("change:value", change),
  };
}
"""


class Carried(anywidget.AnyWidget):
    """A widget with values that the kernel changes while it is on screen; anything that JSON can hold."""

    carrier = traitlets.Instance(ipywidgets.HTML).tag(sync=True, **ipywidgets.widget_serialization)

    def __init__(self, carried: dict[str, Any], **traits: object):
        self.carried = carried
        super().__init__(carrier=ipywidgets.HTML(json.dumps(carried)), **traits)

    def carry(self, **values: object) -> None:
        """Change some of the values, in one message."""
        self.carried = {**self.carried, **values}
        self.carrier.value = json.dumps(self.carried)

    def close(self) -> None:
        self.carrier.close()
        super().close()


# Both scripts meet at one promise on the page, whichever comes first.
_MEET = """
function meeting() {
  const place = (globalThis.__actmemPlotly ??= {});
  place.plotly ??= new Promise((arrived) => { place.arrived = arrived; });
  place.drawn ??= Promise.resolve();
  return place;
}
"""

# Loads plotly.js on its own time, and once: a page that has it from another kernel does not load it
# again; a page that was reloaded asks for it.
_SCRIPT = (
    _MEET
    + """
function initialize({ model }) {
  const place = meeting();
  if (place.loading) return;
  const load = () => {
    if (place.loading || !model.get("source")) return;
    place.loading = true;
    const url = URL.createObjectURL(new Blob([model.get("source")], { type: "text/javascript" }));
    import(url)
      .then((loaded) => place.arrived(loaded.default), (error) => { place.loading = false; console.error(error); })
      .finally(() => URL.revokeObjectURL(url));
  };
  model.on("change:source", load);
  load();
  if (!place.loading) model.send({});
}
export default { initialize };
"""
)

# plotly.js is written for <script>, CommonJS and AMD; inside a module it takes CommonJS.
_MODULE = "const module = {{ exports: {{}} }};\n{}\nexport default module.exports;\n"

_FIGURE = (
    _MEET
    + CARRIED
    + """
async function render({ model, el }) {
  const node = document.createElement("div");
  node.className = "actmem-figure";
  node.style.width = "100%";
  node.setAttribute("role", "figure");
  const state = await carried(model);
  const describe = () => node.setAttribute("aria-label", state.get("alt"));
  describe();
  el.append(node);
  const Plotly = await meeting().plotly;
  const draw = () => {
    const { data, layout, config } = state.get("spec");
    return Plotly.react(node, data, layout, config);
  };
  const change = () => { describe(); draw(); };
  state.on(change);
  // Figures that waited for plotly.js are drawn in a task each, or they would hold the page together.
  const place = meeting();
  const first = place.drawn.then(() => new Promise((next) => setTimeout(next))).then(draw);
  place.drawn = first.catch(() => {});
  await first;
  node.dataset.drawn = "true";
  let width = node.clientWidth;
  const watch = new ResizeObserver(() => {
    if (node.clientWidth && node.clientWidth !== width) {
      width = node.clientWidth;
      Plotly.Plots.resize(node).catch(() => {});  // hidden again before it was done
    }
  });
  watch.observe(node);
  return () => {
    watch.disconnect();
    state.off(change);
    Plotly.purge(node);
  };
}
export default { render };
"""
)


#: In JupyterLab's dark theme a figure is its own negative, with the hues that it had: nothing white is left.
DARK = """
[data-jp-theme-light="false"] .actmem-figure, [data-jp-theme-light="false"] .actmem-predict { filter: invert(0.9) hue-rotate(180deg); }
"""


class PlotlyScript(anywidget.AnyWidget):
    """Holds plotly.js for all figures of this kernel; made by the first of them, never displayed.

    A page that is loaded again gets the widgets of its kernel in one message, and ipywidgets gives up
    on an output whose widget is late: so plotly.js is not part of that message, and is sent on request.
    """

    @classmethod
    def send(cls) -> PlotlyScript:
        """The kernel's one PlotlyScript; a new one if it was closed."""
        if cls._sent is None or cls._sent.comm is None:
            import plotly

            source = (Path(plotly.__file__).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
            cls._sent = cls(source=_MODULE.format(source))
        return cls._sent

    _sent: PlotlyScript | None = None
    _esm = _SCRIPT
    source = traitlets.Unicode().tag(sync=True)

    def __init__(self, source: str):
        super().__init__(source=source)
        self.on_msg(lambda widget, content, buffers: self.send_state("source"))

    def get_state(self, key=None, drop_defaults=False) -> dict:
        state = super().get_state(key, drop_defaults)
        if key is None and self.comm is not None:
            state["source"] = ""
        return state


class LiveFigure(Carried):
    """One figure on screen.  ``draw`` changes it in place."""

    _esm = _FIGURE
    _css = DARK

    def __init__(self, drawing: Drawing):
        PlotlyScript.send()
        super().__init__({"spec": drawing.spec(), "alt": drawing.alt})
        self.drawing = drawing
        self.layout.width = "100%"

    def draw(self, drawing: Drawing) -> None:
        """Change the figure to ``drawing``, in one message."""
        self.drawing = drawing
        self.carry(spec=drawing.spec(), alt=drawing.alt)

    def __repr__(self) -> str:
        return self.drawing.alt

    def _repr_mimebundle_(self, **kwargs: object) -> dict:  # type: ignore[override]  # Jupyter takes both forms
        return mime_bundle(self, repr(self), [self.drawing])


def mime_bundle(widget: anywidget.AnyWidget, text: str, drawings: list[Drawing]) -> dict:
    """What a widget displays: itself, and for pages that cannot run it a text and the pictures."""
    bundle: dict[str, Any] = {
        "text/plain": text,
        WIDGET_MIME: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id},
    }
    if drawings and os.environ.get(PICTURES):
        bundle[PICTURE_MIME] = [{**drawing.spec(), "fingerprint": drawing.fingerprint()} for drawing in drawings]
    return bundle
