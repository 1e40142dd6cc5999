"""Controls as plain data: which values a slider, a row of buttons or a switch offers.

Notebooks make widgets of them (``panel``), pages of the site their own sliders (``in_page``).  A control offers
only values that can be drawn: where they depend on other controls, they are a function of those before it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actmem_course.show.style import size_text

#: How a control looks: a slider over evenly spaced numbers, one that stops at given values, buttons, a checkbox, a
#: slider that plays.
RANGE, STOPS_ONLY, BUTTONS, SWITCH, PLAY = ("range", "stops", "buttons", "switch", "play")

#: What the library's messages call the sizes, and the chapters' letters for them.
LETTER_OF = {
    "seq_length": "s",
    "micro_batch_size": "b",
    "hidden_size": "h",
    "num_attention_heads": "a",
    "num_layers": "L",
    "vocab_size": "v",
    "tensor_parallel_size": "t",
    "pipeline_parallel_size": "p",
    "num_model_chunks": "m",
    "num_microbatches": "n",
}


@dataclass(frozen=True)
class Control:
    """label: its words.  values: what it offers, or a function of earlier controls' values, which are its arguments' names."""

    label: str
    values: Sequence | Callable[..., Sequence]
    start: Any
    look: str

    def options(self, before: Mapping[str, Any]) -> list:
        """The values on offer, given those of the controls before it, by name."""
        if not callable(self.values):
            return list(self.values)
        return list(self.values(*(before[name] for name in inspect.signature(self.values).parameters)))


def slider(letter: str, meaning: str, smallest: int, largest: int, step: int, start: int) -> Control:
    """A slider over whole numbers, labelled ``s: tokens``.  Arrow keys move it by ``step``."""
    return Control(f"{letter}: {meaning}", range(smallest, largest + 1, step), start, RANGE)


def steps(letter: str, meaning: str, values: Sequence[int] | Callable[..., Sequence[int]], start: int) -> Control:
    """A slider that stops at ``values`` only; arrow keys move it one stop."""
    return Control(f"{letter}: {meaning}", values, start, STOPS_ONLY)


def play(letter: str, meaning: str, values: Sequence[int] | Callable[..., Sequence[int]], start: int) -> Control:
    """A slider with a button that moves it on by itself, one stop after the other."""
    return Control(f"{letter}: {meaning}", values, start, PLAY)


def choice(meaning: str, names: Sequence, start: Any) -> Control:
    """A button for each name, of which one is pressed."""
    return Control(meaning, list(names), start, BUTTONS)


def switch(meaning: str, start: bool) -> Control:
    """On or off."""
    return Control(meaning, (False, True), start, SWITCH)


def fitted(controls: Mapping[str, Control], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """For each control the value on offer that is nearest to the one wanted."""
    found: dict[str, Any] = {}
    for name, control in controls.items():
        options = control.options(found)
        want = wanted[name]
        found[name] = want if want in options else min(options, key=lambda option: abs(option - want))
    return found


def shown_value(value: object) -> str:
    """A value next to its slider: ``12,288``."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def in_letters(message: str) -> str:
    """A message of the library in the chapters' words: letters for sizes, GiB and MiB for bytes."""
    for name, letter in LETTER_OF.items():
        message = re.sub(rf"\b{name}\b", letter, message)
    if not re.search(r"_bytes\b", message):
        return message
    message = re.sub(r"\b(\w+)_bytes\b", lambda found: found[1].replace("_", " "), message)
    return re.sub(r"\d[\d,]{3,}", lambda found: size_text(int(found[0].replace(",", ""))), message)
