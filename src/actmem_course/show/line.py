"""A line of text next to a widget; screen readers read it out when it changes."""

from __future__ import annotations

from actmem_course.show.carried import CARRIED, Carried
from actmem_course.show.style import WARNING

_LINE = (
    CARRIED
    + """
async function render({ model, el }) {
  const state = await carried(model);
  const node = document.createElement("div");
  node.className = "actmem-line";
  node.setAttribute("role", "status");
  const write = () => { node.textContent = state.get("text"); };
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
  state.on(write);
  return () => state.off(write);
}
export default { render };
"""
)

_STYLE = f"""
.actmem-line {{ min-height: 1.4em; padding: 2px 4px; color: {WARNING}; font-weight: 600; }}
[data-jp-theme-light="false"] .actmem-line {{ color: #FF9D9D; }}
"""


class Line(Carried):
    """One line of text.  It takes the same space when it is empty."""

    _esm = _LINE
    _css = _STYLE

    def __init__(self) -> None:
        super().__init__({"text": ""})

    @property
    def text(self) -> str:
        return self.carried["text"]

    @text.setter
    def text(self, text: str) -> None:
        self.carry(text=text)
