"""Tables for terminals, by rich.  Bytes in full, since they are exact; at most 80 columns.

Times are medians, Table 4's with their quartiles, and no overhead is printed that could be noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from actmem.rows import Row
from actmem_course.others.disagreements import Disagreement
from actmem_course.results import (
    ExchangeCount,
    Number,
    OtherLine,
    Overhead,
    PaperEntry,
    PeerLine,
    PipelineResult,
    SocketCount,
    SpeedLine,
    Table2Result,
    TimedPair,
)
from actmem_course.show.style import milliseconds, size_text
from actmem_course.show.text import overhead_text

_KINDS = ("all-reduce", "all-gather", "reduce-scatter")
_WRONG = "bold red"
#: Unit of the FLOPs table.
_PETA = 10**15


def table(title: str, *columns: str, tight: bool = True) -> Table:
    """An empty table.  A column's name begins with ``>`` if it is on the right, with ``~`` if its text may be folded."""
    made = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=tight,
    )
    for name in columns:
        look = {">": {"justify": "right", "no_wrap": True}, "~": {"overflow": "fold"}}.get(name[:1], {"no_wrap": True})
        made.add_column(name.lstrip(">~"), **look)  # type: ignore[arg-type]
    return made


def _style(right: bool | None) -> str:
    return _WRONG if right is False else ""


def _whole(number: Number | None, sign: str = "") -> str:
    return "" if number is None else f"{number:{sign},}"


def _dim(text: str, below: str) -> Text:
    return Text(text).append(f"\n{below}", style="dim")


def table2_table(results: Iterable[Table2Result], title: str) -> Table:
    """Table 2, predicted and measured: a line for each configuration, its formula below the name."""
    made = table(title, "bytes per layer and rank", ">predicted", ">extra", ">measured", ">diff.", tight=False)
    for r in results:
        name, plus, last = r.configuration.rpartition("+")
        label = r.configuration if len(r.configuration) <= 25 else f"{name}\n  {plus}{last}"
        numbers = (r.predicted_bytes, r.extra_bytes, r.measured_bytes, r.difference_bytes)
        made.add_row(_dim(label, f"  sbh({r.formula})"), *map(_whole, numbers), style=_style(r.exact))
    return made


def extras_table(rows: Iterable[Row]) -> Table:
    """What the paper leaves out, each with its reason, once a term."""
    made = table("", "extra", "~why it is kept, and why the paper leaves it out", tight=False)
    reasons: dict[str, str] = {}
    for row in rows:
        if row.extra:
            reasons.setdefault(row.term, row.extra)
    for reason in reasons.items():
        made.add_row(*reason)
    return made


def others_table(lines: Iterable[OtherLine]) -> Table:
    """What others' layers keep: a formula, and below it the bytes at each shape, predicted and counted."""
    made = table(
        "What everyone keeps: bytes of one layer, no parallelism",
        "~layer",
        ">predicted",
        ">measured",
        ">diff.",
        tight=False,
    )
    last: tuple[str, ...] = ()
    for line in lines:
        head = f"{line.name}, {line.dtype}", line.formula
        for text in head if head != last else ():
            made.add_row(text)
        last = head
        counted = line.measured_bytes
        measured = ("-", "-") if counted is None else (f"{counted:,}", f"{counted - line.predicted_bytes:,}")
        made.add_row(Text(f"  {line.sizes}", style="dim"), f"{line.predicted_bytes:,}", *measured)
    return made


def why_lines(lines: Iterable[OtherLine]) -> list[tuple[str, str]]:
    """Each reason once, with the layers that it is about."""
    about: dict[str, dict[str, None]] = {}
    for line in lines:
        about.setdefault(line.why, {})[f"{line.name} ({line.dtype})"] = None
    return [(why, ", ".join(names)) for why, names in about.items()]


def pipeline_table(results: Iterable[PipelineResult]) -> Table:
    """A rank a line: microbatches in flight and bytes, predicted and measured."""
    columns = (">rank", ">stage", ">in flight", ">predicted", ">extra", ">measured", ">diff.")
    made = table("One step, when each rank holds most", *columns, tight=False)
    for r in results:
        same = r.measured_in_flight == r.predicted_in_flight
        flight = f"{r.measured_in_flight}" + ("" if same else f" ≠ {r.predicted_in_flight}")
        numbers = (r.predicted_bytes, r.extra_bytes, r.measured_bytes, r.difference_bytes)
        made.add_row(str(r.rank), str(r.pipeline_rank), flight, *map(_whole, numbers), style=_style(r.exact))
    return made


def memory_table(results: Iterable[PipelineResult]) -> Table:
    """What torch's runtime held besides the graphs, and the rank's memory after each action as a curve."""
    columns = (">rank", ">outputs held", ">idle receive buffers")
    made = table("Beside the graphs, and the graphs' bytes after each action", *columns, tight=False)
    made.add_column("memory over the step", no_wrap=True, overflow="fold")
    for r in results:
        curve = sparkline([sample.kept_bytes for sample in r.samples])
        made.add_row(str(r.rank), f"{r.output_bytes:,}", f"{r.buffer_bytes:,}", curve)
    return made


