"""Controls as data: what they offer can be drawn, and what depends on others follows them."""

import json

from actmem.config import ModelShape
from actmem_course.figures.ch01_memory_wall import METHODS, memory_wall
from actmem_course.figures.controls import Moves, after, slider, steps
from actmem_course.figures.in_page import Page
from actmem_course.figures.marks import Drawing


def follower():
    """Two controls, of which the second offers the divisors of the first."""
    divisors = steps("d", "divisor", lambda n: [d for d in range(1, n + 1) if n % d == 0], 4)
    return Moves(lambda n, d: Drawing([], {}, f"{n} / {d}."), {"n": slider("n", "number", 1, 12, 1, 12), "d": divisors})


def test_a_control_offers_what_fits_the_ones_before_it_and_goes_back_where_it_was():
    moves = follower()
    drawn = []
    for number in (12, 9, 7, 12):
        assert moves.move("n", number) == ""
        drawn.append(moves.drawings[0].alt)
        assert moves.options("d") == [d for d in range(1, number + 1) if number % d == 0]
    assert drawn == ["12 / 4.", "9 / 3.", "7 / 1.", "12 / 4."]


def test_sizes_that_do_not_fit_are_refused_in_words_and_the_figure_stays():
    def draw(s, a):
        return Drawing([], {}, f"{ModelShape(s, 1, 96, a)}")

    moves = Moves(draw, {"s": slider("s", "tokens", 16, 128, 16, 64), "a": slider("a", "heads", 1, 16, 1, 8)})
    before = moves.drawings
    assert moves.move("a", 7) == "✗ hidden_size: 96 must be divisible by num_attention_heads = 7. Still drawn: s=64 a=8"
    assert moves.drawings == before
    assert "Still drawn: s=64 a=8" in moves.move("s", 80) and moves.drawings == before
    assert moves.move("a", 6) == "" and moves.drawings[0].alt == draw(80, 6).alt


# A page's figures without a browser: the code of a cell, its controls and its answers, as JSON.


WALL = "from actmem_course.figures import Panel, choice\nfrom actmem_course.figures.ch01_memory_wall import METHODS, memory_wall\nPanel(memory_wall, method=choice('method', METHODS, 'tensor'))"
FOLLOWS = """
from actmem_course.figures import Panel, slider, steps
from actmem_course.figures.marks import (Drawing)
Panel(lambda n, d: Drawing([], {}, f"{n} / {d}."), n=slider("n", "number", 1, 12, 1, 12),
      d=steps("d", "divisor", lambda n: [d for d in range(1, n + 1) if n % d == 0], 4))
"""


def ask(page, **message):
    return json.loads(page.ask(json.dumps(message)))


def test_a_button_draws_what_the_function_draws():
    page = Page(json.dumps({"wall": WALL}))
    moved = ask(page, cell="wall", control="method", place=2)
    assert moved["controls"]["method"]["options"] == list(METHODS)
    assert moved["controls"]["method"]["place"] == 2 and moved["message"] == ""
    drawn = after(memory_wall("tensor"), memory_wall(list(METHODS)[2]))
    assert moved["drawings"] == json.loads(json.dumps([{**drawn.spec(), "alt": drawn.alt}]))


def test_what_a_step_would_show_is_answered_ahead_while_the_figure_stays():
    page = Page(json.dumps({"a": FOLLOWS}))
    ahead = ask(page, cell="a", control="n", place=8, ahead=True)
    assert ahead["controls"]["n"]["place"] == 8 and ahead["drawings"][0]["alt"] == "9 / 3."
    other = ask(page, cell="a", control="d", place=0)
    assert other["controls"]["n"]["place"] == 11 and other["drawings"][0]["alt"] == "12 / 1."
    # What was looked at before that move is not what the step leads to now.
    assert ask(page, cell="a", control="n", place=8)["drawings"][0]["alt"] == "9 / 1."


def test_a_place_that_another_control_has_just_taken_away_is_the_last_one():
    page = Page(json.dumps({"a": FOLLOWS}))
    ask(page, cell="a", control="n", place=8)
    assert ask(page, cell="a", control="d", place=5)["drawings"][0]["alt"] == "9 / 9."
