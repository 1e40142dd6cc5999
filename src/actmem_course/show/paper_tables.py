"""The tables of ``measure_paper``: the paper's numbers and ours, in 80 columns.

headings: what is printed above the lines of each model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from actmem_course.others.disagreements import Disagreement
from actmem_course.results import Number, PaperEntry

#: Spaces between two columns: one of padding, one of the box's own divider.
_GAP = 2

#: Unit of the FLOPs table.
_PETA = 10**15


@dataclass(frozen=True)
class _Line:
    """Cells from left to right.  below: a second, dim line under the first cells."""

    model: str
    cells: tuple[str, ...]
    below: tuple[str, ...] = ()
    wrong: bool = False


def exact_table(title: str, entries: Iterable[PaperEntry], headings: Mapping[str, str]) -> Group:
    """Whole numbers: what is predicted, what the paper leaves out, what was measured, the difference.

    Below each name, dim: the paper's own formula or claim, with its number.
    """
    lines = []
    for e in entries:
        extra = "" if e.measured is None else f"{e.extra:,}"
        cells = (e.quantity, _whole(e.ours_formula), extra, _whole(e.measured), _whole(e.difference))
        below = (f"  {e.note}", _whole(e.printed)) if e.note else ()
        lines.append(_Line(e.model, cells, below, e.exact is False))
    return _table(title, ("", "predicted", "extra", "measured", "diff."), lines, headings)


def percent_table(title: str, entries: Iterable[PaperEntry], headings: Mapping[str, str] = {}) -> Group:
    """Percentages: as printed, by formula, measured, and how far ours is from the printed one, in points."""
    lines = []
    for e in entries:
        off = "" if e.difference_from_paper is None else f"{float(e.difference_from_paper):+.2f}"
        printed = "" if e.paper is None else str(e.paper)
        cells = (e.quantity, printed, _decimal(e.ours_formula), _decimal(e.measured), off)
        lines.append(_Line(e.model, cells, wrong=e.exact is False))
    return _table(title, ("percent", "paper", "ours", "measured", "ours − paper"), lines, headings)


def flops_table(title: str, entries: Iterable[PaperEntry], headings: Mapping[str, str]) -> Group:
    """FLOPs in units of 10¹⁵; the difference is in single FLOPs."""
    lines = []
    for e in entries:
        numbers = ("" if x is None else f"{x / _PETA:,.4f}" for x in (e.printed, e.ours_formula, e.measured))
        lines.append(_Line(e.model, (e.quantity, *numbers, _whole(e.difference)), wrong=e.exact is False))
    return _table(title, ("10¹⁵ FLOPs", "paper", "ours", "counted", "diff."), lines, headings)


def ranks_table(
    title: str, entries: Iterable[PaperEntry], outputs: Mapping[int, int], headings: Mapping[str, str]
) -> Group:
    """Figure 9: bytes of pipeline ranks, and how much outputs would add; outputs: bytes by rank."""
    lines = []
    for e in entries:
        extra = "" if e.measured is None else f"{e.extra:,}"
        numbers = (_whole(e.ours_formula), extra, _whole(e.measured), _whole(e.difference))
        lines.append(
            _Line(e.model, (e.quantity, *numbers, _whole(outputs[e.pipeline_rank or 0])), wrong=e.exact is False)
        )
    return _table(title, ("", "predicted", "extra", "measured", "diff.", "outputs"), lines, headings)


def disagreements_list(title: str, found: Iterable[Disagreement]) -> Group:
    """Each place in a few lines."""
    parts: list = [Text(title, style="bold")]
    for place in found:
        parts.append(Text(f"\n{place.where}", style="bold"))
        lines = Table.grid(padding=(0, 1))
        lines.add_column(width=6, justify="right", style="dim")
        lines.add_column()
        lines.add_row("paper", place.printed)
        lines.add_row("ours", ", ".join(map(str, place.ours)))
        lines.add_row("", place.why)
        parts.append(lines)
    return Group(*parts)


def _table(title: str, header: Sequence[str], lines: Sequence[_Line], headings: Mapping[str, str]) -> Group:
    """One table for each model, below its heading, all with the same columns; a column that is empty
    throughout is left out."""
    used = [i for i in range(len(header)) if not i or any(line.cells[i] for line in lines)]
    widths = {}
    for i in used:
        texts = [cells[i] for line in lines for cells in (line.cells, line.below) if i < len(cells)]
        widths[i] = max(len(header[i]), *map(len, texts)) + (i == 0)  # names are set in by one

    def table(show_header: bool) -> Table:
        # A width of its own, so that a narrow screen cuts no number off.
        width = sum(widths.values()) + _GAP * (len(used) - 1)
        made = Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
            show_header=show_header,
            width=width,
        )
        for i in used:
            made.add_column(header[i], justify="right" if i else "left", min_width=widths[i], no_wrap=True)
        return made

    def cells(texts: Sequence[str]) -> list[str]:
        return [" " + texts[0], *(texts[i] if i < len(texts) else "" for i in used[1:])]

    parts: list = [Text(title, style="bold"), table(show_header=True)]
    for model in dict.fromkeys(line.model for line in lines):
        if model in headings:
            parts.append(Text(headings[model], style="italic"))
        of_model = table(show_header=False)
        for line in (line for line in lines if line.model == model):
            of_model.add_row(*cells(line.cells), style="bold red" if line.wrong else "")
            if line.below:
                of_model.add_row(*cells(line.below), style="dim")
        parts.append(of_model)
    return Group(*parts)


def _whole(number: Number | None) -> str:
    return "" if number is None else f"{number:,}"


def _decimal(number: Number | None) -> str:
    return "" if number is None else f"{float(number):.2f}"
