"""Every control of every chapter, moved without a browser."""

import pytest

from actmem_course.figures.in_page import run_cell
from notebooks.site.slices import figures
from tests.drawings import assert_valid
from tests.notebooks.stored_chapters import NAMES, stored


def shown_matches(panel, message):
    """Whether the figures are what the panel's values draw anew, or a message says why they can't be drawn."""
    if message:
        assert message.startswith("✗ ") and "Still drawn: " in message
        return
    drawn = panel.drawn(panel.values)
    for drawing in drawn:
        assert_valid(drawing)
    assert [drawing.spec() for drawing in panel.drawings] == [drawing.spec() for drawing in drawn]


@pytest.mark.parametrize("name", NAMES)
def test_every_control_moves_its_figures_and_moves_them_back(name):
    panels = [run_cell(code).moves for code in figures(stored(name)).values() if "Panel(" in code]
    assert panels
    for panel in panels:
        shown_matches(panel, "")
        for index, control in enumerate(panel.controls):
            before, values = panel.values, panel.options(control)
            place = values.index(before[control])
            beside = values[place + 1 if place + 1 < len(values) else place - 1]
            for wanted in dict.fromkeys((beside, values[0], values[-1])):
                message = panel.move(control, wanted)
                assert panel.values[control] == wanted
                assert all(before[earlier] == panel.values[earlier] for earlier in list(panel.controls)[:index])
                shown_matches(panel, message)
                assert not panel.move(control, before[control]) and panel.values == before
                shown_matches(panel, "")
