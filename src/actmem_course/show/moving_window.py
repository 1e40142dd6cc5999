"""Appendix C: as many microbatches as fit keep everything, the others are recomputed: a moving window."""

from __future__ import annotations

from fractions import Fraction

from actmem.config import ModelShape, Parallel
from actmem.formulas.first_stage import layer_bytes, layers_per_chunk
from actmem.formulas.microbatches import capacity, moving_window
from actmem.formulas.schedule import Action, one_forward_one_backward
from actmem.formulas.stage_terms import stage_rows
from actmem.formulas.timeline import memory_curve, timeline
from actmem.rows import total
from actmem_course.show.drawing import Drawing
from actmem_course.show.gantt import gantt
from actmem_course.show.style import BLUE, CARD, ORANGE, YELLOW, Fill, size_text

_WHOLE = "forward, keeps everything", Fill(BLUE, "", CARD)
_LESS = "forward, core to be recomputed", Fill("#CFE8F7", "")
_BACK = "backward", Fill(ORANGE, "/")
_AGAIN = "backward with recomputation", Fill(YELLOW, "x")


def least_budget_bytes(shape: ModelShape, parallel: Parallel, num_microbatches: int) -> int:
    """What every rank needs if all its passes are recomputed selectively: less is refused."""
    ranks = range(parallel.pipeline_parallel_size)
    return max(total(stage_rows(shape, parallel, rank, "selective", num_microbatches)) for rank in ranks)


def moving_window_chart(shape: ModelShape, parallel: Parallel, num_microbatches: int, budget_bytes: int) -> Drawing:
    """1F1B with ``budget_bytes`` for activations on every rank, and each rank's layers over time.

    Raises ConfigError if not even selective recomputation of everything fits.
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
    traces, layout = gantt(spans, curves, ("memory", budget_bytes), fill_of, min(p, n) * size[True])
    again = Fraction(sum(n - len(kept) for kept in whole), p * n)
    counts = ", ".join(f"{count} of {min(p - rank, n)}" for rank, count in enumerate(places))
    layout["title"] = {
        "text": f"With {size_text(budget_bytes)} a rank, {float(1 - again):.0%} of all passes recompute nothing;<br>microbatches in flight that keep everything: {counts}"
    }
    return Drawing(
        traces,
        layout,
        f"Gantt chart of {n} microbatches on {p} ranks with {budget_bytes:,} bytes for activations: on ranks 0 to {p - 1}, {counts} in flight "
        f"keep everything; {float(again):.1%} of all passes recompute their attention core.",
    )
