"""Facts that differ from machine to machine: shown when a notebook runs, not stored in it."""

from __future__ import annotations

from html import escape


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
