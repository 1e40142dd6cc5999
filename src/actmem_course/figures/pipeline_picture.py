"""The course's one picture for a pipeline: the layers of each microbatch in flight, on each rank, at one moment."""

from collections.abc import Sequence
from functools import lru_cache

from actmem.config import ConfigError, ModelShape, Parallel, check_size
from actmem.formulas.activations import layer_rows
from actmem.formulas.schedule import Action, peak_in_flight
from actmem.formulas.stages import layers_per_chunk
from actmem.rows import total
from actmem_course.figures.ch06_pipeline import schedule_of
from actmem_course.figures.diagrams import Box, boxes, diagram, labels
from actmem_course.figures.marks import Drawing, legend
from actmem_course.figures.sketch import MOST_RANKS, Stroke, arrows
from actmem_course.figures.style import FILLS
from actmem_course.figures.terms import KINDS, term_of
from actmem_course.figures.units import size_text
from actmem_course.others.timeline import Span, timeline
from actmem_course.predicted.pipeline_sends import pipeline_sends

#: Heights in pixels: of what each rank does, the arrows between ranks, a microbatch, its box, the words at the foot.
_HEAD, _SENDS, _ROW, _BOX, _FOOT = 46, 34, 24, 18, 48
#: Room before a box for its number, and after it, as shares of a stage's bytes.
_NUMBER, _AFTER = 0.3, 0.1


def pipeline_moments(parallel: Parallel, num_microbatches: int) -> range:
    """Return the times from 0 to the end of a training step, which ``pipeline_picture`` takes as ``moment``.

    They are whole numbers; their unit is the duration of one chunk's forward pass.

    Args:
        parallel: p pipeline ranks with m chunks each.
        num_microbatches: How many microbatches the step has.
    """
    return range(max(span.end for span in _spans(parallel, num_microbatches)) + 1)


def pipeline_picture(shape: ModelShape, parallel: Parallel, num_microbatches: int, moment: int) -> Drawing:
    """Draw what each pipeline rank holds at one moment: a row for each microbatch in flight.

    The width of a row is the bytes that the microbatch's layers save on this rank, in the colours of the tensors.
    Arrows are outputs and gradients that have just been sent to the next or the previous rank.

    Args:
        shape: The model's sizes, with all its layers.
        parallel: p pipeline ranks with m chunks each, and how ranks share a layer. The schedule is 1F1B, or
            interleaved if m > 1.
        num_microbatches: How many microbatches the step has.
        moment: The time, from ``pipeline_moments``; a backward pass takes twice as long as a forward pass.

    Raises:
        ConfigError: p·m does not divide the layers, p is more than MOST_RANKS, or there is no such moment.
    """
    p, m = parallel.pipeline_parallel_size, parallel.num_model_chunks
    if p > MOST_RANKS:
        raise ConfigError("pipeline_parallel_size", f"the picture has room for {MOST_RANKS} ranks, got {p}")
    spans = _spans(parallel, num_microbatches)
    check_size("moment", moment, max(span.end for span in spans), least=0)
    layers, rows = layers_per_chunk(shape, parallel), layer_rows(shape, parallel)
    parts = {kind: layers * total(row for row in rows if term_of(row).kind == kind) for kind in KINDS}
    each = sum(parts.values())
    column = (1 + _NUMBER + _AFTER) * each
    drawn: list[Box] = []
    words: list[tuple[float, float, str]] = []
    top, most = _HEAD + _SENDS, max(peak_in_flight(schedule_of(p, m, num_microbatches)))
    flying = [in_flight_at(spans, rank, moment) for rank in range(p)]
    foot = top + most * _ROW
    for rank, held in enumerate(flying):
        left, middle = rank * column, (rank + 0.5) * column
        now = [_name(span.action, m) for span in spans if span.rank == rank and span.start <= moment < span.end]
        words.append((middle, 10, f"rank {rank}" if p <= 4 else str(rank)))
        words.append((middle, 30, f"<b>{''.join(now) or 'idle'}</b>"))
        for place, action in enumerate(held):
            y = top + place * _ROW
            words.append((left + 0.6 * _NUMBER * each, y + _BOX / 2, _name(action, m)[1:]))
            drawn += _microbatch(action, left + _NUMBER * each, y, parts)
        count, size = f"{len(held)} in flight", size_text(len(held) * each)
        below = f"{count}<br><b>{size}</b>" if p <= 4 else f"{len(held)}<br>{size}".replace(" ", "<br>")
        words.append((middle, foot + 22, below))
    sends = pipeline_sends(shape, parallel, num_microbatches)
    longest = max(map(len, flying))
    used = {kind: FILLS[kind] for kind, size in parts.items() if size}
    fullest, size = [len(held) for held in flying].index(longest), size_text(longest * each)
    finding = f"rank {fullest} holds {longest} times {layers} layers, {size}" if longest else "nothing is in flight"
    told = [
        f"rank {rank} holds {len(held)} microbatches, {len(held) * each:,} bytes" for rank, held in enumerate(flying)
    ]
    sent = f"an arrow is {size_text(sends[0].payload_bytes)}" if sends else "nothing is sent"
    chunks = "; F3·1: forward pass of microbatch 3, chunk 1" if m > 1 else "; F3: forward pass of microbatch 3"
    return diagram(
        f"Moment {moment}: {finding};<br>{sent}{chunks}",
        [*legend(used), *boxes(drawn), *arrows(1.5, True, _just_sent(spans, moment, p, column)), labels(words, 13)],
        f"A pipeline of {p} ranks, {layers} layers each, at moment {moment}: {'; '.join(told)}.",
        p * column, foot + _FOOT, round(foot + _FOOT) + 88,
    )  # fmt: skip


