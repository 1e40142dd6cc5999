"""Tables for terminals, by rich.  Bytes in full, since they are exact; at most 80 columns.

Times are medians, Table 4's with their quartiles, and no overhead is printed that could be noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from actmem.rows import Row
from actmem_course.figures.text import overhead_text
from actmem_course.figures.units import milliseconds, size_text
from actmem_course.others import golden
from actmem_course.others.disagreements import Disagreement
from actmem_course.others.megatron_memory import SOURCES, MegatronRun
from actmem_course.results import (
    CalculatorResult,
    ExchangeCount,
    KernelSlope,
    Number,
    OtherLine,
    Overhead,
    PaperEntry,
    PeerLine,
    PipelineResult,
    PredictorLine,
    RunResult,
    SocketCount,
    SpeedLine,
    StepTimeResult,
    Table2Result,
    TimedPair,
)

if TYPE_CHECKING:  # the planner is not loaded to show a table
    from actmem_course.others.published import Choice

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


def runs_table(results: Sequence[RunResult]) -> Table:
    """A run a line: its setting, the printed peak, the predicted one, the difference in MiB and percent."""
    made = table("Peak of one GPU, MiB", "run", ">printed", ">predicted", ">diff.", ">%")
    for r in results:
        numbers = (f"{r.printed_mib:,.2f}", f"{r.predicted_mib:,.2f}", f"{r.predicted_mib - r.printed_mib:+,.2f}")
        made.add_row(r.setting, *numbers, f"{r.difference_percent:+.3f}", style=_style(r.within_limit))
    return made


def times_table(results: Sequence[StepTimeResult]) -> Table:
    """Published step times beside the planner's."""
    columns = ("~run", ">unit", ">printed", ">predicted", ">%")
    made = table("Step times: printed, and by the planner's time model", *columns)
    for r in results:
        cells = (r.unit, f"{r.printed:,.2f}", f"{r.predicted:,.2f}", f"{r.difference_percent:+.1f}")
        made.add_row(f"{r.source}: {r.setting}", *cells)
    return made


def choices_table(results: Sequence[Choice]) -> Table:
    """Published layouts beside the fastest of one search, by predicted time."""
    title = "Published layouts: place, and how much longer a step takes than by the fastest plan"
    made = table(title, "published", "~the fastest that its code could run", ">place", ">%", ">s hidden")
    for r in results:
        best = "the same" if r.best_plan == r.published_plan else r.best_plan
        made.add_row(r.setting, best, str(r.place), f"{r.behind_percent:.1f}", f"{r.hidden_seconds:.1f}")
    return made


def calculators_table(results: Sequence[CalculatorResult], title: str) -> Table:
    """What public calculators print beside counted bytes: a block of rows for each calculator."""
    made = table(title, "bytes of one rank", ">printed", ">counted", ">difference")
    last = ""
    for r in results:
        if r.calculator != last:
            made.add_row(r.calculator, style="bold")
        last = r.calculator
        made.add_row(f"  {r.row}", f"{r.printed_bytes:,}", f"{r.counted_bytes:,}", f"{r.difference_bytes:+,}")
    return made


def parts_table(results: Sequence[RunResult]) -> Table:
    """What the predicted peak of each run is made of, in MiB, and when it is reached."""
    made = table("What the predicted peak is made of, MiB", "part", ">least", ">most", ">share of the peak")
    shown = [(r.predicted_mib, r.parts_bytes or {}) for r in results]
    for part in dict.fromkeys(part for r in results for part in r.parts_bytes or {}):
        sizes = [of_run.get(part, 0) / 2**20 for _, of_run in shown]
        shares = [100 * size / peak for size, (peak, _) in zip(sizes, shown)]
        made.add_row(part, f"{min(sizes):,.1f}", f"{max(sizes):,.1f}", f"{min(shares):.1f} – {max(shares):.1f}%")
    return made


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


# NVIDIA's logged rows beside predicted ones, and the pairs that differ in one thing.


def golden_table(results: Sequence[golden.GoldenResult]) -> Table:
    """A row a line: predicted bytes at the peak and between iterations; below them, by how much more than logged."""
    title = "Megatron-LM's functional tests: predicted bytes of the last rank; below, minus logged"
    made = table(title, "~case", "GPU", ">at the peak", ">% off", ">at rest", ">% off")
    for r in results:
        name, cells = short(r.row.case) + (f": {r.why_not}" if r.why_not else ""), list[str]()
        for ours, logged, percent in (
            (r.predicted_peak_bytes, r.row.peak_bytes, r.peak_percent),
            (r.predicted_held_bytes, r.row.held_bytes, r.held_percent),
        ):
            if ours is not None:
                cells += [f"{ours:,}" + (f"\n{ours - logged:+,}" if logged else "")]
                cells += ["" if percent is None else f"{percent:+.3f}"]
        made.add_row(name, r.row.gpu, *cells, style="" if r.within_limit else "bold red")
    return made


