"""The page that ``record --html`` writes: one file with tables, a treemap and the curve of a step.

A browser shows it without a server.
"""

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from actmem.ledger.ledger_tables import HEADINGS, fold, lines_of, rows_of_file


def page(result: dict[str, Any]) -> str:
    """Return the text of one HTML page that shows a recorded run.

    Args:
        result: the dict of a recorded run (its total bytes, rows, findings and curve), from ``record_command.as_dict``.
    """
    data = json.dumps(result).replace("<", "\\u003c")
    parts = [
        f"<h1>{escape(result.get('target', 'model'))}: {result['total_bytes']:,} bytes stay for backward</h1>",
        *(f"<p>{escape(note)}</p>" for note in result.get("notes", ())),
        '<h2>By module: click to look inside</h2><div id="map"></div>',
    ]
    if result.get("findings"):
        lines = [[f"{f['bytes']:,}", f["waste"], f["text"]] for f in result["findings"]]
        parts += ["<h2>What could go</h2>", _wide(("bytes", "waste", "change"), lines)]
    parts += ["<h2>Rows</h2>", _rows(result["rows"])]
    if "peak" in result:
        parts.append(f"<h2>One step: {result['peak_bytes']:,} bytes at the peak</h2>")
        parts += ['<div id="curve"></div><div id="bill"></div>', _rows(result["peak"])]
    template = resources.files("actmem_tools").joinpath("record_page.html").read_text(encoding="utf-8")
    return Template(template).substitute(body="".join(parts), data=data)


def _rows(rows: Iterable[dict[str, Any]]) -> str:
    folded = fold(rows_of_file(rows))
    return _wide((*HEADINGS, "line"), [(*cells, row.line) for row, cells in zip(folded, lines_of(folded))])


def _wide(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in HTML that scrolls sideways by itself."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
