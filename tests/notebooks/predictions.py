"""The forms that ask for a guess, used by keyboard."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.notebooks.panels import PANELS

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
        assert figures.count() and not any(figure.is_visible() for figure in figures.all())
        field.focus()
        page.keyboard.type("a lot")
        page.keyboard.press("Enter")
        expect(reply).to_have_text(re.compile("^✗ a lot is not a number"))
        expect(field).to_have_attribute("aria-invalid", "true")
        assert not any(figure.is_visible() for figure in figures.all())
        field.fill("7")
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        expect(reply).to_have_text(re.compile("^You said 7"))
        expect(figures.first).to_be_visible()
    return len(asked)
