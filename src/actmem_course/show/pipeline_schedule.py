"""1F1B and interleaved 1F1B with what they hold: the schedules that sliders change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actmem.config import ConfigError, ModelShape, Parallel
from actmem.formulas.first_stage import eq5, layer_bytes, layers_per_chunk
from actmem.formulas.schedule import Schedule, interleaved, one_forward_one_backward, peak_in_flight
from actmem.formulas.timeline import Span, bubble_of, memory_curve, timeline
from actmem_course.show.drawing import Drawing
from actmem_course.show.gantt import gantt
from actmem_course.show.style import size_text, three_digits

#: With more passes than this, each is too small to see, and drawing is slow.
LARGEST_CHART = 600


def schedule_of(p: int, m: int, n: int) -> Schedule:
    """Interleaved with more than one chunk, else 1F1B.  Raises ConfigError on sizes that do not fit."""
    return interleaved(p, m, n) if m > 1 else one_forward_one_backward(p, n)


def ranks_that_fit(num_layers: int, largest: int) -> list[int]:
    """The p up to ``largest`` that divide the layers."""
    return [p for p in range(1, largest + 1) if num_layers % p == 0]


def chunks_that_fit(num_layers: int, p: int, largest: int) -> list[int]:
    """The m up to ``largest`` for which p·m divides the layers; one stage has one chunk."""
    return [m for m in range(1, (largest if p > 1 else 1) + 1) if num_layers % (p * m) == 0]


def microbatches_that_fit(p: int, m: int, largest: int) -> list[int]:
    """The n up to ``largest`` that can be drawn: multiples of p if stages are interleaved."""
    return [n for n in range(p if m > 1 else 1, min(largest, LARGEST_CHART // (2 * p * m)) + 1) if m == 1 or n % p == 0]


def moments_of(p: int, m: int, n: int) -> range:
    """Times at which a schedule can be looked at, in forward passes of one chunk; 0 is for the whole step."""
    return range(1 + max(span.end for span in timeline(schedule_of(p, m, n))))


def pipeline_schedule(shape: ModelShape, parallel: Parallel, num_microbatches: int, moment: int = 0) -> Drawing:
    """The schedule, and each rank's bytes over time: its layers only, without recomputation.

    The dashed line is equation 5: L layers of one microbatch.  moment: one of ``moments_of``; all that has happened by
    then, and what each rank holds at that time.  Raises ConfigError where p·m does
    not divide L, or p the microbatches of an interleaved schedule.
    """
    p, m, n = parallel.pipeline_parallel_size, parallel.num_model_chunks, num_microbatches
    if 2 * p * m * n > LARGEST_CHART:
        raise ConfigError(
            "num_microbatches", f"{2 * p * m * n:,} passes are too many to draw, at most {LARGEST_CHART:,}"
        )
    each = layers_per_chunk(shape, parallel) * layer_bytes(shape, parallel)
    ranks = schedule_of(p, m, n)
    spans = timeline(ranks)
    curves = [memory_curve(spans, rank, lambda action: each) for rank in range(p)]
    equation = eq5(shape, parallel.tensor_parallel_size)
    # Interleaving multiplies equation 5 by less than 1 + 1/m.
    traces, layout = gantt(spans, curves, ("eq. 5", equation), top=3 * equation // 2, now=moment or None)
    if moment:
        return _moment(traces, layout, spans, curves, moment)
    held = peak_in_flight(ranks)
    most, least = held[0] * each, held[-1] * each
    times = f"{three_digits(most / equation)} times eq. 5" if most != equation else "eq. 5 exactly"
    idle = float(bubble_of(spans))
    layout["title"] = {
        "text": f"p = {p}, m = {m}, n = {n}: rank 0 holds {size_text(most)}, {times};<br>rank {p - 1} holds {size_text(least)}; idle {idle / (1 + idle):.0%} of the step"
    }
    return Drawing(
        traces,
        layout,
        f"Gantt chart of {n} microbatches on {p} pipeline ranks with {m} model chunk{'s' * (m > 1)} each, and each rank's bytes over time: at "
        f"their fullest the ranks hold {', '.join(map(str, held))} chunk-microbatches; rank 0 holds {most:,} bytes, {times}; "
        f"idle {idle / (1 + idle):.1%} of the step, {idle:.1%} of the working time.",
    )


def _moment(
    traces: list[dict], layout: dict, spans: Sequence[Span], curves: Sequence[Sequence[tuple[int, int]]], moment: int
) -> Drawing:
    """The schedule on its way.  A rank without a pass at this time is idle."""
    now = [[size for time, size in curve if time <= moment][-1] for curve in curves]
    busy = {span.rank: span.action for span in spans if span.start < moment <= span.end}
    ranks = range(len(curves))
    says = f"Time {moment} of {max(span.end for span in spans)}: {len(busy)} of {len(curves)} ranks work"
    holds = f"rank 0 holds {size_text(now[0])}, rank {ranks[-1]} {size_text(now[-1])}"
    layout["title"] = {"text": f"{says};<br>{holds}"}
    does = ", ".join(f"rank {rank} {busy.get(rank, 'idle')} {now[rank]:,} bytes" for rank in ranks)
    return Drawing(traces, layout, f"Gantt chart on its way. {says}: {does}.")


def measured_schedule(ranks: Schedule, results: Sequence[dict]) -> Drawing:
    """The schedule that ran, what each rank held, and what the formulas say it holds, as one curve each.

    results: what labs/measure_pipeline.py writes, one of each process.  Time is the schedule's, in units of a
    forward.  As in the predicted curve a forward's bytes are drawn from its start, a backward's are gone at its end.
    """
    spans = timeline(ranks)
    curves = [_measured_curve(spans, result) for result in results]
    traces, layout = gantt(spans, curves)
    peaks = [max(sample["kept_bytes"] for sample in result["samples"]) for result in results]
    predicted = [result["predicted_bytes"] + result["extra_bytes"] for result in results]
    same = "as" if predicted == peaks else "not as"
    layout["title"] = {
        "text": f"Measured: rank 0 held {size_text(peaks[0])}, rank {len(peaks) - 1} {size_text(peaks[-1])},<br>to the byte {same} predicted, counted for every microbatch in flight"
    }
    return Drawing(
        traces,
        layout,
        "Gantt chart of the schedule that ran; measured bytes at the fullest moment of each rank: "
        + ", ".join(f"{peak:,}" for peak in peaks)
        + f"; {same} predicted.",
    )


def _measured_curve(spans: Sequence[Span], result: dict) -> list[tuple[int, int]]:
    """Steps (time, bytes), at the times at which ``memory_curve`` has its steps."""
    own = [span for span in spans if span.rank == result["pipeline_rank"]]
    steps = {0: 0}
    for span, sample in zip(own, result["samples"], strict=True):
        steps[span.start if span.action.kind == "F" else span.end] = sample["kept_bytes"]
    return sorted(steps.items())


def with_pipeline(parallel: Parallel, pipeline_parallel_size: int, num_model_chunks: int) -> Parallel:
    """The same tensor parallelism with other p and m; one stage has one chunk."""
    return replace(parallel, pipeline_parallel_size=pipeline_parallel_size, num_model_chunks=num_model_chunks)
