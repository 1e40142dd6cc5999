"""Chapter 6: schedules as Gantt charts, and below them, on the same time axis, what each rank holds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import layer_bytes
from actmem.formulas.schedule import Action, Schedule, interleaved, one_forward_one_backward
from actmem.formulas.stages import eq5, layers_per_chunk
from actmem_course.figures.marks import Drawing, bars, chart, line, scale
from actmem_course.figures.style import CARD, FILLS, HELD, INK, Fill
from actmem_course.figures.units import axis_unit, exact_text, size_text, three_digits
from actmem_course.others.timeline import Span, bubble_of, memory_curve, timeline

#: Steps (time, bytes) of one rank, as ``timeline.memory_curve`` gives them.
Curve = Sequence[tuple[int, int]]

#: Fills of passes by kind, one for each of four chunks; a fifth chunk has the fill of the first.
_FILLS = {
    "F": (FILLS["forward"], Fill("#8C96DA", ""), Fill("#A9B2E8", ""), Fill("#CBD1F2", "")),
    "B": (FILLS["backward"], Fill("#CBA982", ""), Fill("#D6B78F", ""), Fill("#E5D0B4", "")),
}
_NAMES = {"F": "forward", "B": "backward"}
#: With more passes than this the microbatches' numbers don't fit into them; the hover text has the numbers.
_MOST_LABELS = 170
_ROW, _CURVE, _GAP, _FOOT, _HEAD = 30, 56, 34, 104, 70


def gantt(
    title: str,
    alt: str,
    spans: Sequence[Span],
    curves: Sequence[Curve],
    limit: tuple[str, int] | None = None,
    room: int = 0,
) -> Drawing:
    """Draw when each forward and backward pass runs, and below it each rank's bytes on the same time axis.

    Args:
        title: The finding.
        alt: The alt text: the finding with its numbers.
        spans: When each pass runs, from ``timeline``.
        curves: The bytes of each rank over time. If a pipeline stage has several tensor-parallel ranks, each has its
            curve, so there are more curves than rows of passes.
        limit: Name and bytes of a dashed line in each rank's curve; None for no line.
        room: The most bytes that a slider of the chapter can lead to: the axis reaches this value, so that it doesn't
            jump when the slider moves.
    """
    ranks, last = 1 + max(span.rank for span in spans), max(span.end for span in spans)
    peaks = [max(size for _, size in curve) for curve in curves]
    # All curves share one pair of axes, each with a baseline of its own: axes take most of the time to draw.
    step = 1.2 * max([*peaks, limit[1] if limit else 0, room])
    unit, unit_name = axis_unit(max(peaks))
    feet = [-curve * step for curve in range(len(curves))]
    inside = _ROW * ranks + _GAP + _CURVE * len(curves)
    traces = [*_passes(spans), _areas(curves, feet, last)]
    order = {"text": "numbers: microbatches" if len(spans) <= _MOST_LABELS else "", "xref": "paper", "x": 0, "y": -0.5}
    return chart(
        title,
        traces + ([_limits(*limit, feet, last)] if limit else []),
        alt,
        annotations=[{**order, "showarrow": False, "xanchor": "left", "yanchor": "bottom"}],
        barmode="overlay",
        bargap=0.12,
        height=_HEAD + inside + _FOOT,
        margin={"t": _HEAD, "b": _FOOT, "l": 84},
        uniformtext={"mode": "hide", "minsize": 9},
        xaxis={"range": [0, last], "anchor": "y", "showticklabels": False, "ticks": "", "showgrid": False},
        xaxis2=scale("time, in forward passes of one chunk", 0, last, anchor="y2"),
        yaxis={
            "domain": [1 - _ROW * ranks / inside, 1], "range": [ranks - 0.5, -0.5], "showgrid": False, "anchor": "x",
            "tickvals": list(range(ranks)), "ticktext": [f"rank {rank}" for rank in range(ranks)],
        },
        yaxis2={
            "domain": [0, _CURVE * len(curves) / inside], "range": [feet[-1], 0.98 * step],
            "showgrid": False, "anchor": "x2",
            "tickvals": [foot + 0.45 * step for foot in feet], "tickfont": {"size": 12},
            "ticktext": [f"rank {rank}<br>{three_digits(peak / unit)} {unit_name}" for rank, peak in enumerate(peaks)],
        },
    )  # fmt: skip


def _look(action: Action, has_chunks: bool) -> tuple[str, Fill]:
    """Return the name and the fill of a pass."""
    chunk = f", chunk {action.chunk}" if has_chunks else ""
    return _NAMES[action.kind] + chunk, _FILLS[action.kind][action.chunk % 4]


def _passes(spans: Sequence[Span]) -> list[dict]:
    """Return one trace for each kind and chunk of passes."""
    has_chunks = any(span.action.chunk for span in spans)
    looks = {span: _look(span.action, has_chunks) for span in spans}
    traces = []
    # Forward before backward, then by name.
    for name, fill in sorted(set(looks.values()), key=lambda one: (one[0].startswith("backward"), one[0])):
        group = [span for span in spans if looks[span][0] == name]
        trace = bars(
            name, [span.rank for span in group], [span.end - span.start for span in group], fill,
            f"<b>rank %{{y}}</b>: %{{customdata}}<br>{name}", base=[span.start for span in group],
            customdata=[f"{span.action}, from {span.start} to {span.end}" for span in group],
        )  # fmt: skip
        if len(spans) <= _MOST_LABELS:
            trace |= {"text": [str(span.action.microbatch) for span in group], "textposition": "inside"}
            trace |= {"insidetextanchor": "middle", "textangle": 0, "insidetextfont": {"color": fill.text, "size": 12}}
        else:  # dark edges would cover passes of a few pixels
            trace["marker"] = {**trace["marker"], "line": {"color": CARD, "width": 0.5}}
        traces.append(trace)
    return traces


def _areas(curves: Sequence[Curve], feet: Sequence[float], end: int) -> dict:
    """Return one trace of all curves: outlines that close along their feet, with gaps between them."""
    x: list[int | None] = []
    y: list[float | None] = []
    about: list[list] = []
    for rank, (curve, foot) in enumerate(zip(curves, feet)):
        steps = [*curve, (end, curve[-1][1])]
        x += [0, *(time for time, _ in steps), end, 0, None]
        y += [foot, *(foot + size for _, size in steps), foot, foot, None]
        about += [[rank, 0, ""], *([rank, size, size_text(size)] for _, size in steps), *[[rank, 0, ""]] * 3]
    hover = "<b>rank %{customdata[0]}</b> from time %{x}: %{customdata[1]:,} B, %{customdata[2]}"
    below: dict[str, Any] = {"hoveron": "points", "xaxis": "x2", "yaxis": "y2"}
    return line("saved for backward", x, y, HELD, hover, width=2, shape="hv", customdata=about, fill="toself", **below)


def _limits(name: str, size: int, feet: Sequence[float], end: int) -> dict:
    times, levels = [0, end, None] * len(feet), [level for foot in feet for level in (foot + size, foot + size, None)]
    hover = f"{name}: {exact_text(size)}"
    return line(f"{name}, {size_text(size)}", times, levels, INK, hover, "dash", 2, xaxis="x2", yaxis="y2")


def schedule_of(p: int, m: int, n: int) -> Schedule:
    """Return the interleaved schedule if m > 1, else 1F1B.

    Args:
        p: Pipeline ranks.
        m: Model chunks on each rank.
        n: Microbatches.

    Raises:
        ConfigError: m > 1, and p does not divide n.
    """
    return interleaved(p, m, n) if m > 1 else one_forward_one_backward(p, n)


def with_pipeline(parallel: Parallel, pipeline_parallel_size: int, num_model_chunks: int) -> Parallel:
    """Return a copy of ``parallel`` with another number of pipeline ranks, and of model chunks on each rank.

    Args:
        parallel: How ranks share the model; the other sizes are taken from it.
        pipeline_parallel_size: p.
        num_model_chunks: m.
    """
    return replace(parallel, pipeline_parallel_size=pipeline_parallel_size, num_model_chunks=num_model_chunks)


def chunks_that_fit(num_layers: int, p: int, largest: int) -> list[int]:
    """Return the numbers m of model chunks on each rank for which p·m divides the number of layers; [1] if p = 1.

    Args:
        num_layers: The model's layers.
        p: Pipeline ranks.
        largest: The largest m to return.
    """
    return [m for m in range(1, (largest if p > 1 else 1) + 1) if num_layers % (p * m) == 0]


def pipeline_schedule(shape: ModelShape, parallel: Parallel, num_microbatches: int) -> Drawing:
    """Draw the schedule, and the bytes that each rank's layers save over time, without recomputation.

    The dashed line is equation 5 of the paper: the bytes of all L layers for one microbatch.

    Args:
        shape: The model's sizes, with ``num_layers``.
        parallel: How ranks share the model: t, p and m.
        num_microbatches: n, the microbatches of a step.

    Raises:
        ConfigError: p·m does not divide L, or p the microbatches of an interleaved schedule.
    """
    p, m, n = parallel.pipeline_parallel_size, parallel.num_model_chunks, num_microbatches
    each = layers_per_chunk(shape, parallel) * layer_bytes(shape, parallel)
    spans = timeline(schedule_of(p, m, n))
    curves = [memory_curve(spans, rank, lambda action: each) for rank in range(p)]
    equation = eq5(shape, parallel.tensor_parallel_size)
    peaks = [max(size for _, size in curve) for curve in curves]
    times = f"{three_digits(peaks[0] / equation)} times " if peaks[0] != equation else ""
    times += f"what {shape.num_layers} layers save"
    idle = float(bubble_of(spans) / (1 + bubble_of(spans)))
    return gantt(
        f"p = {p}, m = {m}, n = {n}: rank 0 holds {size_text(peaks[0])},<br>"
        f"{times}; rank {p - 1} {size_text(peaks[-1])}; idle {idle:.0%}",
        f"Gantt chart of n = {n} microbatches on p = {p} pipeline ranks with m = {m}, and each rank's bytes over time: "
        f"at their peaks the ranks hold {', '.join(f'{peak // each}' for peak in peaks)} chunk-microbatches; rank 0 "
        f"holds {peaks[0]:,} bytes, {times}; idle {idle:.1%} of the step.",
        # Interleaving multiplies equation 5 by less than 1 + 1/m.
        spans, curves, limit=(f"{shape.num_layers} layers (equation 5)", equation), room=3 * equation // 2,
    )  # fmt: skip


def measured_schedule(ranks: Schedule, results: Sequence[Mapping[str, Any]]) -> Drawing:
    """Draw the schedule that a lab ran and the bytes measured on each rank; the title says if they are as predicted.

    The time axis is the schedule's, not the clock's: its unit is one forward pass. A forward pass adds its bytes when
    it starts; a backward pass frees them when it ends.

    Args:
        ranks: The schedule: for each pipeline rank the list of its actions, in order.
        results: The rows that labs/measure_pipeline.py writes to --json, one for each rank.
    """
    spans = timeline(ranks)
    curves = [_measured_curve(spans, result) for result in results]
    peaks = [max(sample["kept_bytes"] for sample in result["samples"]) for result in results]
    same = "as" if [result["predicted_bytes"] + result["extra_bytes"] for result in results] == peaks else "not as"
    held = f"rank 0 held {size_text(peaks[0])}, rank {len(peaks) - 1} {size_text(peaks[-1])}"
    return gantt(
        f"Measured: {held},<br>to the byte {same} predicted, counted for every microbatch in flight",
        f"Gantt chart of the schedule that ran, and measured bytes over time: at the peak {held}; {same} predicted.",
        spans,
        curves,
    )


def _measured_curve(spans: Sequence[Span], result: Mapping[str, Any]) -> Curve:
    """Return the measured bytes at the times at which ``memory_curve`` has its steps."""
    own = [span for span in spans if span.rank == result["pipeline_rank"]]
    steps = {0: 0}
    for span, sample in zip(own, result["samples"], strict=True):
        steps[span.start if span.action.kind == "F" else span.end] = sample["kept_bytes"]
    return sorted(steps.items())
