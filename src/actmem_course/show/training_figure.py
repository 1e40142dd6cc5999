"""Lab 6's training as one figure: what each mode keeps, how long a step takes, how the loss falls."""

from __future__ import annotations

from collections.abc import Sequence

from actmem_course.results import ModeCost
from actmem_course.show.drawing import Drawing
from actmem_course.show.speed_table import milliseconds
from actmem_course.show.style import BLACK, BLUE, GREEN, PURPLE, SKY, VERMILION, Fill, axis_unit, size_text

_KEPT, _TIME = Fill(BLUE, "", "#FFFFFF"), Fill(SKY, "-")
#: Curves cover each other: each is thinner than those below it, and dashed differently.
_CURVES = ((BLACK, "solid"), (SKY, "solid"), (VERMILION, "solid"), (GREEN, "dash"), (PURPLE, "dot"), (BLUE, "dashdot"))


def training_figure(modes: Sequence[ModeCost], setting: str, spread: float, note: str = "") -> Drawing:
    """Draw the modes of a training, the first on top.

    setting: what was trained where, in one line.
     spread: the largest difference between two modes' losses of one step.  note: how it was measured.
    """
    names = [mode.name for mode in modes]
    unit, unit_name = axis_unit(max(mode.kept_bytes for mode in modes))
    kept: list[dict[str, object]] = [
        {
            "type": "bar", "orientation": "h", "name": "kept", "y": names, "x": [mode.kept_bytes / unit for mode in modes],
            "marker": _KEPT.marker(), "text": [size_text(mode.kept_bytes) for mode in modes], "textposition": "auto", "showlegend": False,
            "hovertext": [f"{m.name}<br>kept {m.kept_bytes:,} B<br>formula {m.formula_bytes:,} B" for m in modes], "hoverinfo": "text",
        },
        {
            "type": "scatter", "mode": "markers", "name": "bytes by formula", "y": names, "x": [mode.formula_bytes / unit for mode in modes],
            "marker": {"symbol": "line-ns", "size": 22, "line": {"color": VERMILION, "width": 3}}, "hoverinfo": "skip",
        },
    ]  # fmt: skip
    times = {
        "type": "bar", "orientation": "h", "name": "a step", "y": names, "x": [1000 * mode.step_seconds for mode in modes],
        "marker": _TIME.marker(), "text": [f"{milliseconds(mode.step_seconds)} ms" for mode in modes], "textposition": "auto",
        "showlegend": False, "hovertemplate": "%{y}: %{x:.3~g} ms<extra></extra>", "xaxis": "x2", "yaxis": "y2",
    }  # fmt: skip
    curves = [
        {
            "type": "scatter", "mode": "lines", "name": mode.name, "x": list(range(1, len(mode.losses) + 1)), "y": list(mode.losses),
            "line": {"color": colour, "dash": dash, "width": 2 * (len(modes) - i)}, "xaxis": "x3", "yaxis": "y3",
            "hovertemplate": mode.name + ", step %{x}: %{y:.4f}<extra></extra>",
        }
        for i, (mode, (colour, dash)) in enumerate(zip(modes, _CURVES))
    ]  # fmt: skip
    under = [setting, f"Between the modes' losses of one step at most {spread:.1e}.", *note.splitlines()]
    rows = {"domain": [0.6, 1], "range": [len(modes) - 0.5, -0.5]}
    layout = {
        "title": {"text": training_finding(modes), "subtitle": {"text": "<br>".join(under)}},
        "height": 860,
        "margin": {"t": 140, "b": 150},
        "xaxis": {"domain": [0, 0.48], "title": {"text": f"{unit_name} kept of one microbatch"}},
        "yaxis": rows,
        "xaxis2": {"domain": [0.54, 1], "anchor": "y2", "title": {"text": "milliseconds of one step"}},
        "yaxis2": {**rows, "anchor": "x2", "showticklabels": False},
        "xaxis3": {"domain": [0, 1], "anchor": "y3", "title": {"text": "step"}},
        "yaxis3": {"domain": [0, 0.44], "anchor": "x3", "title": {"text": "loss, nats per token"}},
    }
    parts = (f"{m.name} keeps {m.kept_bytes:,} B and takes {milliseconds(m.step_seconds)} ms a step" for m in modes)
    return Drawing([*kept, times, *curves], layout, f"{training_finding(modes)}. {'; '.join(parts)}.")


def training_finding(modes: Sequence[ModeCost]) -> str:
    """The figure's title: how far apart the bytes are, although the curves are the same."""
    most, least = (choose(modes, key=lambda mode: mode.kept_bytes) for choose in (max, min))
    ratio = most.kept_bytes / least.kept_bytes
    return f"{len(modes)} modes, one loss curve; {most.name} keeps {ratio:.1f} times the bytes of {least.name}"
