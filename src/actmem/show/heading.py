"""The title of a figure: its finding, in one or two lines, at the same distance from the top at every height."""

from __future__ import annotations


def heading(text: str) -> dict:
    """A layout's ``title``.  A place in pixels, because a share of the height cuts two lines off in low figures."""
    return {"text": text, "y": 1, "pad": {"l": 12, "t": 20}}
