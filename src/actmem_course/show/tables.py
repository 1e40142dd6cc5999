"""Tables for terminals, by rich.  Bytes in full, since they are exact; at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table
from rich.text import Text

from actmem.rows import Row
from actmem_course.results import OtherLine, PipelineResult, Table2Result


def table2_table(results: Iterable[Table2Result], title: str) -> Table:
    """Table 2, predicted and measured: a line for each configuration, its formula below the name."""
    table = _plain_table(title)
    table.add_column("bytes per layer and rank", no_wrap=True)
    for name in ("predicted", "extra", "measured", "diff."):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        name, plus, last = r.configuration.rpartition("+")
        label = Text(r.configuration if len(r.configuration) <= 25 else f"{name}\n  {plus}{last}")
        label.append(f"\n  sbh({r.formula})", style="dim")
        numbers = (r.predicted_bytes, r.extra_bytes, r.measured_bytes, r.difference_bytes)
        table.add_row(label, *(f"{number:,}" for number in numbers), style="" if r.exact else "bold red")
    return table


def others_table(lines: Iterable[OtherLine]) -> Table:
    """What others' layers keep: a formula, and below it the bytes at each shape, predicted and counted."""
    table = _plain_table("What everyone keeps: bytes of one layer, no parallelism")
    table.add_column("layer")
    for name in ("predicted", "measured", "diff."):
        table.add_column(name, justify="right", no_wrap=True)
    last: tuple[str, ...] = ()
    for line in lines:
        head = f"{line.name}, {line.dtype}", line.formula
        for text in head if head != last else ():
            table.add_row(text)
        last = head
        measured = "-" if line.measured_bytes is None else f"{line.measured_bytes:,}"
        apart = "-" if line.measured_bytes is None else f"{line.measured_bytes - line.predicted_bytes:,}"
        table.add_row(Text(f"  {line.sizes}", style="dim"), f"{line.predicted_bytes:,}", measured, apart)
    return table


def why_lines(lines: Iterable[OtherLine]) -> list[tuple[str, str]]:
    """Each reason once, with the layers that it is about."""
    about: dict[str, dict[str, None]] = {}
    for line in lines:
        about.setdefault(line.why, {})[f"{line.name} ({line.dtype})"] = None
    return [(why, ", ".join(names)) for why, names in about.items()]


def pipeline_table(results: Iterable[PipelineResult]) -> Table:
    """A rank a line: microbatches in flight and bytes, predicted and measured."""
    table = _plain_table("One step, when each rank holds most")
    for name in ("rank", "stage", "in flight", "predicted", "extra", "measured", "diff."):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        flight = f"{r.measured_in_flight}" + (
            "" if r.measured_in_flight == r.predicted_in_flight else f" ≠ {r.predicted_in_flight}"
        )
        numbers = (r.predicted_bytes, r.extra_bytes, r.measured_bytes, r.difference_bytes)
        style = "" if r.exact else "bold red"
        table.add_row(str(r.rank), str(r.pipeline_rank), flight, *(f"{number:,}" for number in numbers), style=style)
    return table


def memory_table(results: Iterable[PipelineResult]) -> Table:
    """What torch's runtime held besides the graphs, and the rank's memory after each action as a curve."""
    table = _plain_table("Beside the graphs, and the graphs' bytes after each action")
    table.add_column("rank", justify="right")
    table.add_column("outputs held", justify="right", no_wrap=True)
    table.add_column("idle receive buffers", justify="right", no_wrap=True)
    table.add_column("memory over the step", no_wrap=True, overflow="fold")
    for r in results:
        curve = sparkline([sample.kept_bytes for sample in r.samples])
        table.add_row(str(r.rank), f"{r.output_bytes:,}", f"{r.buffer_bytes:,}", curve)
    return table


def sparkline(values: list[int]) -> str:
    """A character for each value: its height is the value as a share of the largest."""
    levels = " ▁▂▃▄▅▆▇█"
    top = max(values, default=0) or 1
    return "".join(levels[-(-value * 8 // top)] for value in values)


def extras_table(rows: Iterable[Row]) -> Table:
    """What the paper leaves out, each with its reason, once a term."""
    table = _plain_table("")
    table.add_column("extra", no_wrap=True)
    table.add_column("why it is kept, and why the paper leaves it out")
    seen = set()
    for row in rows:
        if row.extra and row.term not in seen:
            seen.add(row.term)
            table.add_row(row.term, row.extra)
    return table


def _plain_table(title: str) -> Table:
    return Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )
