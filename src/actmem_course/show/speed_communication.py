"""Communication for terminals: exchanges by formula and counted, and two ways to do the same, timed."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from actmem_course.results import ExchangeCount, SocketCount, TimedPair
from actmem_course.show.speed_table import milliseconds, overhead_text, plain_table

_KINDS = ("all-reduce", "all-gather", "reduce-scatter")


def exchanges_table(counted: Iterable[ExchangeCount], title: str) -> Table:
    """A form and mode a line: how many of each kind, and bytes that each rank sends around a ring."""
    table = plain_table(title)
    table.add_column("one layer, forward + backward", no_wrap=True)
    for name in ("all-red.", "gather", "scatter", "bytes sent", "diff."):
        table.add_column(name, justify="right", no_wrap=True)
    form = ""
    for one in counted:
        if one.name != form:
            form = one.name
            table.add_row(form, style="bold")
        numbers = (str(one.measured.get(kind, 0) or "–") for kind in _KINDS)
        difference = one.measured_wire_bytes - one.predicted_wire_bytes
        table.add_row(
            f"  {one.recompute}",
            *numbers,
            f"{one.measured_wire_bytes:,}",
            f"{difference:,}",
            style="" if one.exact else "bold red",
        )
    return table


def sent_table(sent: Iterable[SocketCount]) -> Table:
    """Bytes on the wire, all ranks together: data by formula, gloo's headers, and what the sockets say."""
    table = plain_table("Bytes sent by all ranks' sockets")
    table.add_column("", no_wrap=True)
    for name in ("data, by formula", "headers", "sent", "diff."):
        table.add_column(name, justify="right", no_wrap=True)
    for one in sent:
        difference = one.sent_bytes - one.predicted_bytes - one.header_bytes
        numbers = (one.predicted_bytes, one.header_bytes, one.sent_bytes, difference)
        table.add_row(one.name, *(f"{number:,}" for number in numbers), style="" if one.exact else "bold red")
    return table


def compared_lines(compared: Iterable[tuple[str, TimedPair]]) -> list[str]:
    """A sentence for each comparison, after its title."""
    return [f"{title}: {_words(one)}" for title, one in compared]


def _words(one: TimedPair) -> str:
    ms = f"{one.first} {milliseconds(one.first_seconds)} ms, {one.second} {milliseconds(one.second_seconds)} ms"
    if not one.is_real:
        return f"{ms}; no difference that stands out of the noise (±{100 * one.over.within:.0f}%)."
    change = overhead_text(one.over)
    hidden = "" if one.hidden is None else f"; overlap hides {100 * one.hidden:.0f}% of the exchanges' own time"
    return f"{ms} ({change}){hidden}."
