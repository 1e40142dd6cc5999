"""The bill of one pipeline rank under a plan, line by line or as a sum, at the moment when it holds most.

Weights in 16 bits, gradients added up in float32, an optimizer with float32 copies of the weights
(``formulas.states``), divided among data-parallel ranks as the ZeRO stage says.  Pipeline
outputs are freed once they are sent (2205.05198 appendix B).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from actmem.config import ConfigError, Parallel
from actmem.formulas.first_stage import embeddings_in_flight, in_flight
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


@lru_cache(maxsize=2**12)
def _refusal(model: PlannedModel, layer_axes: Layout, p: int, m: int) -> str:
    try:
        model.check(layer_axes)
        stage_layers(model.num_layers, p, m)
    except ConfigError as error:
        return str(error)
    return ""


def refusal(model: PlannedModel, layout: Layout) -> str:
    """Why ranks can't share the model as the layout says; empty if they can."""
    return _refusal(model, layout.layer_axes, layout.pipeline_parallel_size, layout.num_model_chunks)


# What layouts share is computed once for the axes that a layer sees, because a search asks for thousands of layouts.


@lru_cache(maxsize=2**12)
def _parameters(model: PlannedModel, layer_axes: Layout, first: bool, last: bool) -> tuple[int, int]:
    """Elements of one layer, and of the model's ends."""
    return model.layer_parameters(layer_axes), model.end_parameters(layer_axes, first, last)


@lru_cache(maxsize=2**12)
def kept_rows(
    model: PlannedModel, layer_axes: Layout, what: str, device_type: str = "cuda"
) -> tuple[Sequence[Row], int]:
    """Rows of what one microbatch keeps, and their bytes.  what: see ``PlannedModel.rows``."""
    rows = model.rows(layer_axes, what, device_type)
    return rows, total(rows)


def rank_parameters(model: PlannedModel, layout: Layout, pipeline_rank: int) -> tuple[int, int, int]:
    """Elements on one rank; of them, those of one layer and those of the model's ends."""
    p = layout.pipeline_parallel_size
    layer, ends = _parameters(model, layout.layer_axes, pipeline_rank == 0, pipeline_rank == p - 1)
    layers = stage_layers(model.num_layers, p, layout.num_model_chunks)[pipeline_rank]
    return layers * layer + ends, layer, ends


