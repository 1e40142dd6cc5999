"""What a moved control does, wherever it is shown: new values that fit, new drawings, or words that say why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actmem.config import ConfigError
from actmem_course.show.choices import Control, fitted, in_letters, shown_value
from actmem_course.show.drawing import Drawing
from actmem_course.show.ghost import after


class Moves:
    """The state of controls and of the figures that they change.

    draw: takes the controls' values by name and returns a Drawing, or several.  controls: by the name of draw's
    argument.  When one moves, those after it offer what fits it, and stay as near as they can to where the
    reader put them.  values: what the controls say; drawings: what is on screen.
    """

    def __init__(self, draw: Callable[..., Drawing | Sequence[Drawing]], controls: Mapping[str, Control]):
        self._draw, self.controls = draw, controls
        self._wanted = {name: control.start for name, control in controls.items()}
        self._before: list[Drawing] = []
        self.values = self._drawn_values = fitted(controls, self._wanted)
        self.drawings = self.drawn(self.values)

    def options(self, name: str) -> list:
        """What a control offers beside the others' values."""
        return self.controls[name].options(self.values)

    def drawn(self, values: Mapping[str, Any]) -> list[Drawing]:
        """What values look like after what was shown before them."""
        drawn = self._draw(**values)
        drawings = [drawn] if isinstance(drawn, Drawing) else list(drawn)
        return [after(*pair) for pair in zip(self._before, drawings, strict=True)] if self._before else drawings

    def move(self, name: str, value: Any) -> str:
        """Put a control to a value.  Returns why it can't be drawn, or nothing; then ``drawings`` are new."""
        self._wanted[name] = value
        self.values = fitted(self.controls, self._wanted)
        before, self._before = self._before, self.drawings
        try:
            self.drawings = self.drawn(self.values)
        except ConfigError as error:
            self._before = before
            still = " ".join(f"{name}={shown_value(value)}" for name, value in self._drawn_values.items())
            return f"✗ {in_letters(str(error))}. Still drawn: {still}"
        self._drawn_values = self.values
        return ""