def short(case: str) -> str:
    """A test's name without what nearly all of them share."""
    return case.removeprefix("gpt/").removeprefix("gpt3_").removeprefix("mcore_")


def megatron_bill_table(result: golden.GoldenResult) -> Table:
    """What one run holds at its peak, a line a kind of tensor, with the file that it was read from."""
    assert result.played
    made = table(f"At the peak of {short(result.row.case)}, {result.row.gpu}", "~what", ">bytes", "~read from")
    lines = result.played.memory.peak_lines
    for line in SOURCES:
        if lines.get(line):
            made.add_row(line, f"{lines[line]:,}", SOURCES[line])
    if result.row.peak_bytes:
        assert result.predicted_peak_bytes
        made.add_row("not explained", f"{result.row.peak_bytes - result.predicted_peak_bytes:,}", "")
    return made


def experiments_table(found: Sequence[golden.Experiment]) -> Table:
    """A pair a line: the bytes that both logged beyond what they hold, their difference by formula, how far apart."""
    title = "Pairs that differ in one thing: peak less held, first run less second"
    made = table(title, "~what differs, in which runs", ">logged", ">formula", ">apart")
    thing = ""
    for e in found:
        if e.thing != thing:
            made.add_row(f"[bold]{e.thing}[/]: {golden.THINGS[e.thing][1]}")
            thing = e.thing
        both = zip(*((short(one.row.case), one.row.gpu) for one in (e.more, e.less)))
        where = ", ".join(" − ".join(dict.fromkeys(names)) for names in both)
        apart = f"{e.apart_bytes:+,}" if e.apart_bytes else "0"
        style = "" if e.verdict == "open" else "green"
        made.add_row(f"  {where}: {e.verdict}", f"{e.logged_bytes:,}", f"{e.formula_bytes:,}", apart, style=style)
    return made


def reasons_table(results: Sequence[golden.GoldenResult]) -> Table:
    """Why rows are off, each row counted once; then why the others are not predicted."""
    made = table("Why a prediction is off, and why there is none", "~reason", ">rows", ">peak, worst", ">held, worst")
    for name, why in golden.REASONS.items():
        own = [r for r in results if r.played and r.row.peak_bytes and r.reason == name]
        if own:
            worst = (
                max(_sizes(off), default=0.0) for off in ([r.peak_percent for r in own], [r.held_percent for r in own])
            )
            made.add_row(why, f"{len(own)}", *(f"{percent:.3f}%" for percent in worst))
    without = Counter(r.why_not.partition(":")[0] for r in results if r.why_not).most_common()
    for name, number in without:
        made.add_row(f"none, {next(r.why_not for r in results if r.why_not.startswith(name + ':'))}", f"{number}")
    return made


def here_table(results: Sequence[golden.HereResult]) -> Table:
    """A row a line: peak less held as a GPU logged it, counted here, and what of the difference no line explains.

    Below ours, dim: the count with megatron-core's layers.
    """
    made = table("Peak less held: logged by a GPU, counted here", "~case", "GPU", ">logged", ">here", ">apart", ">open")
    for r in results:
        numbers = (r.logged_bytes, r.counted_bytes, r.logged_bytes - r.counted_bytes, r.open_bytes)
        style = "bold red" if abs(r.open_bytes) > r.logged_bytes / 100 else "green" if not r.open_bytes else ""
        made.add_row(short(r.golden.row.case), r.golden.row.gpu, *(f"{number:,}" for number in numbers), style=style)
        if r.megatron_core:
            theirs = (r.megatron_core, r.logged_bytes - r.megatron_core)
            made.add_row("  megatron-core", "", "", *(f"{number:,}" for number in theirs), style="dim")
    return made


def here_lines_table(result: golden.HereResult) -> Table:
    """One row's lines: played as on the GPU, counted here, and why the two differ."""
    title = f"{short(result.golden.row.case)}, {result.golden.row.gpu}, at its peak"
    made = table(title, "~what", ">there", ">here", "~why")
    for line, why in golden.WHY_APART.items():
        there, here = (lines.get(line, 0) for lines in (result.on_gpu, result.counted))
        if there or here:
            made.add_row(line, f"{there:,}", f"{here:,}", why if there != here else "equal")
    made.add_row("open", f"{result.open_bytes:,}", "", "")
    return made


def leaderboard_table(lines: Sequence[PredictorLine]) -> Table:
    """A predictor and what it predicted a line."""
    made = table("Predictors on what GPUs logged", "~predictor", "~rows of", ">rows", ">mean", ">worst", "~logged by")
    for one in lines:
        percents = (f"{one.mean_percent:.3f}%", f"{one.worst_percent:.3f}%")
        made.add_row(one.predictor, one.what, f"{one.rows}", *percents, one.by)
    return made


