"""Widgets without a browser: what reaches the page, and when."""

import json

import pytest
from ipywidgets.widgets import widget

from actmem.config import ModelShape
from actmem.formulas.activations import eq1, layer_rows
from actmem.models import TINY
from actmem_course.show.controls import SHOW_ME, slider, steps
from actmem_course.show.layer import layer_bars
from actmem_course.show.live import PICTURE_MIME, PICTURES, WIDGET_MIME, LiveFigure, PlotlyScript
from actmem_course.show.marks import Axis, Drawing, GuessLine
from actmem_course.show.widgets import Panel, Prediction, Progress, Reveal

DRAWING = layer_bars(layer_rows(TINY), TINY)


def draw(s, a):
    shape = ModelShape(s, 1, 96, a)
    return layer_bars(layer_rows(shape), shape)


def panel():
    return Panel(draw, s=slider("s", "tokens", 16, 128, 16, 64), a=slider("a", "heads", 1, 16, 1, 8))


# figures


def test_plotlyjs_is_sent_once_for_all_figures():
    LiveFigure(DRAWING)
    script = PlotlyScript.send()
    LiveFigure(DRAWING)
    assert PlotlyScript.send() is script
    assert "plotly.js v" in script.source[:200] and len(script.source) > 10**6


def test_a_figure_holds_no_copy_of_plotlyjs():
    assert len(json.dumps(LiveFigure(DRAWING).get_state(), default=str)) < 20_000


def test_a_new_script_opens_with_plotlyjs_and_a_page_loaded_anew_asks_for_it(monkeypatch):
    opened, sent, create = [], [], widget.comm.create_comm
    monkeypatch.setattr(
        widget.comm, "create_comm", lambda **what: opened.append(what["data"]["state"]) or create(**what)
    )
    script = PlotlyScript("// plotly.js")
    assert opened[-1]["source"] == "// plotly.js"
    assert script.get_state()["source"] == ""  # what ipywidgets sends of every widget
    monkeypatch.setattr(script.comm, "send", lambda data=None, **rest: sent.append(data))
    script._handle_msg({"content": {"data": {"method": "custom", "content": {}}}, "buffers": []})
    assert [(message["method"], message["state"]) for message in sent] == [("update", {"source": "// plotly.js"})]


def test_a_closed_script_is_sent_again():
    script = PlotlyScript.send()
    script.close()
    assert PlotlyScript.send() is not script


def test_drawing_anew_is_one_message_of_the_new_state(monkeypatch):
    figure, sent = LiveFigure(DRAWING), []
    monkeypatch.setattr(figure, "send_state", lambda key=None: sent.append(key))
    monkeypatch.setattr(figure.carrier.comm, "send", lambda data=None, **rest: sent.append(data["state"]))
    figure.draw(draw(64, 8))
    (state,) = sent  # in the model that has no time limit
    assert json.loads(state["value"]) == {"spec": draw(64, 8).spec(), "alt": draw(64, 8).alt}


def test_a_figure_says_itself_in_words_without_an_identity():
    assert repr(LiveFigure(DRAWING)) == DRAWING.alt == repr(LiveFigure(DRAWING))


def test_the_drawing_is_displayed_only_for_a_build(monkeypatch):
    monkeypatch.delenv(PICTURES, raising=False)
    figure = LiveFigure(DRAWING)
    assert set(figure._repr_mimebundle_()) == {"text/plain", WIDGET_MIME}
    monkeypatch.setenv(PICTURES, "1")
    (spec,) = figure._repr_mimebundle_()[PICTURE_MIME]
    assert spec["data"] == DRAWING.traces and spec["fingerprint"] == DRAWING.fingerprint()


# panels


def test_a_slider_changes_the_figure_and_makes_no_new_one():
    shown = panel()
    (figure,) = shown.figures
    shown.controls["s"].value = 128
    assert shown.figures == [figure]
    assert f"{eq1(ModelShape(128, 1, 96, 8)):,} bytes" in figure.drawing.alt
    assert figure.carried["spec"]["data"][: len(draw(128, 8).traces)] == draw(128, 8).traces


def test_sizes_that_do_not_fit_are_refused_in_words_and_the_figure_stays():
    shown = panel()
    before = shown.figures[0].carried
    shown.controls["a"].value = 7
    assert shown.message.text == "✗ h: 96 must be divisible by a = 7. Still drawn: s=64 a=8"
    assert shown.figures[0].carried == before
    shown.controls["s"].value = 80  # still refused, and still the old sizes
    assert "Still drawn: s=64 a=8" in shown.message.text and shown.figures[0].carried == before
    shown.controls["a"].value = 6
    assert shown.message.text == ""
    assert shown.figures[0].drawing.alt == draw(80, 6).alt


def test_other_errors_are_not_swallowed():
    def broken(s):
        return 1 // (s - 2)

    with pytest.raises(ZeroDivisionError):
        Panel(broken, s=slider("s", "tokens", 1, 4, 1, 2))


def test_one_panel_changes_several_figures():
    both = Panel(lambda s: (draw(s, 8), draw(2 * s, 8)), s=slider("s", "tokens", 16, 128, 16, 64))
    both.controls["s"].value = 32
    assert [figure.drawing.alt for figure in both.figures] == [draw(32, 8).alt, draw(64, 8).alt]


def test_a_panel_says_itself_in_words():
    assert repr(panel()) == "Sliders: s: tokens = 64, a: heads = 8\n" + draw(64, 8).alt


