"""The bill of one pipeline rank under a plan, line by line, at the moment when it holds most.

Weights in 16 bits, gradients added up in float32, Adam with float32 copies of the weights
(``formulas.states.ADAM``), divided among data-parallel ranks as the ZeRO stage says.  Pipeline
outputs are freed once they are sent (2205.05198 appendix B).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from actmem.config import ConfigError
from actmem.formulas.first_stage import embeddings_in_flight, in_flight
from actmem.formulas.states import ADAM, State
from actmem.plan.bill import Bill
from actmem.plan.layout import Layout
from actmem.plan.planned_model import PlannedModel
from actmem.rows import Row

_STATES = ADAM["float32 gradients"]
_SOURCES = tuple(f"{state.bytes_per_parameter} B each: {state.reason}" for state in _STATES)
#: ZeRO-3 holds two layers' gathered weights: the one at work, and the next one on its way.
_GATHERED_LAYERS = 2


def stage_layers(num_layers: int, layout: Layout) -> list[int]:
    """Layers on each pipeline rank, all chunks together.

    Where p·m does not divide L, the last rank and then the first hold fewer: they have the model's ends.
    Raises ConfigError if chunks would differ, or if an end would have no layer.
    """
    p, m = layout.pipeline_parallel_size, layout.num_model_chunks
    each = -(-num_layers // (p * m))
    short = each * p * m - num_layers
    layers = [each * m] * p
    if short:
        at_first = short // 2
        if m > 1 or p == 1 or each <= short - at_first:
            name = "pipeline_parallel_size" if m == 1 else "pipeline_parallel_size · num_model_chunks"
            raise ConfigError("num_layers", f"{num_layers} can't be spread over {name} = {p * m}")
        layers[0], layers[-1] = each - at_first, each - (short - at_first)
    return layers


def parameters_on_rank(model: PlannedModel, layout: Layout, pipeline_rank: int) -> int:
    """Elements on one rank."""
    p = layout.pipeline_parallel_size
    layers = stage_layers(model.num_layers, layout)[pipeline_rank]
    ends = model.end_parameters(layout, pipeline_rank == 0, pipeline_rank == p - 1)
    return layers * model.layer_parameters(layout) + ends


def share(elements: int, layout: Layout, divided: bool) -> int:
    """Elements of each rank if data-parallel ranks divide them (``divided``), rounded up."""
    return -(-elements // (layout.data_parallel_size * layout.context_parallel_size)) if divided else elements


def state_bytes(elements: int, layout: Layout, state: State) -> int:
    """Bytes of weights, gradients or optimizer states on one rank: what ZeRO's stages 1, 2, 3 divide."""
    from_stage = 3 if state is _STATES[0] else 2 if state.is_gradient else 1
    return state.bytes_per_parameter * share(elements, layout, layout.zero_stage >= from_stage)


def static_lines(model: PlannedModel, layout: Layout, pipeline_rank: int) -> list[tuple[str, str, int, str]]:
    """Weights, gradients, optimizer states and communication buffers: what doesn't depend on recomputation.

    Part, term, bytes and source of each line.  Plain tuples, because a search adds up thousands of them.
    """
    p, ranks = layout.pipeline_parallel_size, layout.data_parallel_size * layout.context_parallel_size
    elements = parameters_on_rank(model, layout, pipeline_rank)
    parts = ("weights", "gradients", *("optimizer states",) * (len(_STATES) - 2))
    lines = [
        (part, state.term, state_bytes(elements, layout, state), source)
        for part, state, source in zip(parts, _STATES, _SOURCES)
    ]
    buffers = []
    if p > 1:
        buffers.append(("pipeline receive buffers", 2 * model.output_bytes(layout), "one output and one gradient"))
    if ranks > 1 and layout.zero_stage >= 2:
        of_layer = model.layer_parameters(layout)
        if layout.zero_stage == 3:
            ends = model.end_parameters(layout, pipeline_rank == 0, pipeline_rank == p - 1)
            size = 2 * (_GATHERED_LAYERS * of_layer + ends)
            buffers.append(("gathered weights", size, "16-bit, two layers and the model's ends"))
        buffers.append(("gradients before they are divided", 2 * of_layer, "16-bit, one layer"))
    return lines + [("communication buffers", *buffer) for buffer in buffers]


#: A search asks the same of thousands of layouts.
@lru_cache(maxsize=2**16)
def flights(num_layers: int, p: int, m: int, num_microbatches: int, pipeline_rank: int) -> tuple[int, int, int]:
    """Chunk-microbatches in flight on a rank, layers of each, and microbatches in flight in the first chunk."""
    layout = Layout(pipeline_parallel_size=p, num_model_chunks=m)
    layers = stage_layers(num_layers, layout)[pipeline_rank]
    flight = in_flight(layout.parallel, pipeline_rank, num_microbatches)
    return flight, layers // m, embeddings_in_flight(layout.parallel, num_microbatches)


def _times(rows: Iterable[Row], count: int, what: str) -> list[Row]:
    return [Row(row.term, count * row.bytes, row.split_by, f"{row.source}, {what}", row.extra) for row in rows]


def rank_bill(
    model: PlannedModel,
    layout: Layout,
    recompute: str,
    num_microbatches: int,
    pipeline_rank: int,
    whole_microbatches: int = 0,
    device_type: str = "cuda",
) -> Bill:
    """Everything on one pipeline rank at its peak.

    whole_microbatches: of the chunk-microbatches in flight, those that keep everything (appendix C).
    """
    p, m = layout.pipeline_parallel_size, layout.num_model_chunks
    flight, layers, first = flights(model.num_layers, p, m, num_microbatches, pipeline_rank)
    again = flight - whole_microbatches
    rows = _times(
        model.layer_rows(layout, recompute, device_type), again * layers, f"{again} microbatches × {layers} layers"
    )
    if whole_microbatches:
        what = f"{whole_microbatches} microbatches × {layers} layers, all kept"
        rows += _times(model.layer_rows(layout, "none", device_type), whole_microbatches * layers, what)
    if pipeline_rank == 0:
        rows += _times(model.first_rows(layout), first, f"{first} microbatches")
    last = pipeline_rank == p - 1
    names = ("weights", "gradients", "optimizer states", "activations", "logits and loss", "communication buffers")
    parts: dict[str, list[Row]] = {name: [] for name in names}
    for part, term, size, source in static_lines(model, layout, pipeline_rank):
        parts[part].append(Row(term, size, source=source))
    parts["activations"] = rows
    parts["logits and loss"] = model.last_rows(layout, device_type) if last else []
    # With several chunks the next backward is that of the last one, which has no embedding.
    parts["transient"] = model.transient_rows(
        layout, recompute, pipeline_rank == 0 and m == 1, last, layers, device_type
    )
    return Bill(f"pipeline rank {pipeline_rank} of {p}, {flight} microbatches in flight", parts)
