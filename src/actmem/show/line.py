"""A line of text beside a widget that screen readers read out when it changes."""

from __future__ import annotations

import anywidget
import traitlets

from actmem.show.style import WARNING

_LINE = """
function render({ model, el }) {
  const node = document.createElement("div");
  node.className = "actmem-line";
  node.setAttribute("role", "status");
  const write = () => { node.textContent = model.get("text"); };
  el.append(node);
  write();
  // In a panel: arrow keys belong to the controls, not to JupyterLab, which would go to the next cell.
  const claim = (tries) => {
    const panel = el.closest(".actmem-panel");
    if (panel) {
      panel.dataset.lmSuppressShortcuts = "true";
      panel.onkeydown = (event) => event.stopPropagation();
    } else if (tries) requestAnimationFrame(() => claim(tries - 1));
  };
  claim(200);
  model.on("change:text", write);
  return () => model.off("change:text", write);
}
export default { render };
"""

_STYLE = f"""
.actmem-line {{ min-height: 1.4em; padding: 2px 4px; color: {WARNING}; font-weight: 600; }}
[data-jp-theme-light="false"] .actmem-line {{ color: #FF9D9D; }}
"""


class Line(anywidget.AnyWidget):
    """One line of text; empty when there is nothing to say, without moving what is below it."""

    _esm = _LINE
    _css = _STYLE
    text = traitlets.Unicode().tag(sync=True)
