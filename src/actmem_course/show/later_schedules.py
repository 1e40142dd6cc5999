"""Pipelines after 2022 beside 1F1B: any of eight orders of actions, its time and every rank's memory."""

from __future__ import annotations

from actmem.config import ModelShape, Parallel, check_divides
from actmem.formulas.activations import weight_gradient_rows
from actmem.formulas.first_stage import layer_bytes
from actmem.formulas.timeline import bubble_of, memory_curve, timeline
from actmem.rows import total
from actmem_course.others.later_orders import ORDERS_BY_NAME, held_by_ranks
from actmem_course.show.drawing import Drawing
from actmem_course.show.gantt import gantt
from actmem_course.show.style import size_text

#: F, B and W of half a stage take one unit each, so all orders share a time axis.
_HALVES = 2


def later_schedule(shape: ModelShape, parallel: Parallel, name: str, p: int) -> Drawing:
    """One order of ``ORDERS_BY_NAME`` with n = 2p microbatches, and each rank's bytes: layers only, nothing recomputed.

    The dashed line is what 1F1B holds on rank 0.  Raises ConfigError unless 2p divides L.
    """
    order, n = ORDERS_BY_NAME[name], 2 * p
    per_half = check_divides("num_layers", shape.num_layers, "2p", 2 * p)
    layers = [per_half * _HALVES // order.num_model_chunks] * order.num_model_chunks
    each, waiting = layer_bytes(shape, parallel), total(weight_gradient_rows(shape, parallel))
    ranks, unit = order.make(p, n), _HALVES // order.num_model_chunks
    spans = timeline(ranks, unit, 2 * unit, weight_time=unit, v_shaped=order.v_shaped)
    curves = [
        memory_curve(
            spans, r, lambda action: layers[action.chunk] * each, lambda action: layers[action.chunk] * waiting
        )
        for r in range(p)
    ]
    most = held_by_ranks(ranks, layers, each, waiting)
    plain = shape.num_layers * each
    traces, layout = gantt(spans, curves, ("1F1B, rank 0", plain), top=3 * plain // 2)
    longest = 6 * n + 6 * (p - 1)  # 1F1B's step
    layout["xaxis"]["range"] = layout["xaxis2"]["range"] = [0, longest]
    layout["xaxis2"]["title"]["text"] = "time, in forward passes of half a stage"
    idle = float(bubble_of(spans))
    share = f"{max(most) / plain:.0%} of 1F1B's rank 0"
    layout["title"] = {
        "text": f"{name}, p = {p}, n = {n}: the fullest rank holds {size_text(max(most))},<br>{share}; idle {idle / (1 + idle):.0%} of the step"
    }
    return Drawing(
        traces,
        layout,
        f"Gantt chart of {name} with {n} microbatches on {p} pipeline ranks, and each rank's bytes over time: at their fullest the ranks "
        f"hold {', '.join(map(size_text, most))}; the fullest holds {share}; idle {idle / (1 + idle):.1%} of the step.",
    )
