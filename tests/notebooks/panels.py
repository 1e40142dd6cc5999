"""Panels and forms in a browser, used by keyboard; figures are compared with a new drawing."""

from __future__ import annotations

import re
import time

from playwright.sync_api import expect

from tests.notebooks.opened import PATIENCE_SECONDS

#: What the panels of the kernel hold, in the order of the notebook.
PANELS = """
import json as _json
from ipywidgets.widgets.widget import _instances
from actmem_course.show.widgets import Panel as _Panel, Prediction as _Prediction, Reveal as _Reveal
_panels = [widget for widget in _instances.values() if isinstance(widget, _Panel)]
# What a cell displays: a panel and a question of their own, or one around both.
_cells = dict((part.model_id, widget.model_id) for widget in _instances.values() if isinstance(widget, _Reveal) for part in (widget.prediction, widget.figure))
"""
DESCRIBE = PANELS + """
print(_json.dumps([
    {"model": _cells.get(panel.model_id, panel.model_id), "controls": {name: type(c).__name__ for name, c in panel.controls.items()}, "figures": len(panel.figures)}
    for panel in _panels
]))
"""
#: The sizes that a panel's controls say, and the figures drawn anew from them, or the refusal.
EXPECT = PANELS + """
from actmem.config import ConfigError as _ConfigError
_panel = _panels[{panel}]
try:
    _drawn = [{{"data": d.traces, "alt": d.alt, "title": d.layout["title"]["text"]}} for d in _panel.moves.drawn(_panel.values())]
except _ConfigError as _error:
    _drawn = str(_error)
print(_json.dumps([_panel.values(), _drawn]))
"""
SHOWN = """
(node) => ({ data: JSON.parse(JSON.stringify(node.data)), alt: node.getAttribute("aria-label"), role: node.getAttribute("role"),
  title: [...node.querySelectorAll(".gtitle tspan, .gtitle")].filter((part) => !part.children.length).map((part) => part.textContent).join("<br>"),
  mark: node.mark ?? null })
"""


def panel_in_page(notebook, number=0):
    """The output with a panel in it, its figures drawn; and its figures."""
    panel = notebook.ask(DESCRIBE)[number]
    box = notebook.go_to(panel["model"])
    figures = box.locator(".actmem-figure[data-drawn]")
    figures.nth(panel["figures"] - 1).wait_for()
    assert figures.count() == panel["figures"]
    return box, figures


def use_panel(notebook, number, panel, shot, controls=None):
    """Move every control of a panel, or the first ``controls`` of them, one step and back.  shot: gets the output."""
    page = notebook.page
    box, figures = panel_in_page(notebook, number)
    for figure in figures.all():
        figure.evaluate("(node) => { node.mark = 'the same node'; }")
    match_figures(notebook, number, figures)
    for index, (control, kind) in enumerate(list(panel["controls"].items())[:controls]):
        before, _ = notebook.ask(EXPECT.format(panel=number))
        # To the right, and back to the left where the control was at its end.
        for key in ("ArrowRight", "ArrowLeft"):
            press(page, box, index, panel, kind, key)
            after = settle(notebook, number, box, figures, before)
            if after[control] != before[control]:
                break
        assert after[control] != before[control], f"{control} of panel {number + 1} did not move by keyboard"
        earlier = list(panel["controls"])[:index]  # later ones follow what fits
        assert all(before[name] == after[name] for name in earlier)
        # Back again, so that the next control starts from sizes that fit.
        press(page, box, index, panel, kind, "ArrowLeft" if key == "ArrowRight" else "ArrowRight")
        assert settle(notebook, number, box, figures, after) == before
    shot(box)


def press(page, box, index, panel, kind, key):
    """Press a key on control number ``index`` of a panel."""
    before = list(panel["controls"].values())[:index]
    control = box.locator(LOCATORS[kind]).nth([LOCATORS[other] for other in before].count(LOCATORS[kind]))
    if kind == "ToggleButtons":
        buttons = control.locator("button")
        chosen = buttons.evaluate_all("(all) => all.findIndex((one) => one.classList.contains('mod-active'))")
        control = buttons.nth(max(0, min(buttons.count() - 1, chosen + (1 if key == "ArrowRight" else -1))))
    control.focus()
    page.keyboard.press(KEYS.get(kind, {}).get(key, key))


#: Keys that mean "one further" and "one back" where the arrows to the sides don't.
KEYS = {
    "ToggleButtons": {"ArrowRight": "Space", "ArrowLeft": "Space"},
    "Checkbox": {"ArrowRight": "Space", "ArrowLeft": "Space"},
}
LOCATORS = {
    "IntSlider": ".noUi-handle",
    "SelectionSlider": ".noUi-handle",
    "ToggleButtons": ".widget-toggle-buttons",
    "Checkbox": "input[type=checkbox]",
}


def settle(notebook, number, box, figures, old):
    """Wait until the controls say something new, and the page shows it; return what they say.

    Gives up on new values after a while: a control at its end stays as it is.
    """
    page, line = notebook.page, box.locator(".actmem-line")
    start = time.monotonic()
    while time.monotonic() < start + PATIENCE_SECONDS:
        values, drawn = notebook.ask(EXPECT.format(panel=number))
        said = line.text_content() or ""
        if values == old:
            if time.monotonic() > start + 2:
                return values
        elif isinstance(drawn, str):
            if said.startswith(f"✗ {drawn}"):
                return values
        elif not said and [figure.get_attribute("aria-label") for figure in figures.all()] == [d["alt"] for d in drawn]:
            break
        page.wait_for_timeout(50)
    match_figures(notebook, number, figures)
    return values


def match_figures(notebook, number, figures):
    """Assert that the page shows what a new drawing of the same sizes has, in the same node as before."""
    _, drawn = notebook.ask(EXPECT.format(panel=number))
    for figure, wanted in zip(figures.all(), drawn, strict=True):
        shown = figure.evaluate(SHOWN)
        assert shown["mark"] == "the same node" and shown["role"] == "figure"
        assert shown["alt"] == wanted["alt"]
        assert " ".join(shown["title"].split("<br>")) == " ".join(wanted["title"].split("<br>"))
        assert len(shown["data"]) == len(wanted["data"])
        for trace, expected in zip(shown["data"], wanted["data"]):
            for axis in ("x", "y", "base", "text", "z"):
                assert trace.get(axis) == expected.get(axis), (trace.get("name"), axis)


#: The forms of the kernel, in the order in which they were made.
PREDICTIONS = PANELS + """
print(_json.dumps([_cells.get(widget.model_id, widget.model_id) for widget in _instances.values() if isinstance(widget, _Prediction)]))
"""


def use_predictions(notebook):
    """Answer every question of a notebook, and return how many there are."""
    page, asked = notebook.page, notebook.ask(PREDICTIONS)
    for model in asked:
        box = notebook.go_to(model)
        form = box.locator(".actmem-predict")
        figures = box.locator(".actmem-figure")
        field, reply = form.locator("input"), form.locator("output")
        expect(reply).to_have_text("")
        expect(figures.first).to_be_visible()
        field.focus()
        page.keyboard.type("a lot")
        page.keyboard.press("Enter")
        expect(reply).to_have_text(re.compile("^✗ a lot is not a number"))
        expect(field).to_have_attribute("aria-invalid", "true")
        field.fill("7")
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        expect(reply).to_have_text(re.compile("^You said 7"))
        expect(box).to_contain_text("your guess")
    return len(asked)
