"""The chapters that browsers open as notebooks stand for all; and every control of every chapter, moved here."""

import ast
from functools import cache

import pytest
from ipywidgets import Checkbox, IntSlider

from actmem_course.show import today
from actmem_course.show.live import LiveFigure
from actmem_course.show.widgets import Panel, Prediction, Reveal
from notebooks.site.slices import figures
from tests.notebooks.kinds import IN_JUPYTERLAB, NAMES, kinds, stored


@pytest.fixture(scope="module", autouse=True)
def each_plan_is_searched_once():
    """A search takes seconds.  The course keeps none: the mutation run changes formulas under it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("planned_model_of", "plan_of_request"):
            patch.setattr(today, name, cache(getattr(today, name)))
        yield


def test_chapters_opened_in_jupyterlab_have_every_kind():
    missing = {name: kinds(name) for name in NAMES}
    for name in IN_JUPYTERLAB:
        seen = missing.pop(name)
        missing = {other: found - seen for other, found in missing.items()}
    assert {name: found for name, found in missing.items() if found} == {}


def displayed(code):
    """The panel that a cell displays, if it is one: a widget of the notebooks, not of a page."""
    *before, last = ast.parse(code).body
    names = {"Panel": Panel, "LiveFigure": LiveFigure, "Prediction": Prediction, "Reveal": Reveal}
    exec(compile(ast.Module(before, []), "cell", "exec"), names)
    shown = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return shown.figure if isinstance(shown, Reveal) else shown


def offered(control):
    """A control's values, in order."""
    if isinstance(control, Checkbox):
        return [False, True]
    if isinstance(control, IntSlider):
        return list(range(control.min, control.max + 1, control.step))
    return [option[1] if isinstance(option, tuple) else option for option in control.options]


def shown_matches(panel):
    """Whether the figures carry what the panel's values draw anew, or a line says why they can't be drawn."""
    if panel.message.text:
        assert panel.message.text.startswith("✗ ") and "Still drawn: " in panel.message.text
        return
    for figure, drawing in zip(panel.figures, panel.moves.drawn(panel.values()), strict=True):
        assert figure.carried == {"spec": drawing.spec(), "alt": drawing.alt}


@pytest.mark.parametrize("name", NAMES)
def test_every_control_moves_its_figures_and_moves_them_back(name):
    panels = [displayed(code) for code in figures(stored(name)).values() if "Panel(" in code]
    assert panels and all(isinstance(panel, Panel) for panel in panels)
    for panel in panels:
        shown_matches(panel)
        for index, (name, control) in enumerate(panel.controls.items()):
            before, values = panel.values(), offered(control)
            place = values.index(control.value)
            control.value = values[place + 1 if place + 1 < len(values) else place - 1]
            after = panel.values()
            assert after[name] != before[name]
            assert all(before[earlier] == after[earlier] for earlier in list(panel.controls)[:index])
            shown_matches(panel)
            control.value = before[name]
            assert panel.values() == before and not panel.message.text
            shown_matches(panel)
