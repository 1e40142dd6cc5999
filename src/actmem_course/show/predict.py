"""Guess first: a question, a field for the learner's number, then the answer."""

from __future__ import annotations

import json

import traitlets

from actmem_course.show.carried import CARRIED, Carried
from actmem_course.show.guess import SHOW_ME, judged
from actmem_course.show.live import DARK, mime_bundle
from actmem_course.show.style import INK, WARNING

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

_STYLE = f"""
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
    guess.  because: shown with the answer.  ``value`` is the last guess that was a number.
    """

    _esm = _FORM
    _css = _STYLE + DARK
    question = traitlets.Unicode().tag(sync=True)
    unit = traitlets.Unicode().tag(sync=True)
    guess = traitlets.Unicode().tag(sync=True)
    tries = traitlets.Int().tag(sync=True)

    def __init__(self, question: str, answer: float, unit: str = "", because: str = ""):
        super().__init__({"reply": "", "refused": False}, question=question, unit=unit)
        self._answer, self._because = answer, because
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
