"""The search: every layout of a job that ``layouts`` lists is counted.

What fits is ordered by predicted time, or ranked as ``Plan.order_of_equals`` says.  What doesn't says by how much.

Counted is the bill of a pipeline rank when it holds most, as a sum or line by line: weights in 16 bits, gradients
added up in float32, an optimizer with float32 copies of the weights (``formulas.states``), divided among data-parallel
ranks as the ZeRO stage says, and what forward passes save.  Pipeline outputs are freed once they are sent (2205.05198
appendix B).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import product
from typing import NoReturn

from actmem.config import ZERO_STAGES, ConfigError, Parallel, check_size
from actmem.formulas.first_stage import embeddings_in_flight, in_flight
from actmem.formulas.states import State
from actmem.rows import Row, total
from actmem_tools.plan.frameworks import some_framework_runs
from actmem_tools.plan.planned_models import PlannedModel
from actmem_tools.plan.step_time import (
    MODEL_ERROR,
    Cluster,
    Shards,
    StepSeconds,
    Traffic,
    data_seconds,
    layer_traffic,
    optimizer_seconds,
    pipeline_seconds,
    work_seconds,
)
from actmem_tools.tape.stage_tapes import Transient, transient

#: ZeRO-3 holds two layers' gathered weights: the one at work, and the next one on its way.
_GATHERED_LAYERS = 2
_NOT_RUN = "no framework runs this whose settings are printed; --all plans it all the same"


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
def chunk_layers(num_layers: int, pipeline_parallel_size: int, num_model_chunks: int = 1) -> tuple[int, ...]:
    """Layers of each stage of the model, in its order: chunk c of rank r is stage c·p + r.

    Where p·m does not divide L, the last stage and then the first hold fewer: they have the model's ends.  Of several
    chunks they hold at most one fewer each, as frameworks count an end as a layer.
    Raises ConfigError if more layers are short, or if an end would have no layer.
    """
    p, m = pipeline_parallel_size, num_model_chunks
    each = -(-num_layers // (p * m))
    short = each * p * m - num_layers
    at_first = short // 2
    if short and (p == 1 or each <= short - at_first or (m > 1 and short > 2)):
        name = "pipeline_parallel_size" if m == 1 else "pipeline_parallel_size · num_model_chunks"
        raise ConfigError("num_layers", f"{num_layers} can't be spread over {name} = {p * m}")
    layers = [each] * (p * m)
    layers[0] -= at_first
    layers[-1] -= short - at_first
    return tuple(layers)


@lru_cache(maxsize=2**12)
def stage_layers(num_layers: int, pipeline_parallel_size: int, num_model_chunks: int = 1) -> tuple[int, ...]:
    """Layers on each pipeline rank, all chunks together: see ``chunk_layers``."""
    layers = chunk_layers(num_layers, pipeline_parallel_size, num_model_chunks)
    return tuple(sum(layers[rank::pipeline_parallel_size]) for rank in range(pipeline_parallel_size))


# A search asks for thousands of layouts: what some of them share is computed once for the axes that it depends on.


@lru_cache(maxsize=2**12)
def refusal(model: PlannedModel, stage_axes: Parallel) -> str:
    """Why ranks can't share the model as the layout says; empty if they can."""
    try:
        model.check(stage_axes.layer_axes)
        chunk_layers(model.num_layers, stage_axes.pipeline_parallel_size, stage_axes.num_model_chunks)
    except ConfigError as error:
        return str(error)
    return ""


@lru_cache(maxsize=2**12)
def rank_parameters(model: PlannedModel, stage_axes: Parallel, pipeline_rank: int) -> tuple[int, int, int, int]:
    """Parameters of one pipeline rank, before data-parallel ranks divide them.

    Args:
        model: whose parameters are counted.
        stage_axes: the layout's tensor, pipeline and expert sizes (``Parallel.stage_axes``).
        pipeline_rank: which rank of the pipeline, from 0.

    Returns: numbers of elements: all on the rank; of these those of one layer; those outside layers (embedding, final
        norm, output layer); and those of experts that fewer ranks hold than the rest.
    """
    p = stage_axes.pipeline_parallel_size
    layer = model.layer_parameters(stage_axes.layer_axes)
    ends = model.end_parameters(stage_axes, pipeline_rank == 0, pipeline_rank == p - 1)
    layers = stage_layers(model.num_layers, p, stage_axes.num_model_chunks)[pipeline_rank]
    return layers * layer + ends, layer, ends, layers * model.expert_parameters(stage_axes.layer_axes)


