"""What notebooks show: sliders that change figures in place, questions, lines of text that change, facts of the machine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import ipywidgets
import traitlets

from actmem_course.show.controls import BUTTONS, PLAY, RANGE, SHOW_ME, Control, Moves, judged, shown_value
from actmem_course.show.live import CARRIED, DARK, Carried, LiveFigure, mime_bundle
from actmem_course.show.marks import Drawing, GuessLine
from actmem_course.show.style import INK, WARNING

_LINE_SCRIPT = (
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

_LINE_STYLE = f"""
.actmem-line {{ min-height: 1.4em; padding: 2px 4px; color: {WARNING}; font-weight: 600; }}
[data-jp-theme-light="false"] .actmem-line {{ color: #FF9D9D; }}
"""


class Line(Carried):
    """One line of text.  It takes the same space when it is empty; screen readers read it out when it changes."""

    _esm = _LINE_SCRIPT
    _css = _LINE_STYLE

    def __init__(self) -> None:
        super().__init__({"text": ""})

    @property
    def text(self) -> str:
        return self.carried["text"]

    @text.setter
    def text(self, text: str) -> None:
        self.carry(text=text)


_LOOK, _LAYOUT = {"description_width": "11em"}, {"width": "min(100%, 42em)"}


def widget_of(control: Control, options: list, value: Any) -> ipywidgets.ValueWidget:
    """The widget that offers a control's options."""
    common = {"value": value, "description": control.label, "style": _LOOK, "layout": _LAYOUT}
    if control.look == BUTTONS:
        style, layout = {**_LOOK, "button_width": "max-content"}, {"width": "100%"}
        return ipywidgets.ToggleButtons(options=options, **{**common, "style": style, "layout": layout})
    if control.look == RANGE:
        ends = {"min": options[0], "max": options[-1], "step": options[1] - options[0] if options[1:] else 1}
        return ipywidgets.IntSlider(**ends, continuous_update=True, readout_format=",d", **common)
    return ipywidgets.SelectionSlider(options=_named(options), continuous_update=True, **common)


#: Between two stops of a slider that plays.
_INTERVAL_MILLISECONDS = 450


def player(slider: ipywidgets.SelectionSlider) -> ipywidgets.HBox:
    """A slider, and buttons that move it on by themselves."""
    buttons = ipywidgets.Play(min=0, max=len(slider.options) - 1, value=slider.index, interval=_INTERVAL_MILLISECONDS)
    ipywidgets.link((buttons, "value"), (slider, "index"))
    slider.observe(lambda change: setattr(buttons, "max", len(slider.options) - 1), "_options_labels")
    return ipywidgets.HBox([slider, buttons], layout={"width": "100%"})


def _named(options: list) -> list[tuple[str, Any]]:
    return [(shown_value(option), option) for option in options]


class Panel(ipywidgets.VBox):
    """Controls above the figures that they change, by ``Moves``.

    If ``draw`` raises ConfigError the panel shows the message in a line, and the figures stay as they were.
    """

    def __init__(self, draw: Callable[..., Drawing | Sequence[Drawing]], **controls: Control):
        self.moves = Moves(draw, controls)
        self.controls = {
            name: widget_of(control, self.moves.options(name), self.moves.values[name])
            for name, control in controls.items()
        }
        self.message = Line()
        self.figures = [LiveFigure(drawing) for drawing in self.moves.drawings]
        shown = [player(control) if controls[name].look == PLAY else control for name, control in self.controls.items()]
        super().__init__([*shown, self.message, *self.figures])
        self.layout.width = "100%"
        self.add_class("actmem-panel")
        self._fitting = False
        for name, control in self.controls.items():
            control.observe(lambda change, name=name: self._moved(name, change["new"]), "value")

    def values(self) -> dict:
        """The controls' values, by name."""
        return {name: control.value for name, control in self.controls.items()}

    def _moved(self, name: str, value: Any) -> None:
        if self._fitting:
            return
        self.message.text = self.moves.move(name, value)
        self._fitting = True
        try:
            for other in self.controls:
                self._fit(other)
        finally:
            self._fitting = False
        if not self.message.text:
            for figure, drawing in zip(self.figures, self.moves.drawings, strict=True):
                figure.draw(drawing)

    def _fit(self, name: str) -> None:
        """Let a control offer what fits the ones before it, and stand where it should."""
        control, options = self.controls[name], self.moves.options(name)
        # In one message: with new values and the old place, the page would move the slider by itself.
        with control.hold_sync():
            if callable(self.moves.controls[name].values) and options != [option for _, option in control.options]:
                control.options = _named(options)
            control.value = self.moves.values[name]

    def __repr__(self) -> str:
        sliders = ", ".join(f"{control.description} = {control.value}" for control in self.controls.values())
        return "\n".join([f"Sliders: {sliders}", *(repr(figure) for figure in self.figures)])

    def _repr_mimebundle_(self, **kwargs: object) -> dict:
        return mime_bundle(self, repr(self), [figure.drawing for figure in self.figures])


# A form: Enter in the field answers as well as the button, and the label belongs to the field.
_FORM = (
    CARRIED
    + """
async function render({ model, el }) {
  const state = await carried(model);
  const form = document.createElement("form");
  form.className = "actmem-predict";
  // Keys belong to the form: JupyterLab looks at them before it (shortcuts) and after it (Enter).
  form.dataset.lmSuppressShortcuts = "true";
  form.onkeydown = (event) => event.stopPropagation();
  form.innerHTML = `
    <label><span class="question"></span>
      <span class="field"><input type="text" inputmode="decimal" autocomplete="off"><span class="unit"></span></span>
    </label>
    <button type="submit">This is my guess</button><button type="button">Show me</button>
    <output role="status"></output>`;
  const [question, unit, input, output] = [".question", ".unit", "input", "output"].map((name) => form.querySelector(name));
  question.textContent = model.get("question");
  unit.textContent = model.get("unit");
  // The kernel forgets a guess when it ends; the browser keeps it for the next time (unless it may not store anything).
  const kept = "actmem guess: " + question.textContent;
  const storage = (use) => { try { return use(window.localStorage); } catch { return null; } };
  input.value = model.get("guess") || storage((local) => local.getItem(kept)) || "";
  const write = () => {
    output.textContent = state.get("reply");
    output.classList.toggle("refused", state.get("refused"));
    input.setAttribute("aria-invalid", String(state.get("refused")));
  };
  write();
  const send = (guess) => {
    model.set("guess", guess);
    model.set("tries", model.get("tries") + 1);
    model.save_changes();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    storage((local) => local.setItem(kept, input.value));
    send(input.value);
  });
  form.querySelector("button[type=button]").addEventListener("click", () => send(SHOW_ME));
  state.on(write);
  el.append(form);
  return () => state.off(write);
}
export default { render };
"""
).replace("SHOW_ME", json.dumps(SHOW_ME))

_FORM_STYLE = f"""
.actmem-predict {{ border: 1px solid {INK}; border-left-width: 6px; border-radius: 4px; padding: 10px 14px; margin: 4px;
  max-width: 52em; background: #FFFFFF; color: {INK}; display: flex; flex-wrap: wrap; gap: 8px 14px; align-items: end; font-size: 14px; }}
.actmem-predict .question {{ display: block; font-weight: 600; margin-bottom: 6px; }}
.actmem-predict label {{ flex-basis: 100%; }}
.actmem-predict input {{ width: 9em; font: inherit; padding: 4px 6px; border: 1px solid {INK}; border-radius: 3px; background: #FFFFFF; color: {INK}; }}
.actmem-predict .unit {{ margin-left: 6px; }}
.actmem-predict button {{ font: inherit; padding: 4px 12px; border: 1px solid {INK}; border-radius: 3px; background: #EEEEEE; color: {INK}; cursor: pointer; }}
.actmem-predict input:focus-visible, .actmem-predict button:focus-visible {{ outline: 3px solid #0072B2; outline-offset: 1px; }}
.actmem-predict output {{ flex-basis: 100%; min-height: 1.4em; white-space: pre-line; }}
.actmem-predict output.refused {{ color: {WARNING}; font-weight: 600; }}
"""


class Prediction(Carried):
    """Ask for a number before showing it.

    question: one sentence.  answer: the number, in ``unit``; it reaches the page only after a
    guess.  because: shown with the answer.  line: where a guess stands in the figure.  ``value`` is the last guess
    that was a number.
    """

    _esm = _FORM
    _css = _FORM_STYLE + DARK
    question = traitlets.Unicode().tag(sync=True)
    unit = traitlets.Unicode().tag(sync=True)
    guess = traitlets.Unicode().tag(sync=True)
    tries = traitlets.Int().tag(sync=True)

    def __init__(self, question: str, answer: float, unit: str = "", because: str = "", line: GuessLine | None = None):
        super().__init__({"reply": "", "refused": False}, question=question, unit=unit)
        self._answer, self._because, self.line = answer, because, line
        self.value: float | None = None
        self.observe(self._judge, "tries")

    @property
    def reply(self) -> str:
        return self.carried["reply"]

    @property
    def refused(self) -> bool:
        return self.carried["refused"]

    @property
    def answered(self) -> bool:
        """Whether the answer is on screen."""
        return bool(self.reply) and not self.refused

    def _judge(self, change: object) -> None:
        said = judged(self.guess, self._answer, self.unit, self._because)
        self.value = self.value if said.value is None else said.value
        self.carry(refused=said.refused, reply=said.reply)

    def __repr__(self) -> str:
        return f"Your prediction: {self.question} (run this cell, then write a number; the answer comes after it)"

    def _repr_mimebundle_(self, **kwargs: object) -> dict:  # type: ignore[override]  # Jupyter takes both forms
        return mime_bundle(self, repr(self), [])


class Reveal(ipywidgets.VBox):
    """A panel that raises a question, and the question below it.

    shows: the controls that show the answer, by name; after a guess, or "show me", the panel moves there and has the
    guess in its figure.  What is stored is the panel before that.
    """

    def __init__(self, prediction: Prediction, figure: Panel, **shows: Any):
        self.prediction, self.figure, self._shows = prediction, figure, shows
        super().__init__([figure, prediction])
        self.layout.width = "100%"
        prediction.observe(self._show, "tries")

    def _show(self, change: object) -> None:
        if not self.prediction.answered:
            return
        for name, value in self._shows.items():
            self.figure.controls[name].value = value
        line, guess = self.prediction.line, self.prediction.value
        if line and guess is not None and self.prediction.guess != SHOW_ME:
            self.figure.figures[line.figure].draw(self.figure.moves.drawings[line.figure].marked(line, guess))

    def __repr__(self) -> str:
        return f"{self.prediction!r}\n{self.figure!r}"

    def _repr_mimebundle_(self, **kwargs: object) -> dict:
        return mime_bundle(self, repr(self), [figure.drawing for figure in self.figure.figures])


class Progress(Line):
    """``with Progress("labs/measure_table2.py, two processes"): …`` shows the line, and how long it has been.

    what: is stored with the notebook; the seconds are not, since they differ.
    """

    def __init__(self, what: str):
        super().__init__()
        self.what = what
        self._over = threading.Event()

    def __enter__(self) -> Progress:
        from IPython.display import display

        self._start = time.monotonic()
        self._say("runs, {seconds} s")
        display(self)
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._ticker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._ticker.join()
        self._say("done in {seconds} s" if error[0] is None else "ended after {seconds} s")

    def _tick(self) -> None:
        while not self._over.wait(1):
            self._say("runs, {seconds} s")

    def _say(self, words: str) -> None:
        self.text = f"{self.what}: {words.format(seconds=round(time.monotonic() - self._start))}"

    def __repr__(self) -> str:
        return self.what

    def _repr_mimebundle_(self, **kwargs: object) -> dict:  # type: ignore[override]  # Jupyter takes both forms
        return mime_bundle(self, repr(self), [])


class Varies:
    """Names and values, as a small table.  The text form names the facts only, so that it is the same everywhere."""

    def __init__(self, facts: dict[str, object]):
        self.facts = facts

    def __repr__(self) -> str:
        return f"(differs from machine to machine; run this cell to see: {', '.join(self.facts)})"

    def _repr_mimebundle_(self, **kwargs: object) -> tuple[dict, dict]:
        lines = "".join(
            f"<tr><th scope='row' style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(str(value))}</td></tr>"
            for name, value in self.facts.items()
        )
        return {"text/plain": repr(self), "text/html": f"<table>{lines}</table>"}, {"varies": True}