def slopes_table(slopes: Sequence[KernelSlope]) -> Table:
    """Bytes a token of each kernel: formula, counted here, logged on a GPU."""
    made = table("Peak bytes of one more token", "kernel", "formula", ">by formula", ">counted here", ">A100 (Liger)")
    for one in slopes:
        made.add_row(one.kernel, one.formula, f"{one.by_formula:,}", f"{one.counted:,.1f}", f"{one.logged:,.1f}")
    return made


def here_summary(results: Sequence[golden.HereResult]) -> list[str]:
    """How many rows are explained to the byte, and what megatron-core's layers keep here beyond ours."""
    worst = max(results, key=lambda r: abs(r.open_bytes) / r.logged_bytes)
    percent = 100 * abs(worst.open_bytes) / worst.logged_bytes
    explained = f"{len(results)} rows: {sum(not r.open_bytes for r in results)} explained to the byte; worst "
    explained += f"{worst.open_bytes:+,} B, {percent:.3f}% ({short(worst.golden.row.case)})"
    theirs = [(r.run, r.megatron_core - r.counted_bytes) for r in results if r.megatron_core]
    if not theirs:
        return [explained, "megatron-core's layers: not installed; pip install -e '.\\[peers]'"]
    wide = sum(more == run.chunks[0] * _wide_masks(run) for run, more in theirs)
    masks = "dropout's masks, of 2 bytes on a CPU for 1 on a GPU"
    return [
        explained,
        f"megatron-core's layers in place of ours: in {wide} of {len(theirs)} rows all they add is {masks}",
    ]


def _wide_masks(run: MegatronRun) -> int:
    """Bytes of a layer's masks in 16 bits beyond 1 byte an element: as²b of attention, 2sbh outside of it."""
    tokens = run.s * run.b
    return run.a * run.s * tokens // run.t + 2 * tokens * run.h // (run.t if run.sequence_parallel else 1)


def golden_summary(results: Sequence[golden.GoldenResult], found: Sequence[golden.Experiment]) -> list[str]:
    """Lines that say how far off the rows are: dense layers with unfused attention, then the others."""
    lines = []
    compared = [r for r in results if r.peak_percent is not None]
    groups = {kind: [r for r in compared if r.row.kind == kind] for kind in golden.LIMITS}
    dense = [r for own in list(groups.values())[:2] for r in own]
    for what, own in groups.items():
        both = ("peak", 0.02, [r.peak_percent for r in own]), ("held", golden.NEAR, [r.held_percent for r in own])
        said = [
            f"{name} worst {max(off):.3f}%, median {median(off):.4f}%, {sum(size <= near for size in off)} within {near}%"
            for name, near, percents in both
            if (off := _sizes(percents))
        ]
        lines += [f"{len(own)} rows, {what}: {'; '.join(said)}"] if own else []
    if far := [r for r in dense if abs(r.held_percent or 0) > golden.NEAR]:
        fit = sum(r.fits_if_late for r in far)
        lines.append(
            f"{fit} of the {len(far)} dense rows that hold more than {golden.NEAR}% else fit one of {golden.LATE_PLAYS} plays in which blocks "
            "that NCCL sent come back late"
        )
    if logged := [100 * apart / r.row.held_bytes for r in dense if r.row.held_bytes and (apart := r.row.logs_apart[0])]:
        lines.append(
            f"{len(logged)} dense rows have logs of other commits or containers, which hold up to {max(logged):.2f}% else at "
            f"rest, median {median(logged):.2f}%"
        )
    if same := golden.equal_by_code([r for r in compared if r.played]):
        rows, percents = zip(*same)
        lines.append(
            f"{sum(rows)} rows in {len(rows)} groups are equal by the code, and logged {min(percents):.2f} to {max(percents):.2f}% "
            "apart at rest on one kind of GPU"
        )
    surplus = [r.surplus_percent for r in results if r.reason == "num-experts" and r.surplus_percent is not None]
    if surplus:
        lines.append(
            f"{len(surplus)} rows with experts fit if the fullest rank's get {max(0.0, min(surplus)):.1f} to {max(surplus):.1f}% "
            f"more tokens than an even share, median {median(surplus):.1f}%"
        )
    if ignored := Counter(name for r in results for name in r.ignored):
        lines.append(
            "arguments taken as if they were off: " + ", ".join(f"{name} ({n})" for name, n in ignored.items())
        )
    if missing := sum(r.played is None for r in results):
        lines.append(f"{missing} rows not modelled")
    if found:
        zero, opened = sum(not e.apart_bytes for e in found), Counter(e.reason for e in found if e.verdict == "open")
        logs = sum(e.verdict == golden.AS_LOGS for e in found)
        explained = len(found) - zero - logs - opened.total()
        known = f"{zero} of 0 B, {explained} explained, {logs} {golden.AS_LOGS}"
        lines.append(f"{len(found)} pairs: {known}, {opened.total()} open, of these")
        lines += [f"  {number}: {golden.REASONS[name]}" for name, number in opened.most_common()]
    return lines


def _sizes(percents: Iterable[float | None]) -> list[float]:
    return [abs(percent) for percent in percents if percent is not None]