def _name(action: Action, num_model_chunks: int) -> str:
    return f"{action.kind}{action.microbatch}" + (f"·{action.chunk}" if num_model_chunks > 1 else "")


def _just_sent(spans: Sequence[Span], moment: int, p: int, column: float) -> list[Stroke]:
    """Return arrows from ranks whose pass has just ended: outputs go to the next rank, gradients to the one before."""
    strokes: list[Stroke] = []
    for span in spans:
        to = span.rank + (1 if span.action.kind == "F" else -1)
        if span.end == moment and 0 <= to < p:
            y = _HEAD + (8 if to > span.rank else 22)
            strokes.append(([(span.rank + 0.5) * column, (to + 0.5) * column], [y, y]))
    return strokes


def in_flight_at(spans: Sequence[Span], rank: int, moment: int) -> list[Action]:
    """Return, in order, the forward passes that a rank has started and whose backward pass has not yet ended.

    Args:
        spans: When each action of the schedule runs, from ``timeline``.
        rank: The number of the pipeline rank, from 0.
        moment: The time, in the unit of ``spans``.
    """
    own = [span for span in spans if span.rank == rank]
    freed = {(s.action.chunk, s.action.microbatch) for s in own if s.action.kind == "B" and s.end <= moment}
    begun = [span.action for span in own if span.action.kind == "F" and span.start <= moment]
    return [action for action in begun if (action.chunk, action.microbatch) not in freed]


def _microbatch(action: Action, x: float, y: float, parts: dict[str, int]) -> list[Box]:
    """Return boxes for what its layers save, kind by kind."""
    about, drawn = f"microbatch {action.microbatch}: {sum(parts.values()):,} B saved", []
    for kind, size in parts.items():
        drawn.append(Box(x, y, size, _BOX, FILLS[kind], "", f"{about}<br>{kind}: {size:,} B"))
        x += size
    return [box for box in drawn if box.width]


@lru_cache(maxsize=32)
def _spans(parallel: Parallel, num_microbatches: int) -> tuple[Span, ...]:
    return tuple(timeline(schedule_of(parallel.pipeline_parallel_size, parallel.num_model_chunks, num_microbatches)))
