"""A page's figures without a browser: the code of a cell, its controls and its answers, as JSON."""

import json

import pytest

from actmem_course.show.controls import SHOW_ME
from actmem_course.show.in_page import Page
from actmem_course.show.memory_wall import front_door

FRONT = "from actmem_course.show.memory_wall import front_door, front_door_controls\nPanel(front_door, **front_door_controls())"
FOLLOWS = """
from actmem_course.show.controls import slider, steps
from actmem_course.show.marks import Drawing
Panel(lambda n, d: Drawing([], {}, f"{n} / {d}."), n=slider("n", "number", 1, 12, 1, 12),
      d=steps("d", "divisor", lambda n: [d for d in range(1, n + 1) if n % d == 0], 4))
"""
GUESS = """
from actmem_course.show.marks import Drawing
Reveal(Prediction("How many?", 98765, "GiB", "Because."), LiveFigure(Drawing([], {}, "98765.")))
"""


def ask(page, **message):
    return json.loads(page.ask(json.dumps(message)))


def alts(state):
    return [drawing["alt"] for drawing in state["drawings"]]


def test_a_switch_draws_what_the_function_draws():
    page = Page(json.dumps({"front": FRONT}))
    first = ask(page, cell="front")
    assert alts(first) == [front_door("175B", True, False, False, False).alt]
    assert (
        first["controls"]["model"]["options"] == ["22B", "175B", "530B", "1T"]
        and first["controls"]["model"]["place"] == 1
    )
    moved = ask(page, cell="front", control="full", place=1)
    assert alts(moved) == [front_door("175B", True, False, False, True).alt] and moved["message"] == ""
    assert moved["controls"]["full"]["place"] == 1
    drawn = front_door("175B", True, False, False, True).spec()
    assert moved["drawings"][0]["data"] == json.loads(json.dumps(drawn["data"]))


def test_what_a_control_offers_follows_the_others():
    page = Page(json.dumps({"a": FOLLOWS}))
    moved = ask(page, cell="a", control="n", place=8)  # the ninth of 1 to 12
    assert moved["controls"]["d"] == {"label": "d: divisor", "look": "stops", "options": ["1", "3", "9"], "place": 1}
    assert alts(moved) == ["9 / 3."]


def test_neither_answer_nor_figure_reaches_the_page_before_a_guess():
    page = Page(json.dumps({"a": GUESS}))
    assert "98765" not in page.ask('{"cell": "a"}') and "98,765" not in page.ask('{"cell": "a"}')
    refused = ask(page, cell="a", guess="many")
    assert refused["refused"] and refused["drawings"] == []
    right = ask(page, cell="a", guess="98765")
    assert right["reply"] == "You said 98,765 GiB. It is 98,765 GiB: you have it.\nBecause." and alts(right) == [
        "98765."
    ]
    assert alts(ask(page, cell="a", guess="x")) == ["98765."], "what was shown stays"


def test_show_me_is_a_guess():
    assert alts(ask(Page(json.dumps({"a": GUESS})), cell="a", guess=SHOW_ME)) == ["98765."]


@pytest.mark.parametrize("cell", ["b", ""])
def test_a_cell_that_is_not_there_is_an_error(cell):
    with pytest.raises(KeyError):
        Page(json.dumps({"a": GUESS})).ask(json.dumps({"cell": cell}))
