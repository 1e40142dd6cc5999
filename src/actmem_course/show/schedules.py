"""Chapter 6: schedules as Gantt charts, and below them, on the same time axis, what each rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from actmem.config import ConfigError, ModelShape, Parallel
from actmem.formulas.activations import layer_bytes
from actmem.formulas.first_stage import (
    bubble_fraction,
    bytes_by_rank,
    capacity,
    embeddings_in_flight,
    eq5,
    first_stage_bytes,
    layers_per_chunk,
    stage_rows,
)
from actmem.formulas.schedule import (
    Action,
    Schedule,
    interleaved,
    moving_window,
    one_forward_one_backward,
    peak_in_flight,
)
from actmem.rows import paper_rows, total
from actmem_course.others.timeline import Span, bubble_of, memory_curve, timeline
from actmem_course.show.bar_chart import bar_chart
from actmem_course.show.marks import Drawing, bars, chart, line, scale
from actmem_course.show.style import (
    BLUE,
    GIB,
    GREEN,
    INK,
    PAINT,
    SKY,
    VERMILION,
    YELLOW,
    Fill,
    axis_unit,
    exact_text,
    size_text,
    three_digits,
)

#: Steps (time, bytes) of one rank, as ``timeline.memory_curve`` gives them.
Curve = Sequence[tuple[int, int]]

#: Fills of passes by kind and chunk; further chunks start over.
_FILLS = {
    "F": (PAINT["blue"], Fill(SKY, ""), Fill("#CFE8F7", ""), Fill("#8AA4B8", "")),
    "B": (PAINT["orange"], Fill(YELLOW, "/"), Fill("#FFF6BF", "/"), Fill("#CDB987", "/")),
}
_NAMES = {"F": "forward", "B": "backward"}
#: Of the moving window.
_WHOLE = "forward, keeps everything", PAINT["blue"]
_LESS = "forward, core to be recomputed", Fill("#CFE8F7", "")
_BACK = "backward", PAINT["orange"]
_AGAIN = "backward with recomputation", PAINT["yellow"]
#: With more passes than this their numbers don't fit; the hover text has them.
_MOST_LABELS = 170
_ROW, _CURVE, _GAP, _FOOT, _HEAD = 30, 56, 34, 104, 70
#: With more passes than this, each is too small to see, and drawing is slow.
LARGEST_CHART = 1024


def gantt(
    title: str,
    alt: str,
    spans: Sequence[Span],
    curves: Sequence[Curve],
    limit: tuple[str, int] | None = None,
    fill_of: Callable[[Action], tuple[str, Fill]] | None = None,
    top: int = 0,
    now: int | None = None,
) -> Drawing:
    """The chart of ``spans`` and the curves of the ranks below it.

    curves: where several tensor-parallel ranks share the passes of a pipeline rank, there are more curves than ranks in
    the chart.  limit: a dashed line above each curve's foot, its name and bytes.  fill_of: name and fill of an action's
    bar, to show something other than kind and chunk.  top: bytes that fit into every curve's height, so that it
    stays the same while a slider moves.  now: passes and bytes up to this time only, on the axes of the whole step.
    """
    ranks, last = 1 + max(span.rank for span in spans), max(span.end for span in spans)
    peaks = [max(size for _, size in curve) for curve in curves]
    until = last if now is None else now
    so_far = [[(time, size) for time, size in curve if time <= until] for curve in curves]
    named = peaks if now is None else [curve[-1][1] for curve in so_far]
    # All curves share one pair of axes, each with a baseline of its own: axes take most of the time to draw.
    step = 1.2 * max([*peaks, limit[1] if limit else 0, top])
    unit, unit_name = axis_unit(max(peaks))
    feet = [-curve * step for curve in range(len(curves))]
    height = _HEAD + _ROW * ranks + _GAP + _CURVE * len(curves) + _FOOT
    inside = height - _HEAD - _FOOT
    times = [0, last]
    traces = _passes(spans, fill_of or _by_kind(spans), until) + [_areas(so_far, feet, until)]
    return chart(
        title,
        traces + ([_limits(*limit, feet, last)] if limit else []),
        alt,
        barmode="overlay",
        bargap=0.12,
        height=height,
        margin={"t": _HEAD, "b": _FOOT, "l": 84},
        uniformtext={"mode": "hide", "minsize": 9},
        xaxis={"range": times, "anchor": "y", "showticklabels": False, "ticks": "", "showgrid": False},
        xaxis2=scale("time, in forward passes of one chunk", *times, anchor="y2"),
        yaxis={
            "domain": [1 - _ROW * ranks / inside, 1], "range": [ranks - 0.5, -0.5], "showgrid": False, "anchor": "x",
            "tickvals": list(range(ranks)), "ticktext": [f"rank {rank}" for rank in range(ranks)],
        },
        yaxis2={
            "domain": [0, _CURVE * len(curves) / inside], "range": [feet[-1], 0.98 * step], "showgrid": False, "anchor": "x2",
            "tickvals": [foot + 0.45 * step for foot in feet], "tickfont": {"size": 12},
            "ticktext": [f"rank {rank}<br>{three_digits(peak / unit)} {unit_name}" for rank, peak in enumerate(named)],
        },
    )  # fmt: skip


def _by_kind(spans: Sequence[Span]) -> Callable[[Action], tuple[str, Fill]]:
    chunks = 1 + max(span.action.chunk for span in spans)

    def fill_of(action: Action) -> tuple[str, Fill]:
        name = _NAMES[action.kind] + (f", chunk {action.chunk}" if chunks > 1 else "")
        return name, _FILLS[action.kind][action.chunk % 4]

    return fill_of


def _passes(spans: Sequence[Span], fill_of: Callable[[Action], tuple[str, Fill]], until: int) -> list[dict]:
    """What has begun before ``until``, cut there.  Every kind of pass has its place in the legend from the start."""
    groups: dict[str, tuple[Fill, list[Span]]] = {}
    for span in spans:
        name, fill = fill_of(span.action)
        group = groups.setdefault(name, (fill, []))[1]
        if span.start < until:
            group.append(replace(span, end=min(span.end, until)))
    traces = []
    for name, (fill, group) in sorted(groups.items(), key=lambda item: _order(item[0])):
        trace = bars(
            name, [span.rank for span in group], [span.end - span.start for span in group], fill,
            f"<b>rank %{{y}}</b>: %{{customdata}}<br>{name}", base=[span.start for span in group],
            marker={**fill.marker(), "line": {"color": INK, "width": 0.7}},
            customdata=[f"{span.action}, from {span.start} to {span.end}" for span in group],
        )  # fmt: skip
        if len(spans) <= _MOST_LABELS:
            trace |= {"text": [str(span.action.microbatch) for span in group], "textposition": "inside"}
            trace |= {"insidetextanchor": "middle", "textangle": 0, "insidetextfont": {"color": fill.text, "size": 12}}
        traces.append(trace)
    return traces


def _order(name: str) -> tuple[bool, str]:
    return name.startswith(_NAMES["B"]), name


def _areas(curves: Sequence[Curve], feet: Sequence[float], end: int) -> dict:
    """One trace of all curves: outlines that close along their feet, with gaps between them."""
    x: list[int | None] = []
    y: list[float | None] = []
    about: list[list] = []
    for rank, (curve, foot) in enumerate(zip(curves, feet)):
        steps = [*curve, (end, curve[-1][1])]
        x += [0, *(time for time, _ in steps), end, 0, None]
        y += [foot, *(foot + size for _, size in steps), foot, foot, None]
        about += [[rank, 0, ""], *([rank, size, size_text(size)] for _, size in steps), *[[rank, 0, ""]] * 3]
    hover = "<b>rank %{customdata[0]}</b> from time %{x}: %{customdata[1]:,} B, %{customdata[2]}"
    below = {"hoveron": "points", "xaxis": "x2", "yaxis": "y2"}
    return line("kept for backward", x, y, GREEN, hover, width=2, shape="hv", customdata=about, fill="toself", **below)


def _limits(name: str, size: int, feet: Sequence[float], end: int) -> dict:
    times, levels = [0, end, None] * len(feet), [level for foot in feet for level in (foot + size, foot + size, None)]
    hover = f"{name}: {exact_text(size)}"
    return line(f"{name}, {size_text(size)}", times, levels, VERMILION, hover, "dash", 2, xaxis="x2", yaxis="y2")


def schedule_of(p: int, m: int, n: int) -> Schedule:
    """Interleaved with more than one chunk, else 1F1B.  Raises ConfigError on sizes that do not fit."""
    return interleaved(p, m, n) if m > 1 else one_forward_one_backward(p, n)


def with_pipeline(parallel: Parallel, pipeline_parallel_size: int, num_model_chunks: int) -> Parallel:
    """The same tensor parallelism with other p and m; one stage has one chunk."""
    return replace(parallel, pipeline_parallel_size=pipeline_parallel_size, num_model_chunks=num_model_chunks)


def ranks_that_fit(num_layers: int, largest: int) -> list[int]:
    """The p up to ``largest`` that divide the layers."""
    return [p for p in range(1, largest + 1) if num_layers % p == 0]


def chunks_that_fit(num_layers: int, p: int, largest: int) -> list[int]:
    """The m up to ``largest`` for which p·m divides the layers; one stage has one chunk."""
    return [m for m in range(1, (largest if p > 1 else 1) + 1) if num_layers % (p * m) == 0]


def microbatches_that_fit(p: int, largest: int) -> range:
    """The n up to ``largest`` that every number of chunks can be drawn with: multiples of p."""
    return range(p, largest + 1, p)


def moments_of(p: int, m: int, n: int) -> range:
    """Times at which a schedule can be looked at, in forward passes of one chunk; 0 is for the whole step."""
    return range(1 + max(span.end for span in _spans_of(p, m, n)))


@lru_cache(maxsize=64)
def _spans_of(p: int, m: int, n: int) -> tuple[Span, ...]:
    """The timeline of a schedule, which a figure asks for four times with every move."""
    return tuple(timeline(schedule_of(p, m, n)))


def pipeline_schedule(shape: ModelShape, parallel: Parallel, num_microbatches: int, moment: int = 0) -> Drawing:
    """The schedule, and each rank's bytes over time: its layers only, without recomputation.

    The dashed line of the whole step is equation 5: L layers of one microbatch.  moment: one of ``moments_of``; all that has happened by
    then, and what each rank holds at that time.  Raises ConfigError where p·m does
    not divide L, or p the microbatches of an interleaved schedule.
    """
    p, m, n = parallel.pipeline_parallel_size, parallel.num_model_chunks, num_microbatches
    passes = 2 * p * m * n
    if passes > LARGEST_CHART:
        raise ConfigError("num_microbatches", f"{passes:,} passes are too many to draw, at most {LARGEST_CHART:,}")
    each = layers_per_chunk(shape, parallel) * layer_bytes(shape, parallel)
    ranks = schedule_of(p, m, n)
    spans = list(_spans_of(p, m, n))
    curves = [memory_curve(spans, rank, lambda action: each) for rank in range(p)]
    equation = eq5(shape, parallel.tensor_parallel_size)
    if moment:
        title, alt = _moment(spans, curves, moment)
    else:
        held = peak_in_flight(ranks)
        most, least = held[0] * each, held[-1] * each
        times = f"{three_digits(most / equation)} times eq. 5" if most != equation else "eq. 5 exactly"
        idle = float(bubble_of(spans))
        title = (
            f"p = {p}, m = {m}, n = {n}: rank 0 holds {size_text(most)}, {times};<br>"
            f"rank {p - 1} holds {size_text(least)}; idle {idle / (1 + idle):.0%} of the step"
        )
        alt = (
            f"Gantt chart of {n} microbatches on {p} pipeline ranks with {m} model chunk{'s' * (m > 1)} each, and each rank's bytes over time: at "
            f"their fullest the ranks hold {', '.join(map(str, held))} chunk-microbatches; rank 0 holds {most:,} bytes, {times}; "
            f"idle {idle / (1 + idle):.1%} of the step, {idle:.1%} of the working time."
        )
    # Interleaving multiplies equation 5 by less than 1 + 1/m.
    limit = None if moment else ("eq. 5", equation)
    return gantt(title, alt, spans, curves, limit, top=3 * equation // 2, now=moment or None)


def _moment(spans: Sequence[Span], curves: Sequence[Curve], moment: int) -> tuple[str, str]:
    """Title and words of the schedule on its way.  A rank without a pass at this time is idle."""
    now = [[size for time, size in curve if time <= moment][-1] for curve in curves]
    busy = {span.rank: span.action for span in spans if span.start < moment <= span.end}
    says = f"Time {moment} of {max(span.end for span in spans)}: {len(busy)} of {len(curves)} ranks work"
    holds = f"rank 0 holds {size_text(now[0])}, rank {len(now) - 1} {size_text(now[-1])}"
    does = ", ".join(f"rank {rank} {busy.get(rank, 'idle')} {size:,} bytes" for rank, size in enumerate(now))
    return f"{says};<br>{holds}", f"Gantt chart on its way. {says}: {does}."


def measured_schedule(ranks: Schedule, results: Sequence[Mapping[str, Any]]) -> Drawing:
    """The schedule that ran, what each rank held, and what the formulas say it holds, as one curve each.

    Time is the schedule's, in units of a forward.  As in the predicted curve a forward's bytes are drawn from its
    start, a backward's are gone at its end.

    Args:
        ranks: the schedule.
        results: the rows of labs/measure_pipeline.py, one a rank.
    """
    spans = timeline(ranks)
    curves = [_measured_curve(spans, result) for result in results]
    peaks = [max(sample["kept_bytes"] for sample in result["samples"]) for result in results]
    same = "as" if [result["predicted_bytes"] + result["extra_bytes"] for result in results] == peaks else "not as"
    held = f"rank 0 held {size_text(peaks[0])}, rank {len(peaks) - 1} {size_text(peaks[-1])}"
    return gantt(
        f"Measured: {held},<br>to the byte {same} predicted, counted for every microbatch in flight",
        f"Gantt chart of the schedule that ran, and measured bytes over time: at the fullest {held}; {same} predicted.",
        spans,
        curves,
    )


def _measured_curve(spans: Sequence[Span], result: Mapping[str, Any]) -> Curve:
    """Steps at the times at which ``memory_curve`` has its own."""
    own = [span for span in spans if span.rank == result["pipeline_rank"]]
    steps = {0: 0}
    for span, sample in zip(own, result["samples"], strict=True):
        steps[span.start if span.action.kind == "F" else span.end] = sample["kept_bytes"]
    return sorted(steps.items())


def least_budget_bytes(shape: ModelShape, parallel: Parallel, num_microbatches: int) -> int:
    """What every rank needs if all its passes are recomputed selectively: less is refused."""
    ranks = range(parallel.pipeline_parallel_size)
    return max(total(paper_rows(stage_rows(shape, parallel, rank, "selective", num_microbatches))) for rank in ranks)


def moving_window_chart(shape: ModelShape, parallel: Parallel, num_microbatches: int, budget_bytes: int) -> Drawing:
    """Appendix C: 1F1B with ``budget_bytes`` for activations on every rank, and each rank's layers over time.

    As many microbatches as fit keep everything, the others are recomputed.  Raises ConfigError if not even selective
    recomputation of everything fits.
    """
    p, n = parallel.pipeline_parallel_size, num_microbatches
    ranks = one_forward_one_backward(p, n)
    places = [capacity(shape, parallel, budget_bytes, rank, n) for rank in range(p)]
    whole = [set(moving_window(actions, count)) for actions, count in zip(ranks, places)]

    def keeps(action: Action) -> bool:
        return (action.chunk, action.microbatch) in whole[action.rank]

    def fill_of(action: Action) -> tuple[str, Fill]:
        if action.kind == "F":
            return _WHOLE if keeps(action) else _LESS
        return _BACK if keeps(action) else _AGAIN

    layers = layers_per_chunk(shape, parallel)
    size = {True: layers * layer_bytes(shape, parallel), False: layers * layer_bytes(shape, parallel, "selective")}
    spans = timeline(ranks)
    curves = [memory_curve(spans, rank, lambda action: size[keeps(action)]) for rank in range(p)]
    again = Fraction(sum(n - len(kept) for kept in whole), p * n)
    counts = ", ".join(f"{count} of {min(p - rank, n)}" for rank, count in enumerate(places))
    return gantt(
        f"With {size_text(budget_bytes)} a rank, {float(1 - again):.0%} of all passes recompute nothing;<br>"
        f"microbatches in flight that keep everything: {counts}",
        f"Gantt chart of {n} microbatches on {p} ranks with {budget_bytes:,} bytes for activations: on ranks 0 to {p - 1}, {counts} in flight "
        f"keep everything; {float(again):.1%} of all passes recompute their attention core.",
        spans, curves, ("memory", budget_bytes), fill_of, min(p, n) * size[True],
    )  # fmt: skip


@lru_cache(maxsize=16)
def _selective_bytes(
    shape: ModelShape, parallel: Parallel, num_microbatches: int, free_outputs: bool
) -> tuple[int, ...]:
    return tuple(bytes_by_rank(shape, parallel, "selective", num_microbatches, free_outputs=free_outputs))


def rank_memory(shape: ModelShape, parallel: Parallel, num_microbatches: int) -> Drawing:
    """Figure 9, under selective recomputation: what every pipeline rank holds, with and without freeing the outputs it has sent.

    Raises ConfigError where the sizes do not fit.
    """
    freed, held = (_selective_bytes(shape, parallel, num_microbatches, free) for free in (True, False))
    p, m = parallel.pipeline_parallel_size, parallel.num_model_chunks
    masks = embeddings_in_flight(parallel, num_microbatches)
    saved = held[0] - freed[0]

    def over_ranks(name: str, sizes: Sequence[int], colour: str, dash: str, symbol: str) -> dict:
        return line(
            name, range(p), [size / GIB for size in sizes], colour, f"<b>rank %{{x}}</b>, {name}<br>%{{customdata}}", dash, 2.5,
            mode="lines+markers", marker={"color": colour, "size": 7, "symbol": symbol}, customdata=[exact_text(size) for size in sizes],
        )  # fmt: skip

    return chart(
        f"p = {p}, m = {m}: freeing outputs saves {size_text(saved)} on rank 0,<br>"
        f"which also holds {masks} dropout masks of the embedding",
        [
            over_ranks("outputs stay until backward", held, VERMILION, "dash", "diamond"),
            over_ranks("outputs freed once sent", freed, BLUE, "solid", "circle"),
        ],
        f"Lines over {p} pipeline ranks with {m} chunk{'s' * (m > 1)} each, selective recomputation: freed, rank 0 holds {freed[0]:,} bytes, rank 1 "
        f"{freed[1]:,}, rank {p - 1} {freed[-1]:,}; outputs that stay add {saved:,} bytes on rank 0.",
        xaxis=scale("pipeline rank", -0.03 * p - 0.2, p - 1 + 0.03 * p + 0.2),
        yaxis=scale("activations of one GPU, GiB", 0, 1.08 * max(held) / GIB),
        height=440,
    )


def interleaving(shape: ModelShape, parallel: Parallel, num_microbatches: int, chunks: Sequence[int]) -> list[Drawing]:
    """What chunks buy and cost, for each number of them: the step's idle share, and the bytes that rank 0 holds."""
    p, n = parallel.pipeline_parallel_size, num_microbatches
    cuts = {f"m = {m}": with_pipeline(parallel, p, m) for m in chunks}
    waits = {name: float(bubble_fraction(cut, n)) for name, cut in cuts.items()}
    idle = {name: 100 * share / (1 + share) for name, share in waits.items()}
    held = {name: first_stage_bytes(shape, cut, "none", n) for name, cut in cuts.items()}
    first, second, *_, last = cuts
    more = [f"{name} {float(held[name] / held[first] - 1):.0%}" for name in (second, last)]
    finding = f"and rank 0 holds more: with {' more, with '.join(more)}"
    if held[second] == held[first]:
        finding = f"and rank 0 holds the same, {size_text(held[first])}"
    return [
        bar_chart(
            f"p = {p}, n = {n}: {last} brings idle time from {idle[first]:.0f}% to {idle[last]:.0f}%",
            {"idle": idle},
            "idle share of a step",
            "%",
        ),
        bar_chart(finding, {"layers": held}, "its layers' activations"),
    ]
