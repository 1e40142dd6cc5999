"""Tables for terminals, by rich.  Bytes in full, since they are exact; at most 80 columns.

Times are medians, Table 4's with their quartiles, and no overhead is printed that could be noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from actmem_course.others import golden
from actmem_course.others.megatron_memory import SOURCES, MegatronRun
from actmem_course.results import (
    CalculatorResult,
    KernelSlope,
    PredictorLine,
    RunResult,
    StepTimeResult,
)

if TYPE_CHECKING:  # the planner is not loaded to show a table
    from actmem_course.others.published import Choice

_WRONG = "bold red"


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
