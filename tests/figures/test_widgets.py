"""Widgets without a browser: what reaches the page, and when."""

import json

import plotly.graph_objects as go
from ipywidgets.widgets import widget

from actmem_course.figures.ch01_memory_wall import memory_wall
from actmem_course.figures.controls import steps
from actmem_course.figures.in_page import LiveFigure, Panel, Prediction, Reveal
from actmem_course.figures.live import PICTURE_MIME, PICTURES, WIDGET_MIME, PlotlyScript, Widget
from actmem_course.figures.marks import Drawing, GuessLine

DRAWING = Drawing([{"type": "bar", "x": [1], "y": ["a"]}], {}, "One bar.")


def asked():
    """A panel that stands at s = 16, and a question that its s = 64 answers."""

    def bars(s):
        return Drawing([], {"xaxis": {"range": [0, 100]}}, f"{s} tokens.")

    panel = Panel(bars, s=steps("s", "tokens", (16, 32, 64), 16))
    return Reveal(Prediction("How many?", 64, "GiB", "Because.", GuessLine()), panel, s=64)


def test_plotlyjs_is_sent_once_for_all_figures():
    first = Widget(LiveFigure(DRAWING))
    script = PlotlyScript.send()
    Widget(LiveFigure(DRAWING))
    assert PlotlyScript.send() is script
    assert "plotly.js v" in script.source[:200] and len(script.source) > 10**6
    assert len(json.dumps(first.get_state(), default=str)) < 40_000
    script.close()
    assert PlotlyScript.send() is not script


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


def test_a_move_is_one_message_of_the_new_state(monkeypatch):
    shown = Widget(asked())
    sent = []
    monkeypatch.setattr(shown.carrier.comm, "send", lambda data=None, **rest: sent.append(data["state"]))
    shown.asked = {"control": "s", "place": 1, "number": 1}
    (state,) = sent  # in the model that has no time limit
    now = json.loads(state["value"])
    assert now["number"] == 1 and [drawing["alt"] for drawing in now["state"]["drawings"]] == ["32 tokens."]


def test_the_answer_is_there_from_the_start_and_the_panel_stands_before_it():
    shown = asked()
    began = Widget(shown).carried
    assert [began[part]["drawings"][0]["alt"] for part in ("state", "answer")] == ["16 tokens.", "64 tokens."]
    assert (began["answer"]["number"], began["answer"]["reply"]) == (64, "It is 64 GiB.\nBecause.")
    assert shown.moves.values == {"s": 16}


def test_what_is_stored_is_words_without_an_identity_and_for_a_build_pictures(monkeypatch):
    monkeypatch.delenv(PICTURES, raising=False)
    bundle = asked()._repr_mimebundle_()
    assert set(bundle) == {"text/plain", WIDGET_MIME}
    question = "Your prediction: How many? (run this cell, then write a number; the answer comes after it)"
    assert bundle["text/plain"] == f"{question}\nSliders: s: tokens = 16\n16 tokens."
    assert repr(LiveFigure(DRAWING)) == DRAWING.alt
    monkeypatch.setenv(PICTURES, "1")
    (spec,) = LiveFigure(DRAWING)._repr_mimebundle_()[PICTURE_MIME]
    assert spec["data"] == DRAWING.traces and spec["fingerprint"] == DRAWING.fingerprint()


def test_a_fingerprint_changes_with_the_drawing_only_whatever_plotly_does_with_it(tmp_path):
    spec = memory_wall().spec()
    before = memory_wall().fingerprint()
    go.Figure(spec["data"], spec["layout"]).write_html(tmp_path / "page.html", config=spec["config"])
    assert memory_wall().fingerprint() == before != memory_wall("full").fingerprint()
