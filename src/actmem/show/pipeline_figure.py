"""The schedule as a Gantt chart, and below it what each rank held, on the same time axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from actmem.schedule import Span

#: Forward and backward: two colours that colour-blind readers tell apart, and a pattern on one.
FORWARD, BACKWARD, MEMORY = "#0072B2", "#E69F00", "#009E73"


def pipeline_figure(spans: Sequence[Span], measured: Iterable[tuple[int, Sequence]]) -> go.Figure:
    """Draw a timeline and the memory of each rank over it.

    spans: from schedule.timeline.  measured: ``(rank, samples)``, the samples being what the rank
    held after each of its actions, in order, as measure.inflight took them; each is drawn at
    the end of its action.  The time axis is the schedule's, in forwards: the bytes are measured.
    """
    measured = sorted(measured, key=lambda pair: pair[0])
    stages = sorted({span.rank for span in spans})
    # Ranks of one stage and different tensor-parallel ranks ran the same actions.
    per_stage = len(measured) // len(stages)
    titles = ["Schedule: F forward, B backward, number of the microbatch, letter of the model chunk"]
    titles += [f"Kept for backward on rank {rank}, MiB" for rank, _ in measured]
    heights = [45 * len(stages)] + [70] * len(measured)
    figure = make_subplots(
        rows=1 + len(measured), shared_xaxes=True, vertical_spacing=0.35 / (1 + 2 * len(measured)),
        row_heights=heights, subplot_titles=titles,
    )
    for kind, name, colour, pattern in (("F", "forward", FORWARD, ""), ("B", "backward", BACKWARD, "/")):
        _add_spans(figure, [span for span in spans if span.action.kind == kind], name, colour, pattern)
    for row, (rank, samples) in enumerate(measured, start=2):
        own = [span for span in spans if span.rank == stages[rank // per_stage]]
        figure.add_scatter(
            x=[0] + [span.end for span in own],
            y=[0] + [sample.kept_bytes / 2**20 for sample in samples],
            line={"shape": "hv", "color": MEMORY},
            fill="tozeroy",
            name=f"rank {rank}",
            showlegend=False,
            customdata=[["", 0]] + [[f"{s.kind}{s.microbatch}", s.kept_bytes] for s in samples],
            hovertemplate="after %{customdata[0]}: %{customdata[1]:,} B<extra></extra>",
            row=row,
            col=1,
        )
    peaks = {rank: max(sample.kept_bytes for sample in samples) for rank, samples in measured}
    fullest = max(peaks, key=peaks.get)
    for row in range(2, 2 + len(measured)):  # one scale, so that the ranks can be compared
        figure.update_yaxes(range=[0, 1.1 * peaks[fullest] / 2**20], nticks=4, row=row, col=1)
    figure.update_yaxes(title_text="pipeline rank", autorange="reversed", dtick=1, row=1, col=1)
    figure.update_xaxes(title_text="time, in forward passes of one chunk", row=1 + len(measured), col=1)
    figure.update_layout(
        title=f"Rank {fullest} holds most: {peaks[fullest] / 2**20:,.1f} MiB at its fullest",
        template="plotly_white",
        barmode="overlay",
        height=160 + 45 * len(stages) + 105 * len(measured),
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 1, "xanchor": "right"},
        margin={"l": 70, "r": 20, "t": 100, "b": 60},
    )
    return figure


def _add_spans(figure: go.Figure, spans: Sequence[Span], name: str, colour: str, pattern: str) -> None:
    chunks = any(span.action.chunk for span in spans)
    labels = [f"{s.action.kind}{s.action.microbatch}" + ("abcdefgh"[s.action.chunk % 8] if chunks else "") for s in spans]
    figure.add_bar(
        orientation="h",
        y=[span.rank for span in spans],
        x=[span.end - span.start for span in spans],
        base=[span.start for span in spans],
        text=labels,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        name=name,
        marker={"color": colour, "line": {"color": "#333", "width": 1}, "pattern": {"shape": pattern, "fgcolor": "white", "size": 6}},
        hovertemplate="%{text}, time %{base} to %{x}<extra></extra>",
        row=1,
        col=1,
    )