# a guess and its figure


def asked():
    """A panel that stands at s = 16, and a question that its s = 64 answers."""

    def bars(s):
        return Drawing([], {"xaxis": {"range": [0, 100]}}, f"{s} tokens.")

    return Reveal(
        Prediction("How many?", 64, "GiB", "Because.", GuessLine()),
        Panel(bars, s=steps("s", "tokens", (16, 64), 16)),
        s=64,
    )


def test_the_panel_moves_to_the_answer_with_the_guess_in_its_figure(monkeypatch):
    monkeypatch.setenv(PICTURES, "1")
    both = asked()
    bundle = both._repr_mimebundle_()
    assert len(bundle[PICTURE_MIME]) == 1 and bundle["text/plain"] == f"{both.prediction!r}\n{both.figure!r}"
    guess(both.prediction, "x")  # no number
    assert both.figure.controls["s"].value == 16
    guess(both.prediction, "7")
    (figure,) = both.figure.figures
    assert both.figure.controls["s"].value == 64 and figure.drawing.alt == "64 tokens."
    (line,) = figure.drawing.layout["shapes"]
    assert line["x0"] == line["x1"] == 7 and line["label"]["text"] == "your guess"
    both.figure.controls["s"].value = 16
    assert "shapes" not in figure.drawing.layout, "a guess belongs to one state"


def test_show_me_gives_the_answer_without_a_guess():
    both = asked()
    assert guess(both.prediction, SHOW_ME) == "It is 64 GiB.\nBecause."
    assert both.prediction.value is None and "shapes" not in both.figure.figures[0].drawing.layout


@pytest.mark.parametrize("guess, at", [(3, 16 * 1024), (-10, 0), (1000, 40 * 1024)])
def test_a_guess_beyond_the_axis_stands_at_its_end(guess, at):
    drawing = Drawing([], {"xaxis": {"range": [0, 40]}}, "Bars.", Axis("KiB", 40, 1024))
    line = drawing.marked(GuessLine(per=4096, start=4096), guess).layout["shapes"][0]
    assert line["x0"] * 1024 == line["x1"] * 1024 == at and (line["y0"], line["y1"], line["yref"]) == (0, 1, "paper")


# progress


def test_a_wait_is_shown_with_its_seconds_which_are_not_stored():
    waiting = Progress("labs/a.py, two processes")
    with waiting:
        assert waiting.text == "labs/a.py, two processes: runs, 0 s"
    assert waiting.text == "labs/a.py, two processes: done in 0 s" and repr(waiting) == "labs/a.py, two processes"
    with pytest.raises(ValueError), waiting:
        raise ValueError
    assert "ended after 0 s" in waiting.text


# predictions


def guess(prediction, text):
    """What the form does when it is sent."""
    prediction.guess = text
    prediction.tries += 1
    return prediction.reply


def test_the_answer_is_nowhere_before_a_guess():
    prediction = Prediction("How many?", 1234.5, "GiB", "Because of 98765.")
    state = json.dumps(prediction.get_state(), default=str) + repr(prediction)
    assert "1,23" not in state and "1234" not in state and "98765" not in state


@pytest.mark.parametrize(
    ("answer", "text", "reply"),
    [
        (2.671, "1", "You said 1 GiB. It is 2.67 GiB: 2.67 times too low."),
        (2.671, "2.65", "You said 2.65 GiB. It is 2.67 GiB: you have it."),
        (2.671, " 3 ", "You said 3 GiB. It is 2.67 GiB: 12% too high."),
        (870, "8,700", "You said 8,700 GiB. It is 870 GiB: 10.0 times too high."),
        (870, "-870", "You said -870 GiB. It is 870 GiB: not close."),
        (870, "0", "You said 0 GiB. It is 870 GiB: not close."),
        (0, "0", "You said 0 GiB. It is 0 GiB: you have it."),
        (256, "256 GiB", "You said 256 GiB. It is 256 GiB: you have it."),
        (12.5, "12,5", "You said 12.5 GiB. It is 12.5 GiB: you have it."),
        (12500, "12,500.0GiB", "You said 12,500 GiB. It is 12,500 GiB: you have it."),
        (0.125, "0,125", "You said 0.125 GiB. It is 0.125 GiB: you have it."),
    ],
)
def test_a_guess_gets_the_answer_and_how_far_it_was(answer, text, reply):
    prediction = Prediction("How much?", answer, "GiB")
    assert guess(prediction, text) == reply
    assert prediction.value is not None and not prediction.refused


def test_percent_stands_at_the_number():
    assert guess(Prediction("What share?", 70.15, "%"), "35%") == "You said 35%. It is 70.2%: 2.00 times too low."


@pytest.mark.parametrize("text", ["abc", "", "  ", "nan", "inf", "1e999", "1 2", "٣x", "1,2,3", "3 MiB", "1,23.4"])
def test_what_is_no_number_is_refused_and_gives_nothing_away(text):
    prediction = Prediction("How many?", 4321, "", "Because.")
    reply = guess(prediction, text)
    assert prediction.refused and prediction.value is None
    assert reply.startswith("✗") and "4,321" not in reply and "Because" not in reply


def test_a_refused_guess_keeps_the_last_good_one():
    prediction = Prediction("How many?", 4)
    guess(prediction, "3")
    guess(prediction, "x")
    assert prediction.value == 3
    assert not guess(prediction, "4").startswith("✗") and not prediction.refused