def share(elements: int, layout: Parallel, divided: bool, of_experts: int = 0) -> int:
    """Elements of each rank if data-parallel ranks divide them (``divided``), rounded up.

    of_experts: of them those that fewer ranks hold (``PlannedModel.expert_parameters``).
    """
    if not divided:
        return elements
    return -(-(elements - of_experts) // layout.replicas) - (-of_experts // layout.expert_replicas)


def _static(model: PlannedModel, layout: Parallel, pipeline_rank: int) -> Iterator[tuple[str, str, int, str | State]]:
    """What doesn't depend on recomputation: part, term, bytes, and where they come from; a search needs no more."""
    elements, of_layer, ends, of_experts = rank_parameters(model, layout.stage_axes, pipeline_rank)
    states, zero, replicas = model.states, layout.zero_stage, layout.replicas
    for part, some, from_stage in (
        ("weights", states[:1], 3), ("gradients", states[1:2], 2), ("optimizer states", states[2:], 1),
    ):  # fmt: skip
        own = share(elements, layout, zero >= from_stage, of_experts)
        for state in some:
            yield part, state.term, state.bytes_of(own), state
    part = "communication buffers"
    if layout.pipeline_parallel_size > 1:
        yield part, "pipeline receive buffers", 2 * model.output_bytes(layout), "one output and one gradient"
    if replicas > 1 and zero >= 2:
        if layout.expert_replicas == 1:  # nobody else has any of them
            of_layer -= model.expert_parameters(layout.layer_axes)
        if zero == 3:
            size = 2 * (_GATHERED_LAYERS * of_layer + ends)
            yield part, "gathered weights", size, "16-bit, two layers and the model's ends"
        yield part, "gradients before they are divided", 2 * of_layer, "16-bit, one layer"


def static_rows(model: PlannedModel, layout: Parallel, pipeline_rank: int) -> dict[str, list[Row]]:
    """Weights, gradients, optimizer states and communication buffers, by part: what doesn't depend on recomputation."""
    parts: dict[str, list[Row]] = {
        part: [] for part in ("weights", "gradients", "optimizer states", "communication buffers")
    }
    for part, term, size, source in _static(model, layout, pipeline_rank):
        if isinstance(source, State):
            source = f"{source.bytes_per_parameter} B each: {source.reason}"
        parts[part].append(Row(term, size, source=source))
    return parts


def flights(model: PlannedModel, layout: Parallel, num_microbatches: int, pipeline_rank: int) -> tuple[int, int]:
    """Chunk-microbatches in flight on a rank, and layers of each, without what an end of several chunks is short of."""
    p, m = layout.pipeline_parallel_size, layout.num_model_chunks
    layers = chunk_layers(model.num_layers, p, m)[pipeline_rank if m == 1 else p]
    return in_flight(layout, pipeline_rank, num_microbatches), layers


def _at_its_fullest(
    model: PlannedModel, layout: Parallel, recompute: str, num_microbatches: int, pipeline_rank: int
) -> tuple[list[tuple[str, int]], Transient]:
    """What forward passes have left on a rank when it holds most, as ``PlannedModel.rows`` calls it, and how often; and
    what the backward pass that comes then makes."""
    flight, layers = flights(model, layout, num_microbatches, pipeline_rank)
    p, m, axes = layout.pipeline_parallel_size, layout.num_model_chunks, layout.layer_axes
    first, last = pipeline_rank == 0, pipeline_rank == p - 1
    embeddings = embeddings_in_flight(layout, num_microbatches) if first else 0
    missing, next_layers = 0, layers
    if m > 1:
        sizes, more_follow = chunk_layers(model.num_layers, p, m), num_microbatches > p
        if first and sizes[0] < layers:
            embeddings -= more_follow  # fullest is the moment with the fewest of the smaller chunk
            missing = embeddings * (layers - sizes[0])
        elif last and (short := layers - sizes[-1]):
            # Later on there are moments, as full, that have none of the last chunk.
            last = not more_follow or _kept_bytes(model, axes, "last") >= short * _kept_bytes(model, axes, recompute)
            missing, next_layers = (short, sizes[-1]) if last else (0, layers)
    kept = [(recompute, flight * layers - missing)]
    kept += [("first", embeddings)] * first + [("last", 1)] * last
    # With several chunks backward begins with the last one, which has no embedding.
    first = first and m == 1
    at_ends = "whole" if first and last else "first" if first else "last" if last else ""
    parts = model.part(axes, f"layer {recompute}"), model.part(axes, at_ends) if at_ends else None
    return kept, transient(*parts, first, last, next_layers)


@lru_cache(maxsize=2**10)
def held_bytes(
    model: PlannedModel, stage_axes: Parallel, recompute: str, num_microbatches: int, pipeline_rank: int
) -> int:
    """The bytes of ``rank_bill`` without ``static_rows``: a search needs no more."""
    kept, backward = _at_its_fullest(model, stage_axes, recompute, num_microbatches, pipeline_rank)
    return backward.bytes + sum(count * _kept_bytes(model, stage_axes.layer_axes, what) for what, count in kept)


@lru_cache(maxsize=2**12)
def _kept_bytes(model: PlannedModel, layer_axes: Parallel, what: str) -> int:
    return total(model.rows(layer_axes, what))


def rank_bill(model: PlannedModel, layout: Parallel, recompute: str, num_microbatches: int, pipeline_rank: int) -> Bill:
    """Everything on one pipeline rank at its peak."""
    kept, backward = _at_its_fullest(model, layout, recompute, num_microbatches, pipeline_rank)

    def times(rows: Iterable[Row], count: int) -> list[Row]:
        return [replace(row, bytes=count * row.bytes, source=f"{row.source}, {count:,} of them") for row in rows]

    held: dict[str, list[Row]] = {"activations": [], "logits and loss": []}
    for what, count in kept:
        held["logits and loss" if what == "last" else "activations"] += times(
            model.rows(layout.layer_axes, what), count
        )
    *states, buffers = static_rows(model, layout, pipeline_rank).items()
    flight, _ = flights(model, layout, num_microbatches, pipeline_rank)
    rank = f"pipeline rank {pipeline_rank} of {layout.pipeline_parallel_size}"
    passes = "passes of one chunk" if layout.num_model_chunks > 1 else "microbatches" if flight > 1 else "microbatch"
    moment = f"{rank}, {flight} {passes} in flight"
    return Bill(moment, dict([*states, *held.items(), buffers, ("transient", backward.rows)]))


#: Microbatches of more sequences than this only hold more.
LARGEST_MICRO_BATCH = 32
#: Context-parallel ranks share one sequence, and hold at least so many tokens of it.
LEAST_CONTEXT_TOKENS = 2048


def divisors(number: int, largest: int) -> list[int]:
    """Divisors up to ``largest``, in order."""
    return [each for each in range(1, min(number, largest) + 1) if number % each == 0]


def layouts(
    model: PlannedModel, cluster: Cluster, global_batch_size: int, fixed: Mapping[str, int] = {}
) -> Iterator[Parallel]:
    """Layouts of the cluster's GPUs, in a fixed order; sizes that the model can't have are still among them.

    t divides a node, c is a power of 2 that leaves 2,048 tokens a rank, b is at most 32.

    fixed: sizes by their names in Parallel; only layouts that have them.
    """

    def allowed(name: str, sizes: Iterable[int]) -> list[int]:
        return [size for size in sizes if fixed.get(name, size) == size]

    contexts, experts = [1], getattr(model.shape, "num_experts", None) or 0
    while model.context_parallel and model.seq_length >= 2 * contexts[-1] * LEAST_CONTEXT_TOKENS:
        contexts.append(2 * contexts[-1])
    tensors = allowed("tensor_parallel_size", divisors(cluster.per_node, cluster.per_node))
    for t, cp in product(tensors, allowed("context_parallel_size", contexts)):
        if cluster.gpus % (t * cp):
            continue
        for p in allowed("pipeline_parallel_size", divisors(cluster.gpus // (t * cp), model.num_layers)):
            dp = cluster.gpus // (t * cp * p)
            if global_batch_size % dp or not allowed("data_parallel_size", [dp]):
                continue
            sequential = allowed("sequence_parallel", (False, True) if t > 1 else (False,))
            stages = allowed("zero_stage", ZERO_STAGES if dp * cp > 1 else (0,))
            # Among more ranks than t, each with tokens of its own.
            beside = [t * w for w in divisors(dp * cp, experts) if experts % (t * w) == 0]
            chunks = divisors(-(-model.num_layers // p), model.num_layers) if p > 1 else [1]
            batches = allowed("micro_batch_size", divisors(global_batch_size // dp, LARGEST_MICRO_BATCH))
            for m, sp, b in product(allowed("num_model_chunks", chunks), sequential, batches):
                if m > 1 and (global_batch_size // dp // b) % p:
                    continue
                shared = beside if beside and (sp or t == 1) else [t]
                for zero, ranks in product(stages, allowed("expert_parallel_size", shared)):
                    yield Parallel(t, bool(sp), p, m, b, dp, cp, zero, ranks if ranks > t else None)


@dataclass(frozen=True)
class Counted:
    """One way to run the job, and its bytes on the fullest rank.

    bytes: of pipeline_rank at its peak, without the allowance.
    """

    layout: Parallel
    recompute: str
    num_microbatches: int
    pipeline_rank: int
    bytes: int


class Refused(Counted):
    """A layout that doesn't fit even with everything recomputed."""


@dataclass(frozen=True)
class Plan(Counted):
    """One that fits, and how long its step takes."""

    seconds: StepSeconds

    @property
    def order(self) -> tuple:
        """Sorts plans: by time, then bytes, then sizes, so that equals come out in one order."""
        one = self.layout
        sizes = one.tensor_parallel_size, one.pipeline_parallel_size, one.num_model_chunks
        more = one.context_parallel_size, one.expert_ranks, one.micro_batch_size
        return self.seconds.total, self.bytes, *sizes, *more, one.zero_stage, not one.sequence_parallel

    @property
    def order_of_equals(self) -> tuple:
        """Sorts plans whose times are too near to be told apart: what is least likely to go wrong first.

        Returns: less hidden traffic, in steps of the time model's error, then the lower ZeRO stage, fewer axes of
            parallelism, more free memory, and then ``order``.
        """
        hidden = int(self.seconds.hidden / (MODEL_ERROR * self.seconds.total))
        one = self.layout
        ranks = (one.tensor_parallel_size, one.pipeline_parallel_size, one.context_parallel_size)
        axes = sum(size > 1 for size in (*ranks, one.data_parallel_size)) + (one.expert_ranks > ranks[0])
        return hidden, one.zero_stage, axes, self.bytes, *self.order


@dataclass
class SearchResult:
    """What a search found.

    plans: that fit, the first ones.
    nearest: of those that don't, the smallest first.
    counted: layouts whose bytes were computed.
    fitting: of them, those that fit.
    near: of these, those whose times are within MODEL_ERROR of the fastest's.
    """

    plans: list[Plan]
    nearest: list[Refused]
    counted: int
    fitting: int
    near: int = 0


def find_plans(
    model: PlannedModel, cluster: Cluster, global_batch_size: int, keep: int = 10, fixed: Mapping[str, int] = {}
) -> SearchResult:
    """Search all layouts, fastest first.

    keep: how many plans, and refused layouts, to return.  fixed: see ``layouts``.

    Deterministic.  Raises ConfigError if no layout has the given GPUs and batch, or on an axis that the model lacks.
    """
    return _Search(Request(model, cluster, global_batch_size, fixed, everything=True)).run(keep)


@dataclass(frozen=True)
class Request:
    """What was asked for.

    The model with its sequence length, the GPUs, the sequences of one step, and sizes that a layout must have.
    everything: also what no framework runs whose settings are printed.
    """

    model: PlannedModel
    cluster: Cluster
    global_batch_size: int
    fixed: Mapping[str, int] = field(default_factory=dict)
    everything: bool = False

    def search(self, keep: int = 1) -> SearchResult:
        """The layouts of this request, ranked."""
        return _Search(self).run(keep, ranked=True)


class _Search:
    def __init__(self, request: Request):
        self.model, self.cluster, self.fixed = request.model, request.cluster, request.fixed
        self.batch = check_size("global_batch_size", request.global_batch_size)
        self.everything = request.everything
        self.counted = 0
        self.unfit: Counter[str] = Counter()
        self._times = cache(self._layer_seconds)

    def run(self, keep: int, ranked: bool = False) -> SearchResult:
        self._check()
        plans: list[Plan] = []
        nearest: list[Refused] = []
        for layout in layouts(self.model, self.cluster, self.batch, self.fixed):
            modes = self._modes(layout)
            if reason := refusal(self.model, layout.stage_axes) or ("" if modes else _NOT_RUN):
                self.unfit[reason] += 1
                continue
            outcome = self._best(layout, modes)
            (plans if isinstance(outcome, Plan) else nearest).append(outcome)  # type: ignore[arg-type]
        if not self.counted:
            self._refuse()
        limit = (1 + MODEL_ERROR) * min((plan.seconds.total for plan in plans), default=0)

        def place(plan: Plan) -> tuple:
            return (0, *plan.order_of_equals) if ranked and plan.seconds.total <= limit else (1, *plan.order)

        best = heapq.nsmallest(keep, plans, key=place)
        close = heapq.nsmallest(keep, nearest, key=lambda refused: refused.bytes)
        near = sum(plan.seconds.total <= limit for plan in plans)
        return SearchResult(best, close, self.counted, len(plans), near)

    def _check(self) -> None:
        for name, size in self.fixed.items():
            Parallel(**{"pipeline_parallel_size": 2, name: size})  # type: ignore[arg-type]  # or chunks are refused
        if self.fixed.get("context_parallel_size", 1) > 1 and not self.model.context_parallel:
            raise ConfigError("context_parallel_size", f"{self.model.name}'s layer has no context parallelism")

    def _modes(self, layout: Parallel) -> Sequence[str]:
        """Modes of recomputation that may run in this layout."""
        modes = self.model.recompute_modes
        return [mode for mode in modes if self.everything or some_framework_runs(self.model, layout, mode)]

    def _refuse(self) -> NoReturn:
        """Say why not one layout could be counted."""
        others = dict(self.fixed)
        stage = others.pop("zero_stage", 0)
        if stage and any(layouts(self.model, self.cluster, self.batch, others)) and not self.unfit:
            rule = f"{stage} divides states among data · context ranks, and these sizes leave one: only 0 is possible"
            raise ConfigError("zero_stage", rule)
        wanted = "".join(f", {name} = {size}" for name, size in self.fixed.items())
        rule = f"no layout of {self.cluster.gpus} has a global batch of {self.batch}{wanted}"
        raise ConfigError("gpus", ": ".join([rule, *(reason for reason, _ in self.unfit.most_common(1))]))

    def _layer_seconds(self, layout: Parallel, recompute: str) -> tuple[float, float, dict[bool, Traffic], float]:
        """One layer: forward, recomputation, collectives; and the output layer's forward."""
        forward = work_seconds(self.model.layer_work(layout), self.cluster)
        again = work_seconds(self.model.added_work(layout, recompute), self.cluster)
        return (
            forward,
            again,
            layer_traffic(self.model, layout, recompute, self.cluster),
            work_seconds(self.model.last_work(layout), self.cluster),
        )

    def _best(self, layout: Parallel, modes: Sequence[str]) -> Plan | Refused:
        """With the least recomputation that fits; refused if none does."""
        self.counted += 1
        n = self.batch // (layout.data_parallel_size * layout.micro_batch_size)
        p = layout.pipeline_parallel_size
        # Ranks between hold as much as rank 1 or less; rank 1 may have a layer more than the ends.
        ranks = sorted({0, min(1, p - 1), p - 1})
        static = {rank: sum(size for _, _, size, _ in _static(self.model, layout, rank)) for rank in ranks}
        room = self.cluster.usable_bytes
        sizes: dict[int, int] = {}
        # Where not even the states fit, only the smallest sizes are of interest.
        hopeless = max(static.values()) > room
        for recompute in modes[-1:] if hopeless else modes:
            sizes = {
                rank: static[rank] + held_bytes(self.model, layout.stage_axes, recompute, n, rank) for rank in ranks
            }
            if max(sizes.values()) <= room:
                break
        fullest = max(sizes, key=lambda rank: (sizes[rank], -rank))
        if sizes[fullest] > room:
            return Refused(layout, modes[-1], n, fullest, sizes[fullest])
        return Plan(layout, recompute, n, fullest, sizes[fullest], self._seconds(layout, recompute, n))

    def _seconds(self, layout: Parallel, recompute: str, n: int) -> StepSeconds:
        forward, again, traffic, head = self._times(layout.layer_axes, recompute)
        p, m = layout.pipeline_parallel_size, layout.num_model_chunks
        per_rank = stage_layers(self.model.num_layers, p, m)
        # The slowest stage sets the pace: the one with most layers, or the last with its output layer.
        most = max(per_rank)
        loads = [(most, 0.0), (per_rank[-1], head)] if p > 1 else [(most, head)]
        layers, ends = max(loads, key=lambda load: load[0] * 3 * forward + 3 * load[1])
        compute = n * 3 * (layers * forward + ends)
        extra = n * layers * again
        # Backward's reductions run beside the matmuls of weights' gradients, which take as long as forward's, unless
        # sharded data parallelism has the only queue.
        beside = sum(link.beside for link in traffic.values())
        hides = forward if layout.zero_stage < 2 or self.cluster.device.hides_both else 0.0
        late = max(0.0, beside - hides)
        tensor = n * layers * (sum(link.forward + link.backward for link in traffic.values()) + late)
        pipeline = n * m * pipeline_seconds(self.model, layout, self.cluster)
        bubble = (p - 1) / (n * m) * (compute + extra + tensor)
        elements, of_layer, of_ends, of_experts = rank_parameters(self.model, layout.stage_axes, 0)
        # Of the experts' bytes so many fewer are sent, as fewer ranks hold the same.
        groups = (layout.expert_replicas, layout.expert_ranks), (layout.replicas, layout.tensor_parallel_size)
        to_experts, to_others = (self.cluster.ring_seconds(*group) for group in groups)
        others = 1 - to_experts / to_others if of_experts else 0
        # While a layer's collectives wait, the other link is free.
        inside = self.cluster.inside_node(layout.replicas, layout.tensor_parallel_size)
        own, other = traffic[inside], traffic[not inside]
        room = forward + other.forward, 2 * forward + again + other.backward - min(own.beside, hides)
        shards = Shards(of_layer - others * self.model.expert_parameters(layout.layer_axes), of_ends, layers)
        data, hidden = data_seconds(shards, layout, n, room, self.cluster)
        stepped = share(elements, layout, layout.zero_stage >= 1, of_experts)
        step = optimizer_seconds(stepped, self.model.states, self.cluster)
        hidden += n * layers * (beside - late)
        return StepSeconds(compute, extra, tensor, pipeline, data, bubble, step, hidden)


def bill_of(model: PlannedModel, plan: Counted) -> Bill:
    """The plan's bill on its fullest rank, line by line."""
    return rank_bill(model, plan.layout, plan.recompute, plan.num_microbatches, plan.pipeline_rank)
