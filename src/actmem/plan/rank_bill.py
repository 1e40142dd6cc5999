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
from actmem.formulas.states import ADAM, State
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

    @property
    def rows(self) -> list[Row]:
        """All rows, in order."""
        return [row for rows in self.parts.values() for row in rows]

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


# What layouts share is computed once for the axes that a layer sees, because a search asks for thousands of layouts.


@lru_cache(maxsize=2**12)
def _parameters(model: PlannedModel, layer_axes: Layout, first: bool, last: bool) -> tuple[int, int]:
    """Elements of one layer, and of the model's ends."""
    return model.layer_parameters(layer_axes), model.end_parameters(layer_axes, first, last)


@lru_cache(maxsize=2**12)
def _kept(model: PlannedModel, layer_axes: Layout, what: str, device_type: str) -> tuple[Sequence[Row], int]:
    """Rows of what one microbatch keeps, and their bytes.  what: "first", "last", or a layer's recomputation."""
    if what == "first":
        rows = model.first_rows(layer_axes)
    elif what == "last":
        rows = model.last_rows(layer_axes, device_type)
    else:
        rows = model.layer_rows(layer_axes, what, device_type)
    return rows, total(rows)


def kept_by_layer(model: PlannedModel, layout: Layout, recompute: str) -> int:
    """Bytes that one layer keeps of one microbatch."""
    return _kept(model, layout.layer_axes, recompute, "cuda")[1]


def rank_parameters(model: PlannedModel, layout: Layout, pipeline_rank: int) -> tuple[int, int, int]:
    """Elements on one rank; of them, those of one layer and those of the model's ends."""
    p = layout.pipeline_parallel_size
    layer, ends = _parameters(model, layout.layer_axes, pipeline_rank == 0, pipeline_rank == p - 1)
    layers = stage_layers(model.num_layers, p, layout.num_model_chunks)[pipeline_rank]
    return layers * layer + ends, layer, ends


def share(elements: int, layout: Layout, divided: bool) -> int:
    """Elements of each rank if data-parallel ranks divide them (``divided``), rounded up."""
    return -(-elements // (layout.data_parallel_size * layout.context_parallel_size)) if divided else elements


def state_bytes(elements: int, layout: Layout, state: State) -> int:
    """Bytes of weights, gradients or optimizer states on one rank: what ZeRO's stages 1, 2, 3 divide."""
    from_stage = 3 if state is ADAM["float32 gradients"][0] else 2 if state.is_gradient else 1
    return state.bytes_of(share(elements, layout, layout.zero_stage >= from_stage))


def static_lines(model: PlannedModel, layout: Layout, pipeline_rank: int) -> list[tuple[str, str, int, str]]:
    """Weights, gradients, optimizer states and communication buffers: what doesn't depend on recomputation.

    Part, term, bytes and source of each line.
    """
    elements, of_layer, ends = rank_parameters(model, layout, pipeline_rank)
    parts = ("weights", "gradients", *("optimizer states",) * (len(model.states) - 2))
    lines = [
        (part, state.term, state_bytes(elements, layout, state), f"{state.bytes_per_parameter} B each: {state.reason}")
        for part, state in zip(parts, model.states)
    ]
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


def _kept_lines(
    model: PlannedModel,
    layout: Layout,
    recompute: str,
    num_microbatches: int,
    pipeline_rank: int,
    whole_microbatches: int,
    device_type: str,
) -> list[tuple[str, int, str, tuple[Sequence[Row], int]]]:
    """What forward passes keep: part, how often, of what, and the rows of one with their bytes."""
    p, m, axes = layout.pipeline_parallel_size, layout.num_model_chunks, layout.layer_axes
    flight, layers, first = flights(model.num_layers, p, m, num_microbatches, pipeline_rank)
    again = flight - whole_microbatches
    what = f"{again} microbatches × {layers} layers"
    lines = [("activations", again * layers, what, _kept(model, axes, recompute, device_type))]
    if whole_microbatches:
        what = f"{whole_microbatches} microbatches × {layers} layers, all kept"
        lines.append(("activations", whole_microbatches * layers, what, _kept(model, axes, "none", device_type)))
    if pipeline_rank == 0:
        lines.append(("activations", first, f"{first} microbatches", _kept(model, axes, "first", device_type)))
    if pipeline_rank == p - 1:
        lines.append(("logits and loss", 1, "", _kept(model, axes, "last", device_type)))
    return lines


def _next_backward(
    model: PlannedModel,
    layout: Layout,
    recompute: str,
    num_microbatches: int,
    pipeline_rank: int,
    device_type: str,
) -> tuple[StagePart, StagePart | None, bool, bool, int]:
    """The backward pass that follows the fullest moment, as ``transient_bytes`` and ``transient_rows`` take it."""
    p, m = layout.pipeline_parallel_size, layout.num_model_chunks
    # With several chunks the next backward is that of the last one, which has no embedding.
    first, last = pipeline_rank == 0 and m == 1, pipeline_rank == p - 1
    layers = flights(model.num_layers, p, m, num_microbatches, pipeline_rank)[1]
    return *model.parts(layout.layer_axes, recompute, first, last, device_type), first, last, layers


@lru_cache(maxsize=2**10)
def held_bytes(
    model: PlannedModel, stage_axes: Layout, recompute: str, num_microbatches: int, pipeline_rank: int
) -> int:
    """The bytes of ``rank_bill`` without ``static_lines``."""
    lines = _kept_lines(model, stage_axes, recompute, num_microbatches, pipeline_rank, 0, "cuda")
    backward = _next_backward(model, stage_axes, recompute, num_microbatches, pipeline_rank, "cuda")
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
    p = layout.pipeline_parallel_size
    names = ("weights", "gradients", "optimizer states", "activations", "logits and loss", "communication buffers")
    parts: dict[str, list[Row]] = {name: [] for name in names}
    for part, term, size, source in static_lines(model, layout, pipeline_rank):
        parts[part].append(Row(term, size, source=source))
    sizes = (model, layout, recompute, num_microbatches, pipeline_rank)
    for part, count, what, (rows, _) in _kept_lines(*sizes, whole_microbatches, device_type):
        for row in rows:
            source = f"{row.source}, {what}" if what else row.source
            parts[part].append(Row(row.term, count * row.bytes, row.split_by, source, row.extra))
    parts["transient"] = transient_rows(*_next_backward(*sizes, device_type))
    flight = flights(model.num_layers, p, layout.num_model_chunks, num_microbatches, pipeline_rank)[0]
    return Bill(f"pipeline rank {pipeline_rank} of {p}, {flight} microbatches in flight", parts)
