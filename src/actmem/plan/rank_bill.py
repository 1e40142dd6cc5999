"""The bill of one pipeline rank under a plan, line by line or as a sum, at the moment when it holds most.

Weights in 16 bits, gradients added up in float32, an optimizer with float32 copies of the weights
(``formulas.states``), divided among data-parallel ranks as the ZeRO stage says.  Pipeline
outputs are freed once they are sent (2205.05198 appendix B).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from actmem.config import ConfigError
from actmem.formulas.first_stage import embeddings_in_flight, in_flight
from actmem.formulas.states import State
from actmem.plan.layout import Layout
from actmem.plan.planned_models import PlannedModel
from actmem.rows import Row, total
from actmem.tape.stage_tapes import StagePart, transient_bytes, transient_rows

#: ZeRO-3 holds two layers' gathered weights: the one at work, and the next one on its way.
_GATHERED_LAYERS = 2


@dataclass(frozen=True)
class Bill:
    """Rows by part ("weights", "activations", …) at one moment of the step, in bytes of one rank."""

    moment: str
    parts: Mapping[str, Sequence[Row]]

    @property
    def bytes(self) -> int:
        """All rows together."""
        return sum(total(rows) for rows in self.parts.values())

    def by_part(self) -> dict[str, int]:
        """Bytes of each part, without the empty ones."""
        sums = {part: total(rows) for part, rows in self.parts.items()}
        return {part: size for part, size in sums.items() if size}


@lru_cache(maxsize=2**12)
def stage_layers(num_layers: int, pipeline_parallel_size: int, num_model_chunks: int = 1) -> tuple[int, ...]:
    """Layers on each pipeline rank, all chunks together.

    Where p·m does not divide L, the last rank and then the first hold fewer: they have the model's ends.
    Raises ConfigError if chunks would differ, or if an end would have no layer.
    """
    p, m = pipeline_parallel_size, num_model_chunks
    each = -(-num_layers // (p * m))
    short = each * p * m - num_layers
    layers = [each * m] * p
    if short:
        at_first = short // 2
        if m > 1 or p == 1 or each <= short - at_first:
            name = "pipeline_parallel_size" if m == 1 else "pipeline_parallel_size · num_model_chunks"
            raise ConfigError("num_layers", f"{num_layers} can't be spread over {name} = {p * m}")
        layers[0], layers[-1] = each - at_first, each - (short - at_first)
    return tuple(layers)


# A search asks for thousands of layouts: what some of them share is computed once for the axes that it depends on.


@lru_cache(maxsize=2**12)
def refusal(model: PlannedModel, stage_axes: Layout) -> str:
    """Why ranks can't share the model as the layout says; empty if they can."""
    try:
        model.check(stage_axes.layer_axes)
        stage_layers(model.num_layers, stage_axes.pipeline_parallel_size, stage_axes.num_model_chunks)
    except ConfigError as error:
        return str(error)
    return ""


@lru_cache(maxsize=2**12)
def rank_parameters(model: PlannedModel, stage_axes: Layout, pipeline_rank: int) -> tuple[int, int, int]:
    """Elements on one rank; of them, those of one layer and those of the model's ends."""
    p = stage_axes.pipeline_parallel_size
    layer = model.layer_parameters(stage_axes.layer_axes)
    ends = model.end_parameters(stage_axes, pipeline_rank == 0, pipeline_rank == p - 1)
    layers = stage_layers(model.num_layers, p, stage_axes.num_model_chunks)[pipeline_rank]
    return layers * layer + ends, layer, ends


@lru_cache(maxsize=2**12)
def kept_rows(model: PlannedModel, layer_axes: Layout, what: str, device_type: str = "cuda") -> Sequence[Row]:
    """Rows of what one microbatch keeps.  what: see ``PlannedModel.rows``."""
    return model.rows(layer_axes, what, device_type)