def sparkline(values: list[int]) -> str:
    """A character for each value: its height is the value as a share of the largest."""
    levels = " ▁▂▃▄▅▆▇█"
    top = max(values, default=0) or 1
    return "".join(levels[-(-value * 8 // top)] for value in values)


def exchanges_table(counted: Iterable[ExchangeCount], title: str) -> Table:
    """A form and mode a line: how many of each kind, and bytes that each rank sends around a ring."""
    made = table(title, "one layer, forward + backward", ">all-red.", ">gather", ">scatter", ">bytes sent", ">diff.")
    form = ""
    for one in counted:
        if one.name != form:
            form = one.name
            made.add_row(form, style="bold")
        numbers = (str(one.measured.get(kind, 0) or "–") for kind in _KINDS)
        sent = (one.measured_wire_bytes, one.measured_wire_bytes - one.predicted_wire_bytes)
        made.add_row(f"  {one.recompute}", *numbers, *map(_whole, sent), style=_style(one.exact))
    return made


def sent_table(sent: Iterable[SocketCount]) -> Table:
    """Bytes on the wire, all ranks together: data by formula, gloo's headers, and what the sockets say."""
    made = table("Bytes sent by all ranks' sockets", "", ">data, by formula", ">headers", ">sent", ">diff.")
    for one in sent:
        difference = one.sent_bytes - one.predicted_bytes - one.header_bytes
        numbers = (one.predicted_bytes, one.header_bytes, one.sent_bytes, difference)
        made.add_row(one.name, *map(_whole, numbers), style=_style(one.exact))
    return made


def compared_line(one: TimedPair) -> str:
    """A sentence on one comparison."""
    ms = f"{one.first} {milliseconds(one.first_seconds)} ms, {one.second} {milliseconds(one.second_seconds)} ms"
    if not one.over.is_real:
        return f"{ms}; no difference that stands out of the noise (±{100 * one.over.within:.0f}%)."
    hidden = "" if one.hidden is None else f"; overlap hides {100 * one.hidden:.0f}% of the exchanges' own time"
    return f"{ms} ({overhead_text(one.over)}){hidden}."


def speed_table(lines: Iterable[SpeedLine], title: str) -> Table:
    """Table 4.  Three lines a variant: medians; quartiles, bytes held and FLOPs; peak bytes and the paper's overhead."""
    made = table(title, "one layer, milliseconds", ">forward", ">backward", ">both", ">overhead")
    for line in lines:
        label = Text(line.name, style=_style(line.exact))
        held = f"\n  holds {size_text(line.held_bytes)}\n  peak {size_text(line.peak_bytes)}"
        label.append(held, style="dim not bold")
        times = []
        for part in ("forward", "backward", "combined"):
            quartiles = "–".join(map(milliseconds, getattr(line, f"{part}_quartiles")))
            times.append(_dim(milliseconds(getattr(line, f"{part}_seconds")), quartiles))
        flops = f"FLOPs +{100 * line.flops_overhead:.1f}%" if line.flops_overhead else ""
        paper = f"\npaper {line.paper_overhead_percent:+}%" if line.paper_overhead_percent is not None else ""
        made.add_row(label, *times, _dim(overhead_text(line.over), flops + paper))
    return made


def noise_line(noise: float, rounds: int, clock: str) -> str:
    """How noisy the runs were, in one sentence."""
    return (
        f"Noise: the baseline against itself, in the same {rounds} rounds, came out up to {100 * noise:.1f}% apart "
        f"({clock}). Smaller overheads are not shown."
    )


def peers_table(lines: Sequence[PeerLine], mode: str) -> Table:
    """The lines of one mode: medians, our time over each, bytes held (and over ours) and at the peak.  Ours is the first line.

    What is over ours is per sequence.  masks: what a CPU's wide dropout masks take of the bytes held.
    """
    columns = ("layer", ">forward", ">backward", ">both, ms", ">ours ÷ it", ">holds", ">peak")
    made = table(f"recompute: {mode}", *columns)
    ours = None
    for line in (line for line in lines if line.mode == mode):
        if line.unavailable or line.held_bytes is None or line.peak_bytes is None:
            continue
        each = line.held_bytes / line.sequences
        ours = ours or each
        times = (milliseconds(getattr(line, f"{part}_seconds")) for part in ("forward", "backward", "combined"))
        holds = _dim(size_text(line.held_bytes), f"× {each / ours:.2f}")
        if line.wide_mask_bytes:
            holds.append(f"\nmasks:\n{size_text(line.wide_mask_bytes)}", style="dim")
        made.add_row(line.name.replace(", ", "\n  "), *times, _ratio(line.ours), holds, size_text(line.peak_bytes))
    return made


def _ratio(ours: Overhead | None) -> Text:
    if ours is None:
        return Text("–")
    return _dim(f"{ours.ratio:.2f}", ours.interval) if ours.is_real else _dim("same", f"within {ours.within:.2f}")


def overheads_table(lines: Sequence[PeerLine]) -> Table | None:
    """What each way to recompute costs each layer, over the same layer without; None if nothing of that ran."""
    over = {(line.name, line.mode): line.over for line in lines if line.over}
    if not over:
        return None
    modes = list(dict.fromkeys(mode for _, mode in over))
    made = table("overhead of recomputation", "layer", *(f">{mode}" for mode in modes))
    for name in dict.fromkeys(name for name, _ in over):
        made.add_row(name, *(overhead_text(over[name, mode]) if (name, mode) in over else "" for mode in modes))
    return made


def elementwise_line(lines: Sequence[PeerLine], name: str, selective_units: float, elementwise_units: float) -> str:
    """One sentence on ``elementwise`` beside ``selective``: time in this run, and bytes in 16 bits; "" if either did not run.

    units: bytes in 16 bits, in sbh/t.
    """
    over = next((line.over_selective for line in lines if line.name == name and line.over_selective), None)
    if over is None:
        return ""
    interval = f"{1 + over.low:.3f}–{1 + over.high:.3f}"
    return (
        f"{name}, elementwise beside selective: {1 + over.value:.3f} of its time ({interval}), "
        f"{elementwise_units:g}/{selective_units:g} of its bytes in 16 bits (sbh/t)."
    )


def missing_lines(lines: Sequence[PeerLine]) -> list[str]:
    """One sentence for each peer that did not run, and in which modes."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if line.unavailable:
            reasons.setdefault((line.name, line.unavailable), []).append(line.mode)
    return [f"{name} did not run ({', '.join(modes)}): {reason}" for (name, reason), modes in reasons.items()]


@dataclass(frozen=True)
class _Line:
    """Cells of one of the paper's tables, from left to right.  below: a second, dim line under the first cells."""

    entry: PaperEntry
    cells: tuple[str, ...]
    below: tuple[str, ...] = ()


def exact_table(title: str, entries: Iterable[PaperEntry], headings: Mapping[str, str]) -> Group:
    """Whole numbers: what is predicted, what the paper leaves out, what was measured, the difference.

    Below each name, dim: the paper's own formula or claim, with its number.  headings: what is printed above the
    lines of each model.
    """
    lines = [_Line(e, _counted(e), (f"  {e.note}", _whole(e.printed)) if e.note else ()) for e in entries]
    return _paper_table(title, ("", "predicted", "extra", "measured", "diff."), lines, headings)


def _counted(e: PaperEntry) -> tuple[str, ...]:
    extra = None if e.measured is None else e.extra
    return e.quantity, *map(_whole, (e.ours_formula, extra, e.measured, e.difference))


def percent_table(title: str, entries: Iterable[PaperEntry], headings: Mapping[str, str] = {}) -> Group:
    """Percentages: as printed, by formula, measured, and how far ours is from the printed one, in points."""
    lines = []
    for e in entries:
        ours = ("" if x is None else f"{float(x):.2f}" for x in (e.ours_formula, e.measured))
        off = "" if e.difference_from_paper is None else f"{float(e.difference_from_paper):+.2f}"
        lines.append(_Line(e, (e.quantity, "" if e.paper is None else str(e.paper), *ours, off)))
    return _paper_table(title, ("percent", "paper", "ours", "measured", "ours − paper"), lines, headings)


def flops_table(title: str, entries: Iterable[PaperEntry], headings: Mapping[str, str]) -> Group:
    """FLOPs in units of 10¹⁵; the difference is in single FLOPs."""
    lines = []
    for e in entries:
        numbers = ("" if x is None else f"{x / _PETA:,.4f}" for x in (e.printed, e.ours_formula, e.measured))
        lines.append(_Line(e, (e.quantity, *numbers, _whole(e.difference))))
    return _paper_table(title, ("10¹⁵ FLOPs", "paper", "ours", "counted", "diff."), lines, headings)


def ranks_table(
    title: str, entries: Iterable[PaperEntry], outputs: Mapping[int, int], headings: Mapping[str, str]
) -> Group:
    """Figure 9: bytes of pipeline ranks, and how much outputs would add; outputs: bytes by rank."""
    lines = [_Line(e, (*_counted(e), _whole(outputs[e.pipeline_rank or 0]))) for e in entries]
    return _paper_table(title, ("", "predicted", "extra", "measured", "diff.", "outputs"), lines, headings)


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


def _paper_table(title: str, header: Sequence[str], lines: Sequence[_Line], headings: Mapping[str, str]) -> Group:
    """A table for each model, below its heading; a column that is empty throughout is left out."""
    used = [i for i in range(1, len(header)) if any(line.cells[i] for line in lines)]
    parts: list = [Text(title, style="bold")]
    for model in dict.fromkeys(line.entry.model for line in lines):
        made = table(headings.get(model, ""), header[0], *(f">{header[i]}" for i in used), tight=False)
        for line in (line for line in lines if line.entry.model == model):
            made.add_row(line.cells[0], *(line.cells[i] for i in used), style=_style(line.entry.exact))
            if line.below:
                made.add_row(*line.below, style="dim")
        parts.append(made)
    return Group(*parts)