def share(elements: int, layout: Layout, divided: bool) -> int:
    """Elements of each rank if data-parallel ranks divide them (``divided``), rounded up."""
    return -(-elements // (layout.data_parallel_size * layout.context_parallel_size)) if divided else elements


def static_lines(model: PlannedModel, layout: Layout, pipeline_rank: int) -> list[tuple[str, str, int, str]]:
    """Weights, gradients, optimizer states and communication buffers: what doesn't depend on recomputation.

    Part, term, bytes and source of each line.
    """
    elements, of_layer, ends = rank_parameters(model, layout, pipeline_rank)
    lines = []
    for i, state in enumerate(model.states):
        # Optimizer states are divided from ZeRO's stage 1 on, weights only in stage 3.
        part, from_stage = (("weights", 3), ("gradients", 2), ("optimizer states", 1))[min(i, 2)]
        size = state.bytes_of(share(elements, layout, layout.zero_stage >= from_stage))
        lines.append((part, state.term, size, f"{state.bytes_per_parameter} B each: {state.reason}"))
    buffers = []
    if layout.pipeline_parallel_size > 1:
        buffers.append(("pipeline receive buffers", 2 * model.output_bytes(layout), "one output and one gradient"))
    if layout.data_parallel_size * layout.context_parallel_size > 1 and layout.zero_stage >= 2:
        if layout.zero_stage == 3:
            size = 2 * (_GATHERED_LAYERS * of_layer + ends)
            buffers.append(("gathered weights", size, "16-bit, two layers and the model's ends"))
        buffers.append(("gradients before they are divided", 2 * of_layer, "16-bit, one layer"))
    return lines + [("communication buffers", *buffer) for buffer in buffers]


@lru_cache(maxsize=2**16)
def flights(num_layers: int, p: int, m: int, num_microbatches: int, pipeline_rank: int) -> tuple[int, int, int]:
    """Chunk-microbatches in flight on a rank, layers of each, and microbatches in flight in the first chunk."""
    parallel = Parallel(pipeline_parallel_size=p, num_model_chunks=m)
    layers = stage_layers(num_layers, p, m)[pipeline_rank]
    flight = in_flight(parallel, pipeline_rank, num_microbatches)
    return flight, layers // m, embeddings_in_flight(parallel, num_microbatches)


#: What forward passes keep: part, how often, of what, and the rows of one with their bytes.
_KeptLine = tuple[str, int, str, tuple[Sequence[Row], int]]
#: The backward pass that follows, as ``transient_bytes`` and ``transient_rows`` take it.
_Backward = tuple[StagePart, StagePart | None, bool, bool, int]


def _fullest_moment(
    model: PlannedModel,
    layout: Layout,
    recompute: str,
    num_microbatches: int,
    pipeline_rank: int,
    whole_microbatches: int = 0,
    device_type: str = "cuda",
) -> tuple[list[_KeptLine], _Backward]:
    """What a rank keeps when it keeps most, and the backward pass that comes then."""
    p, m, axes = layout.pipeline_parallel_size, layout.num_model_chunks, layout.layer_axes
    flight, layers, embeddings = flights(model.num_layers, p, m, num_microbatches, pipeline_rank)
    first, last, again = pipeline_rank == 0, pipeline_rank == p - 1, flight - whole_microbatches
    what = f"{again} microbatches × {layers} layers"
    lines = [("activations", again * layers, what, kept_rows(model, axes, recompute, device_type))]
    if whole_microbatches:
        what = f"{whole_microbatches} microbatches × {layers} layers, all kept"
        lines.append(("activations", whole_microbatches * layers, what, kept_rows(model, axes, "none", device_type)))
    if first:
        lines.append(
            ("activations", embeddings, f"{embeddings} microbatches", kept_rows(model, axes, "first", device_type))
        )
    if last:
        lines.append(("logits and loss", 1, "", kept_rows(model, axes, "last", device_type)))
    # With several chunks the next backward is that of the last one, which has no embedding.
    first = first and m == 1
    return lines, (*model.parts(axes, recompute, first, last, device_type), first, last, layers)


@lru_cache(maxsize=2**10)
def held_bytes(
    model: PlannedModel, stage_axes: Layout, recompute: str, num_microbatches: int, pipeline_rank: int
) -> int:
    """The bytes of ``rank_bill`` without ``static_lines``."""
    lines, backward = _fullest_moment(model, stage_axes, recompute, num_microbatches, pipeline_rank)
    return sum(count * size for _, count, _, (_, size) in lines) + transient_bytes(*backward)


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
    p, sizes = layout.pipeline_parallel_size, (model, layout, recompute, num_microbatches, pipeline_rank)
    names = ("weights", "gradients", "optimizer states", "activations", "logits and loss", "communication buffers")
    parts: dict[str, list[Row]] = {name: [] for name in names}
    for part, term, size, source in static_lines(model, layout, pipeline_rank):
        parts[part].append(Row(term, size, source=source))
    lines, backward = _fullest_moment(*sizes, whole_microbatches, device_type)
    for part, count, what, (rows, _) in lines:
        for row in rows:
            source = f"{row.source}, {what}" if what else row.source
            parts[part].append(Row(row.term, count * row.bytes, row.split_by, source, row.extra))
    parts["transient"] = transient_rows(*backward)
    flight = flights(model.num_layers, p, layout.num_model_chunks, num_microbatches, pipeline_rank)[0]
    return Bill(f"pipeline rank {pipeline_rank} of {p}, {flight} microbatches in flight", parts)
