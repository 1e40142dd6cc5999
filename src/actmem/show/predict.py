"""Guess first: a question, a field for the learner's number, and the answer only after that."""

from __future__ import annotations

import anywidget
import traitlets

from actmem.show.live import mime_bundle
from actmem.show.style import INK, WARNING, three_digits

# A form: Enter in the field answers as well as the button, and the label belongs to the field.
_FORM = """
function render({ model, el }) {
  const form = document.createElement("form");
  form.className = "actmem-predict";
  // Keys belong to the form: JupyterLab looks at them before it (shortcuts) and after it (Enter).
  form.dataset.lmSuppressShortcuts = "true";
  form.onkeydown = (event) => event.stopPropagation();
  form.innerHTML = `
    <label><span class="question"></span>
      <span class="field"><input type="text" inputmode="decimal" autocomplete="off"><span class="unit"></span></span>
    </label>
    <button type="submit">This is my guess</button>
    <output role="status"></output>`;
  const [question, unit, input, output] = [".question", ".unit", "input", "output"].map((name) => form.querySelector(name));
  question.textContent = model.get("question");
  unit.textContent = model.get("unit");
  // The kernel forgets a guess when it ends; the browser keeps it for the next time (unless it may not store anything).
  const kept = "actmem guess: " + question.textContent;
  const storage = (use) => { try { return use(window.localStorage); } catch { return null; } };
  input.value = model.get("guess") || storage((local) => local.getItem(kept)) || "";
  const write = () => {
    output.textContent = model.get("reply");
    output.classList.toggle("refused", model.get("refused"));
    input.setAttribute("aria-invalid", String(model.get("refused")));
  };
  write();
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    storage((local) => local.setItem(kept, input.value));
    model.set("guess", input.value);
    model.set("tries", model.get("tries") + 1);
    model.save_changes();
  });
  model.on("change:reply", write);
  el.append(form);
  return () => model.off("change:reply", write);
}
export default { render };
"""

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


class Prediction(anywidget.AnyWidget):
    """Ask for a number before showing it.

    question: one sentence.  answer: the number, in ``unit``; it reaches the page only after a
    guess.  because: said with the answer.  ``value`` is the last guess that was a number.
    """

    _esm = _FORM
    _css = _STYLE
    question = traitlets.Unicode().tag(sync=True)
    unit = traitlets.Unicode().tag(sync=True)
    guess = traitlets.Unicode().tag(sync=True)
    tries = traitlets.Int().tag(sync=True)
    reply = traitlets.Unicode().tag(sync=True)
    refused = traitlets.Bool().tag(sync=True)

    def __init__(self, question: str, answer: float, unit: str = "", because: str = ""):
        super().__init__(question=question, unit=unit)
        self._answer, self._because = answer, because
        self.value: float | None = None
        self.observe(self._judge, "tries")

    def _judge(self, change: object) -> None:
        guess = _number(self.guess)
        with self.hold_sync():
            self.refused = guess is None
            if guess is None:
                self.reply = f"✗ {self.guess.strip() or 'An empty field'} is not a number: write it like 1.5 or 1,500"
                return
            self.value = guess
            unit = self.unit if self.unit in ("", "%") else f" {self.unit}"
            self.reply = f"You said {_plain(guess)}{unit}. It is {_plain(self._answer)}{unit}: {_how_far(guess, self._answer)}." + (
                f"\n{self._because}" if self._because else ""
            )

    def __repr__(self) -> str:
        return f"Your prediction: {self.question} (run this cell, then write a number; the answer comes after it)"

    def _repr_mimebundle_(self, **kwargs: object) -> dict:
        return mime_bundle(self, repr(self), [])


def _number(text: str) -> float | None:
    """The finite number that the text is, thousands separated by commas or not; None if it is none."""
    try:
        number = float(text.replace(",", "").replace("_", "").rstrip("% "))
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None


def _plain(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{int(number):,}" if number == int(number) else three_digits(number)


def _how_far(guess: float, answer: float) -> str:
    """A guess within 2% is right; beyond that the factor, which is how sizes are misjudged."""
    if abs(guess - answer) <= 0.02 * abs(answer):
        return "you have it"
    if guess * answer <= 0:
        return "not close"
    factor = max(guess / answer, answer / guess)
    times = f"{three_digits(factor)} times" if factor >= 1.5 else f"{(factor - 1):.0%}"
    return f"{times} too {'high' if abs(guess) > abs(answer) else 'low'}"
