"""A line that counts seconds while a cell waits for other processes."""

from __future__ import annotations

import threading
import time

from actmem_course.show.line import Line
from actmem_course.show.live import mime_bundle


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
