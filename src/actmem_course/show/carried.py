"""Changes that reach a page even if it was busy for long.

anywidget gives a widget two seconds to start; one that needs longer starts, but never receives another
message.  plotly.js keeps a slow page busy for longer than that.  A model of ipywidgets' own has no such
limit, so what the kernel changes later travels in one, and the widget's script listens to it.
"""

from __future__ import annotations

import json
from typing import Any

import anywidget
import ipywidgets
import traitlets

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
