"""Controls beside plain sliders: values that a panel's draw can take."""

from actmem_course.show.choices import choice, steps
from actmem_course.show.drawing import Drawing
from actmem_course.show.panel import Panel, slider


def draw(t, order):
    return Drawing([], {"title": {"text": f"{t} {order}"}}, f"{t} {order}.")


def test_a_panel_is_moved_by_stops_and_names():
    panel = Panel(draw, t=steps("t", "ranks", (1, 2, 8), 2), order=choice("order", ("one", "other"), "one"))
    assert panel.figures[0].drawing.alt == "2 one."
    panel.controls["t"].value = 8
    panel.controls["order"].value = "other"
    assert panel.figures[0].drawing.alt == "8 other." and "t: ranks = 8, order = other" in repr(panel)


def test_stops_look_like_sliders():
    plain, stops = slider("t", "ranks", 1, 8, 1, 1), steps("t", "ranks", (1, 2, 8), 2)
    assert stops.description == plain.description and stops.continuous_update
    assert stops.style.description_width == plain.style.description_width and stops.layout.width == plain.layout.width
