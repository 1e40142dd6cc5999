"""Where the attention core overtakes everything else: 34sbh and 5as²b over the sequence length."""

from __future__ import annotations

from actmem.config import ModelShape
from actmem.formulas.activations import CORE_ATTENTION_TERMS, crossover_seq_length, layer_rows
from actmem.rows import total
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import BLUE, GIB, INK, VERMILION, size_text, three_digits

#: Sequence lengths of the horizontal axis, in tokens.
LENGTHS = tuple(2**power for power in range(7, 16))


def crossover_lines(shape: ModelShape) -> Drawing:
    """Bytes of the attention core and of the rest of one layer for s from 128 to 32768, 16 bits.

    Both axes are logarithmic: the core rises twice as steeply.  The crossover is at
    s = 34h/(5a); the markers are at the shape's own s.
    """
    a, b, h, s = shape.letters()
    cross = crossover_seq_length(h, a)
    core, rest = _core_and_rest(shape)
    ahead, behind = ("the attention core", "all the rest") if core >= rest else ("all the rest", "the attention core")
    times = three_digits(max(core / rest, rest / core))
    lines = [_core_and_rest(shape.with_sizes(seq_length=length)) for length in LENGTHS]
    largest, smallest = max(max(line) for line in lines), min(min(line) for line in lines)
    traces = [
        _line("all the rest, 34sbh", [rest for _, rest in lines], BLUE, "solid"),
        _line("attention core, 5as²b", [core for core, _ in lines], VERMILION, "dash"),
        _marker("the rest at this s", s, rest, BLUE, "circle"),
        _marker("the core at this s", s, core, VERMILION, "diamond"),
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"crossover, s = 34h/(5a) = {cross:,.0f}",
            "x": [cross, cross],
            "y": [smallest / GIB, largest / GIB],
            "line": {"color": INK, "width": 1.5, "dash": "dot"},
            "hovertemplate": "s = 34h/(5a) = %{x:,.1f} tokens<extra></extra>",
        },
    ]
    return Drawing(
        traces,
        {
            "title": {
                "text": f"At s = {s:,} {ahead} holds {times} times {behind};<br>they are equal at s = {cross:,.0f}"
            },
            "xaxis": {
                "type": "log",
                "title": {"text": "sequence length s, tokens"},
                "tickvals": list(LENGTHS[::2]),
                "ticktext": [f"{length:,}" for length in LENGTHS[::2]],
                "range": [2.05, 4.6],
            },
            "yaxis": {"type": "log", "title": {"text": "one layer, GiB"}, "dtick": 1, "exponentformat": "none"},
        },
        f"Lines over s at b={b}, h={h}, a={a}: the core's 5as²b rises twice as steeply as the rest's 34sbh and crosses it "
        f"at s = 34h/(5a) = {cross:,.1f} tokens; at s = {s} the core holds {size_text(core)}, the rest {size_text(rest)}.",
    )


def _core_and_rest(shape: ModelShape) -> tuple[int, int]:
    rows = layer_rows(shape)
    core = sum(row.bytes for row in rows if row.term in CORE_ATTENTION_TERMS)
    return core, total(rows) - core


def _line(name: str, sizes: list[int], colour: str, dash: str) -> dict:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(LENGTHS),
        "y": [size / GIB for size in sizes],
        "customdata": [f"{size:,} B = {size_text(size)}" for size in sizes],
        "line": {"color": colour, "width": 3, "dash": dash},
        "hovertemplate": f"<b>{name}</b><br>s = %{{x:,}}: %{{customdata}}<extra></extra>",
    }


def _marker(name: str, s: int, size: int, colour: str, symbol: str) -> dict:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [s],
        "y": [size / GIB],
        "customdata": [f"{size:,} B = {size_text(size)}"],
        "marker": {"color": colour, "size": 13, "symbol": symbol, "line": {"color": INK, "width": 1.5}},
        "hovertemplate": f"<b>{name}</b><br>s = %{{x:,}}: %{{customdata}}<extra></extra>",
        "showlegend": False,
    }
