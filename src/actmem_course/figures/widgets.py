"""Two small outputs of notebooks: how long a process has been running, and numbers that differ between machines."""

from __future__ import annotations

import threading
import time
from html import escape

from actmem_course.figures.live import Carried, mime_bundle, script


class Progress(Carried):
    """Shows a line of text and the elapsed seconds while its ``with`` block runs.

    ``with Progress("labs/measure_table2.py, two processes"): …``.  Screen readers read the line out.

    Args:
        what: The text: what runs. It is stored with the notebook; the seconds aren't, because they differ from run to
            run.
    """

    _esm = script("carried.js", "progress.js")

    def __init__(self, what: str):
        super().__init__({"text": ""})
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
        self.carry(text=f"{self.what}: {words.format(seconds=round(time.monotonic() - self._start))}")

    def __repr__(self) -> str:
        return self.what

    def _repr_mimebundle_(self, **kwargs: object) -> dict:  # type: ignore[override]  # Jupyter takes both forms
        return mime_bundle(self, repr(self))


class Varies:
    """Displays a small table of names with values that differ from machine to machine.

    Its text form has no values, so that a stored notebook is the same everywhere.

    Args:
        facts: The values by name, such as {"device": "H200"}.
    """

    def __init__(self, facts: dict[str, object]):
        self.facts = facts

    def __repr__(self) -> str:
        return "(Your machine's numbers appear here when you run this cell in a notebook.)"

    def _repr_mimebundle_(self, **kwargs: object) -> tuple[dict, dict]:
        lines = "".join(
            f"<tr><th scope='row' style='text-align:left'>{escape(name)}</th><td "
            f"style='text-align:left'>{escape(str(value))}</td></tr>"
            for name, value in self.facts.items()
        )
        return {"text/plain": repr(self), "text/html": f"<table>{lines}</table>"}, {"varies": True}