def share(elements: int, layout: Layout, divided: bool) -> int:
    """Elements of each rank if data-parallel ranks divide them (``divided``), rounded up."""
    return -(-elements // layout.replicas) if divided else elements


def static_rows(model: PlannedModel, layout: Layout, pipeline_rank: int) -> dict[str, list[Row]]:
    """Weights, gradients, optimizer states and communication buffers, by part: what doesn't depend on recomputation."""
    elements, of_layer, ends = rank_parameters(model, layout.stage_axes, pipeline_rank)

    def rows(states: Sequence[State], from_stage: int) -> list[Row]:
        own = share(elements, layout, layout.zero_stage >= from_stage)
        return [
            Row(state.term, state.bytes_of(own), source=f"{state.bytes_per_parameter} B each: {state.reason}")
            for state in states
        ]

    buffers = []
    if layout.pipeline_parallel_size > 1:
        size = 2 * model.output_bytes(layout)
        buffers.append(Row("pipeline receive buffers", size, source="one output and one gradient"))
    if layout.replicas > 1 and layout.zero_stage >= 2:
        if layout.zero_stage == 3:
            size = 2 * (_GATHERED_LAYERS * of_layer + ends)
            buffers.append(Row("gathered weights", size, source="16-bit, two layers and the model's ends"))
        buffers.append(Row("gradients before they are divided", 2 * of_layer, source="16-bit, one layer"))
    return {
        "weights": rows(model.states[:1], 3),
        "gradients": rows(model.states[1:2], 2),
        "optimizer states": rows(model.states[2:], 1),
        "communication buffers": buffers,
    }


def flights(model: PlannedModel, layout: Layout, num_microbatches: int, pipeline_rank: int) -> tuple[int, int]:
    """Chunk-microbatches in flight on a rank, and layers of each."""
    m = layout.num_model_chunks
    layers = stage_layers(model.num_layers, layout.pipeline_parallel_size, m)[pipeline_rank]
    return in_flight(layout.parallel, pipeline_rank, num_microbatches), layers // m


def _kept(
    model: PlannedModel, layout: Layout, recompute: str, num_microbatches: int, pipeline_rank: int, whole: int = 0
) -> list[tuple[str, int]]:
    """What forward passes have left on a rank when it holds most, as ``PlannedModel.rows`` calls it, and how often."""
    flight, layers = flights(model, layout, num_microbatches, pipeline_rank)
    kept = [(recompute, (flight - whole) * layers), ("none", whole * layers)]
    if pipeline_rank == 0:
        kept.append(("first", embeddings_in_flight(layout.parallel, num_microbatches)))
    if pipeline_rank == layout.pipeline_parallel_size - 1:
        kept.append(("last", 1))
    return [(what, count) for what, count in kept if count]


def _next_backward(
    model: PlannedModel, layout: Layout, recompute: str, pipeline_rank: int, device_type: str = "cuda"
) -> tuple[StagePart, StagePart | None, bool, bool, int]:
    """The backward pass that comes then, as ``transient_bytes`` takes it."""
    p, m = layout.pipeline_parallel_size, layout.num_model_chunks
    layers = stage_layers(model.num_layers, p, m)[pipeline_rank] // m
    # With several chunks it is that of the last one, which has no embedding.
    first, last = pipeline_rank == 0 and m == 1, pipeline_rank == p - 1
    return *model.parts(layout.layer_axes, recompute, first, last, device_type), first, last, layers


@lru_cache(maxsize=2**10)
def held_bytes(
    model: PlannedModel, stage_axes: Layout, recompute: str, num_microbatches: int, pipeline_rank: int
) -> int:
    """The bytes of ``rank_bill`` without ``static_rows``."""
    kept = _kept(model, stage_axes, recompute, num_microbatches, pipeline_rank)
    held = sum(count * total(kept_rows(model, stage_axes.layer_axes, what)) for what, count in kept)
    return held + transient_bytes(*_next_backward(model, stage_axes, recompute, pipeline_rank))


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
    held: dict[str, list[Row]] = {"activations": [], "logits and loss": []}
    for what, count in _kept(model, layout, recompute, num_microbatches, pipeline_rank, whole_microbatches):
        part = held["logits and loss" if what == "last" else "activations"]
        for row in kept_rows(model, layout.layer_axes, what, device_type):
            part.append(replace(row, bytes=count * row.bytes, source=f"{row.source}, {count:,} of them"))
    *states, buffers = static_rows(model, layout, pipeline_rank).items()
    backward = transient_rows(*_next_backward(model, layout, recompute, pipeline_rank, device_type))
    flight, _ = flights(model, layout, num_microbatches, pipeline_rank)
    where = f"pipeline rank {pipeline_rank} of {layout.pipeline_parallel_size}"
    return Bill(
        f"{where}, {flight} microbatches in flight", dict([*states, *held.items(), buffers, ("transient", backward)])
    )
