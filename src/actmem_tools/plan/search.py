"""Search the layouts of a training job: predict the peak bytes of each, and rank those that fit.

A layout says how ranks share the model: TP, PP, CP, DP, ZeRO stage, microbatch.  ``layouts`` lists them.  Layouts that
fit are ordered by predicted time; where times are too close to be told apart, by ``Plan.order_of_equals``.  Of the
layouts that don't fit, the smallest are returned with their bytes.

A bill lists everything that one pipeline rank holds at its peak: weights, gradients and optimizer states in the
precision asked for (``optimizers.PRECISIONS``), sharded as the ZeRO stage says; what forward passes have saved for
backward; and what the next backward pass allocates (the transient).  A stage's outputs are freed after they are sent
(2205.05198 appendix B).
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import product
from typing import NoReturn

from actmem.config import ZERO_STAGES, ConfigError, Parallel, check_size
from actmem.formulas.stages import embeddings_in_flight, in_flight
from actmem.formulas.states import State
from actmem.rows import Row, total
from actmem_more.fp8 import fp8_copies
from actmem_more.llama_shape import LlamaShape
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

#: ZeRO-3 holds the gathered weights of two layers: of the one that runs, and of the next one, which are on their way.
_GATHERED_LAYERS = 2


@dataclass(frozen=True)
class Bill:
    """Everything that one rank holds at its peak.

    Attributes:
        moment: a text that names the pipeline rank and the microbatches in flight, such as "pipeline rank 0 of 8, 8
            microbatches in flight".
        parts: a dict from the parts of the bill to their rows: "weights", "gradients", "optimizer states",
            "activations", "logits and loss", "communication buffers" and "transient" (what the next backward pass
            allocates).
    """

    moment: str
    parts: Mapping[str, Sequence[Row]]

    @property
    def bytes(self) -> int:
        """The bytes of all rows together."""
        return sum(total(rows) for rows in self.parts.values())

    def by_part(self) -> dict[str, int]:
        """Return the bytes of each part, without parts of 0 bytes."""
        sums = {part: total(rows) for part, rows in self.parts.items()}
        return {part: size for part, size in sums.items() if size}


@lru_cache(maxsize=2**12)
def chunk_layers(num_layers: int, pipeline_parallel_size: int, num_model_chunks: int = 1) -> tuple[int, ...]:
    """Distribute a model's L layers over p·m pipeline stages, m model chunks on each of p ranks.

    If p·m does not divide L, the last stage gets fewer layers than most stages, and if that is not enough the first
    stage too: these two also hold the output layer and the embedding.  With several chunks on a rank (m > 1) each of
    the two gets at most one layer fewer, because frameworks let the embedding or the loss take the place of one layer.

    Args:
        num_layers: L, layers of the whole model.
        pipeline_parallel_size: p, pipeline ranks.
        num_model_chunks: m, model chunks on each pipeline rank.

    Returns: the number of layers of each stage, in the order in which a microbatch passes through them.  Chunk c of
        rank r is stage c·p + r.

    Raises: ConfigError if L can't be distributed by this rule.
    """
    p, m = pipeline_parallel_size, num_model_chunks
    per_stage = -(-num_layers // (p * m))
    missing = per_stage * p * m - num_layers
    missing_at_first = missing // 2
    if missing and (p == 1 or per_stage <= missing - missing_at_first or (m > 1 and missing > 2)):
        name = "pipeline_parallel_size" if m == 1 else "pipeline_parallel_size · num_model_chunks"
        raise ConfigError("num_layers", f"{num_layers} can't be spread over {name} = {p * m}")
    layers = [per_stage] * (p * m)
    layers[0] -= missing_at_first
    layers[-1] -= missing - missing_at_first
    return tuple(layers)


@lru_cache(maxsize=2**12)
def stage_layers(num_layers: int, pipeline_parallel_size: int, num_model_chunks: int = 1) -> tuple[int, ...]:
    """Return for each pipeline rank the number of layers in all its chunks together.

    Args:
        num_layers: L, layers of the whole model, which ``chunk_layers`` distributes.
        pipeline_parallel_size: p, pipeline ranks.
        num_model_chunks: m, model chunks on each pipeline rank.
    """
    layers = chunk_layers(num_layers, pipeline_parallel_size, num_model_chunks)
    return tuple(sum(layers[rank::pipeline_parallel_size]) for rank in range(pipeline_parallel_size))


# A search counts thousands of layouts.  Results that depend on some of their sizes only are cached by those sizes:
# ``Parallel.stage_axes`` or ``Parallel.layer_axes``, which leave out the others.


@lru_cache(maxsize=2**12)
def refusal(model: PlannedModel, stage_axes: Parallel) -> str:
    """Return one sentence with the reason why the model can't be sharded in this layout; "" if it can be.

    Args:
        model: the planned model.
        stage_axes: the layout without data parallelism and ZeRO (``Parallel.stage_axes``).
    """
    try:
        model.check(stage_axes.layer_axes)
        chunk_layers(model.num_layers, stage_axes.pipeline_parallel_size, stage_axes.num_model_chunks)
    except ConfigError as error:
        return str(error)
    return ""


@lru_cache(maxsize=2**12)
def rank_parameters(model: PlannedModel, stage_axes: Parallel, pipeline_rank: int) -> tuple[int, int, int, int]:
    """Count the parameters that one pipeline rank holds, before ZeRO shards them among data-parallel ranks.

    Args:
        model: the planned model.
        stage_axes: the layout without data parallelism and ZeRO (``Parallel.stage_axes``).
        pipeline_rank: the rank's place in the pipeline, from 0 to p − 1.

    Returns: four counts: all parameters of the rank; those of one layer; those outside the layers (embedding, final
        norm, output layer); and those of experts, or 0 if the t tensor-parallel ranks share the experts
        (``PlannedModel.expert_parameters``).
    """
    p = stage_axes.pipeline_parallel_size
    of_layer = model.layer_parameters(stage_axes.layer_axes)
    of_ends = model.end_parameters(stage_axes, pipeline_rank == 0, pipeline_rank == p - 1)
    layers = stage_layers(model.num_layers, p, stage_axes.num_model_chunks)[pipeline_rank]
    return layers * of_layer + of_ends, of_layer, of_ends, layers * model.expert_parameters(stage_axes.layer_axes)


def share(elements: int, layout: Parallel, divided: bool, of_experts: int = 0) -> int:
    """Return how many of its parameters a rank holds after ZeRO has sharded them among data-parallel ranks.

    Args:
        elements: parameters of the rank before ZeRO.
        layout: the layout; its ``replicas`` and ``expert_replicas`` say how many ranks hold the same parameters.
        divided: whether the ZeRO stage shards these parameters; if not, ``elements`` is returned.
        of_experts: how many of ``elements`` are expert parameters, which fewer ranks share
            (``PlannedModel.expert_parameters``).

    Returns: a number of parameters; expert and other parameters are each rounded up.
    """
    if not divided:
        return elements
    return -(-(elements - of_experts) // layout.replicas) - (-of_experts // layout.expert_replicas)


def _of_all_modes(
    model: PlannedModel, layout: Parallel, pipeline_rank: int
) -> Iterator[tuple[str, str, int, str | State]]:
    """Yield the fields of the rows of ``rows_of_all_modes``, without the texts, which a search doesn't need.

    Yields: the part of the bill, the term, its bytes, and its source: a text, or for weights, gradients and optimizer
        states the ``State``.
    """
    elements, of_layer, of_ends, of_experts = rank_parameters(model, layout.stage_axes, pipeline_rank)
    states, zero, replicas = model.states, layout.zero_stage, layout.replicas
    for part, states_of_part, divided_from_stage in (
        ("weights", states[:1], 3), ("gradients", states[1:2], 2), ("optimizer states", states[2:], 1),
    ):  # fmt: skip
        elements_here = share(elements, layout, zero >= divided_from_stage, of_experts)
        for state in states_of_part:
            yield part, state.term, state.bytes_of(elements_here), state
    if model.precision == "fp8" and isinstance(model.shape, LlamaShape):
        of_layer_fp8, gradient = fp8_copies(model.shape, layout.tensor_parallel_size, model.tokens(layout))
        copies = (elements - of_ends) // of_layer * of_layer_fp8
        yield "weights", "FP8 copies of weights: by rule, not run", copies, "two of each linear's, cached"
        yield "transient", "FP8 copies, at most: by rule, not run", gradient, "two of gate and up's gradient"
    part = "communication buffers"
    if layout.pipeline_parallel_size > 1:
        yield part, "pipeline receive buffers", 2 * model.output_bytes(layout), "one output and one gradient"
    if replicas > 1 and zero >= 2:
        if layout.expert_replicas == 1:  # no other rank holds the same experts: they are neither gathered nor reduced
            of_layer -= model.expert_parameters(layout.layer_axes)
        if zero == 3:
            size = 2 * (_GATHERED_LAYERS * of_layer + of_ends)
            yield part, "gathered weights", size, "16-bit, two layers and the model's ends"
        yield part, "gradients before they are divided", 2 * of_layer, "16-bit, one layer"


def rows_of_all_modes(model: PlannedModel, layout: Parallel, pipeline_rank: int) -> dict[str, list[Row]]:
    """List the bytes of a rank at its peak that are the same in every mode of recomputation.

    Args:
        model: the planned model.
        layout: how the GPUs share the model.
        pipeline_rank: the rank's place in the pipeline, from 0 to p − 1.

    Returns: rows under five keys: "weights", "gradients", "optimizer states", "communication buffers" and "transient".
        "transient" is for tensors that backward allocates for a moment: here only fp8 copies, if there are any.
        ``rank_bill`` adds the other transient tensors.
    """
    names = ("weights", "gradients", "optimizer states", "communication buffers", "transient")
    parts: dict[str, list[Row]] = {part: [] for part in names}
    for part, term, size, source in _of_all_modes(model, layout, pipeline_rank):
        if isinstance(source, State):
            source = f"{source.bytes_per_parameter} B each: {source.reason}"
        parts[part].append(Row(term, size, source=source))
    return parts


def chunk_passes(model: PlannedModel, layout: Parallel, num_microbatches: int, pipeline_rank: int) -> tuple[int, int]:
    """Return how many forward passes a pipeline rank holds at its peak, and how many layers each pass has saved.

    A pass is one microbatch through one model chunk.  The rank holds it from its forward to its backward pass there.

    Args:
        model: the planned model; only its number of layers is read.
        layout: how the GPUs share the model; only p and m are read.
        num_microbatches: microbatches of one step on one data-parallel rank.
        pipeline_rank: the rank's place in the pipeline, from 0 to p − 1.

    Returns: the number of passes; and the layers of a chunk.  With one chunk on each rank these are the rank's own
        layers.  With several they are the layers of a full chunk: the model's first and last chunk can have fewer,
        which the caller must subtract.
    """
    p, m = layout.pipeline_parallel_size, layout.num_model_chunks
    layers = chunk_layers(model.num_layers, p, m)[pipeline_rank if m == 1 else p]
    return in_flight(layout, pipeline_rank, num_microbatches), layers


def _at_its_fullest(
    model: PlannedModel, layout: Parallel, recompute: str, num_microbatches: int, pipeline_rank: int
) -> tuple[list[tuple[str, int]], Transient]:
    """Find what a rank holds at its peak: what its forward passes have saved, and what the next backward pass makes.

    Returns: pairs of a text that ``PlannedModel.rows`` takes (a mode of recomputation for one layer, "first" or "last")
        and how often those rows are held; and the bytes that the next backward pass makes at its peak.
    """
    passes, layers = chunk_passes(model, layout, num_microbatches, pipeline_rank)
    p, m, axes = layout.pipeline_parallel_size, layout.num_model_chunks, layout.layer_axes
    first, last = pipeline_rank == 0, pipeline_rank == p - 1
    embeddings = embeddings_in_flight(layout, num_microbatches) if first else 0
    missing, next_layers = 0, layers
    if m > 1:
        sizes, more_follow = chunk_layers(model.num_layers, p, m), num_microbatches > p
        if first and sizes[0] < layers:
            embeddings -= more_follow  # the rank holds most when the fewest passes are of the smaller chunk
            missing = embeddings * (layers - sizes[0])
        elif last and (at_last := layers - sizes[-1]):
            # Later moments have as many passes in flight, and none of the smaller last chunk among them.
            last = not more_follow or _kept_bytes(model, axes, "last") >= at_last * _kept_bytes(model, axes, recompute)
            missing, next_layers = (at_last, sizes[-1]) if last else (0, layers)
    kept = [(recompute, passes * layers - missing)]
    kept += [("first", embeddings)] * first + [("last", 1)] * last
    # With several chunks backward begins with the last one, which has no embedding.
    first = first and m == 1
    ends = "whole" if first and last else "first" if first else "last" if last else ""
    parts = model.part(axes, f"layer {recompute}"), model.part(axes, ends) if ends else None
    return kept, transient(*parts, first, last, next_layers)


@lru_cache(maxsize=2**10)
def held_bytes(
    model: PlannedModel, stage_axes: Parallel, recompute: str, num_microbatches: int, pipeline_rank: int
) -> int:
    """Return the bytes that a rank holds at its peak and that depend on the mode of recomputation.

    These are the bytes of tensors that forward passes have saved, and of tensors that backward allocates.
    ``rank_bill`` has them and the bytes of ``rows_of_all_modes``.  They don't depend on data parallelism, so a search
    computes them once for many layouts.

    Args:
        model: the planned model.
        stage_axes: the layout without data parallelism and ZeRO (``Parallel.stage_axes``).
        recompute: the mode of recomputation, such as "none" or "full" (``PlannedModel.recompute_modes``).
        num_microbatches: microbatches of one step on one data-parallel rank.
        pipeline_rank: the rank's place in the pipeline, from 0 to p − 1.
    """
    kept, backward = _at_its_fullest(model, stage_axes, recompute, num_microbatches, pipeline_rank)
    return backward.bytes + sum(count * _kept_bytes(model, stage_axes.layer_axes, what) for what, count in kept)


@lru_cache(maxsize=2**12)
def _kept_bytes(model: PlannedModel, layer_axes: Parallel, what: str) -> int:
    return total(model.rows(layer_axes, what))


def rank_bill(model: PlannedModel, layout: Parallel, recompute: str, num_microbatches: int, pipeline_rank: int) -> Bill:
    """List everything that one pipeline rank holds at its peak.

    Args:
        model: the planned model.
        layout: how the GPUs share the model.
        recompute: the mode of recomputation, such as "none" or "full" (``PlannedModel.recompute_modes``).
        num_microbatches: microbatches of one step on one data-parallel rank.
        pipeline_rank: the rank's place in the pipeline, from 0 to p − 1.
    """
    kept, backward = _at_its_fullest(model, layout, recompute, num_microbatches, pipeline_rank)

    def times(rows: Iterable[Row], count: int) -> list[Row]:
        return [replace(row, bytes=count * row.bytes, source=f"{row.source}, {count:,} of them") for row in rows]

    held: dict[str, list[Row]] = {"activations": [], "logits and loss": []}
    for what, count in kept:
        held["logits and loss" if what == "last" else "activations"] += times(
            model.rows(layout.layer_axes, what), count
        )
    *states, buffers, (_, more) = rows_of_all_modes(model, layout, pipeline_rank).items()
    passes, _ = chunk_passes(model, layout, num_microbatches, pipeline_rank)
    rank = f"pipeline rank {pipeline_rank} of {layout.pipeline_parallel_size}"
    noun = "passes of one chunk" if layout.num_model_chunks > 1 else "microbatches" if passes > 1 else "microbatch"
    moment = f"{rank}, {passes} {noun} in flight"
    return Bill(moment, dict([*states, *held.items(), buffers, ("transient", [*backward.rows, *more])]))


#: The most sequences in a microbatch that the search tries: a larger microbatch would only hold more bytes.
LARGEST_MICRO_BATCH = 32
#: The search gives each context-parallel rank at least so many tokens of a sequence.
LEAST_CONTEXT_TOKENS = 2048


def divisors(number: int, largest: int) -> list[int]:
    """Return the divisors of ``number`` that are at most ``largest``, in ascending order."""
    return [divisor for divisor in range(1, min(number, largest) + 1) if number % divisor == 0]


def layouts(
    model: PlannedModel, cluster: Cluster, global_batch_size: int, fixed: Mapping[str, int] = {}
) -> Iterator[Parallel]:
    """Yield the layouts for which a search predicts bytes, in a fixed order.

    Every layout uses all GPUs of the cluster and divides the batch evenly.  t divides a node's GPUs; c is a power of 2
    that leaves each rank at least ``LEAST_CONTEXT_TOKENS`` tokens; b is at most ``LARGEST_MICRO_BATCH``.  Some of these
    layouts can't shard the model, such as t = 2 with 25 heads: check each layout with ``refusal``.

    Args:
        model: the planned model.
        cluster: the GPUs of the job.
        global_batch_size: sequences in one step on all GPUs together.
        fixed: values that the layout must have, by names of ``Parallel``'s fields, such as ``{"zero_stage": 1}``.
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
            # Experts are shared among t ranks, or among a multiple of t, of which each group of t has its own tokens.
            expert_sizes = [t * w for w in divisors(dp * cp, experts) if experts % (t * w) == 0]
            chunks = divisors(-(-model.num_layers // p), model.num_layers) if p > 1 else [1]
            batches = allowed("micro_batch_size", divisors(global_batch_size // dp, LARGEST_MICRO_BATCH))
            for m, sp, b in product(allowed("num_model_chunks", chunks), sequential, batches):
                if m > 1 and (global_batch_size // dp // b) % p:
                    continue
                sizes = expert_sizes if expert_sizes and (sp or t == 1) else [t]
                for zero, ranks in product(stages, allowed("expert_parallel_size", sizes)):
                    yield Parallel(t, bool(sp), p, m, b, dp, cp, zero, ranks if ranks > t else None)


@dataclass(frozen=True)
class Counted:
    """A layout with its predicted peak memory.

    Attributes:
        layout: how the GPUs share the model.
        recompute: the mode of recomputation, such as "none" or "full".
        num_microbatches: how many microbatches each data-parallel rank runs in a step.
        pipeline_rank: the pipeline rank with the highest peak.
        bytes: that peak, without the memory that is left free for CUDA, NCCL and the allocator
            (``Cluster.allowance_bytes``).
    """

    layout: Parallel
    recompute: str
    num_microbatches: int
    pipeline_rank: int
    bytes: int


@dataclass(frozen=True)
class Plan(Counted):
    """A layout that fits, in the mode of least recomputation in which it fits, and the predicted time of its step.

    Attributes:
        seconds: the predicted seconds of one step, by what they are spent on.
    """

    seconds: StepSeconds

    @property
    def order(self) -> tuple:
        """The sort key that orders plans by time, then by bytes."""
        return self.seconds.total, self.bytes

    @property
    def order_of_equals(self) -> tuple:
        """The sort key for plans whose predicted times are too close to be told apart: the least risky comes first.

        Returns: four numbers, followed by the two of ``order``; in each a smaller number is better.  The first number
            is the seconds of collectives that must overlap with computation (``StepSeconds.hidden``), as a share of the
            step in whole multiples of ``MODEL_ERROR``.  Then come the ZeRO stage, the number of kinds of parallelism
            that are used, and the bytes.
        """
        hidden = int(self.seconds.hidden / (MODEL_ERROR * self.seconds.total))
        layout = self.layout
        ranks = (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.context_parallel_size)
        axes = sum(size > 1 for size in (*ranks, layout.data_parallel_size)) + (layout.expert_ranks > ranks[0])
        return hidden, layout.zero_stage, axes, self.bytes, *self.order


@dataclass
class SearchResult:
    """The result of ``Request.search``.

    Attributes:
        plans: the best layouts that fit, the best first.
        nearest: the layouts with the fewest bytes among those that don't fit, the smallest first.
        counted: for how many layouts bytes were predicted.
        fitting: how many of these layouts fit.
        near: how many fitting layouts take at most ``MODEL_ERROR`` longer than the fastest.
    """

    plans: list[Plan]
    nearest: list[Counted]
    counted: int
    fitting: int
    near: int = 0


@dataclass(frozen=True)
class Request:
    """A training job whose layouts are to be searched.

    Attributes:
        model: the planned model, with its sequence length and optimizer, from ``planned_model_of``.
        cluster: the GPUs of the job.
        global_batch_size: sequences in one step on all GPUs together.
        fixed: values that the layout must have, by names of ``Parallel``'s fields, such as ``{"zero_stage": 1}``.
        everything: whether to include layouts that neither Megatron-LM nor torchtitan nor Hugging Face can run.
    """

    model: PlannedModel
    cluster: Cluster
    global_batch_size: int
    fixed: Mapping[str, int] = field(default_factory=dict)
    everything: bool = False

    def search(self, keep: int = 1) -> SearchResult:
        """Predict bytes and time of every layout of the job, and rank those that fit.

        Plans are ranked by time.  Plans whose time is within ``MODEL_ERROR`` of the fastest plan's are ranked by
        ``Plan.order_of_equals``.  Equal requests give equal results.

        Args:
            keep: how many plans to return at most, and how many of the layouts that don't fit.

        Raises: ConfigError if no layout has these GPUs, this batch and these fixed sizes, or if the fixed sizes ask for
            context parallelism and the model doesn't have it.
        """
        return _Search(self).run(keep)


class _Search:
    def __init__(self, request: Request):
        self.model, self.cluster, self.fixed = request.model, request.cluster, request.fixed
        self.batch = check_size("global_batch_size", request.global_batch_size)
        self.everything = request.everything
        self.counted = 0
        self.reasons: Counter[str] = Counter()  # why layouts were refused, and how often
        self._times = cache(self._layer_seconds)

    def run(self, keep: int) -> SearchResult:
        self._check()
        plans: list[Plan] = []
        nearest: list[Counted] = []
        # FP8's rule is Megatron-LM's only.
        anyway = "" if self.model.precision == "fp8" else "; --all plans it anyway"
        not_run = f"no framework whose settings are printed runs this{anyway}"
        for layout in layouts(self.model, self.cluster, self.batch, self.fixed):
            modes = self._modes(layout)
            if reason := refusal(self.model, layout.stage_axes) or ("" if modes else not_run):
                self.reasons[reason] += 1
                continue
            outcome = self._best(layout, modes)
            (plans if isinstance(outcome, Plan) else nearest).append(outcome)  # type: ignore[arg-type]
        if not self.counted:
            self._refuse()
        limit = (1 + MODEL_ERROR) * min((plan.seconds.total for plan in plans), default=0)

        def place(plan: Plan) -> tuple:
            return (0, *plan.order_of_equals) if plan.seconds.total <= limit else (1, *plan.order)

        best = heapq.nsmallest(keep, plans, key=place)
        close = heapq.nsmallest(keep, nearest, key=lambda refused: refused.bytes)
        near = sum(plan.seconds.total <= limit for plan in plans)
        return SearchResult(best, close, self.counted, len(plans), near)

    def _check(self) -> None:
        """Raise ConfigError if a fixed size can't be, or names an axis that the model doesn't have."""
        for name, size in self.fixed.items():
            Parallel(**{"pipeline_parallel_size": 2, name: size})  # type: ignore[arg-type]  # or chunks are refused
        if self.fixed.get("context_parallel_size", 1) > 1 and not self.model.context_parallel:
            raise ConfigError("context_parallel_size", f"{self.model.name}'s layer has no context parallelism")

    def _modes(self, layout: Parallel) -> Sequence[str]:
        """List the modes of recomputation that some framework can run in this layout, or that were asked for."""
        modes = self.model.recompute_modes
        return [mode for mode in modes if self.everything or some_framework_runs(self.model, layout, mode)]

    def _refuse(self) -> NoReturn:
        """Raise ConfigError with the reason why no layout could be counted."""
        other_sizes = dict(self.fixed)
        stage = other_sizes.pop("zero_stage", 0)
        if stage and any(layouts(self.model, self.cluster, self.batch, other_sizes)) and not self.reasons:
            rule = f"{stage} divides states among data · context ranks, and these sizes leave one: only 0 is possible"
            raise ConfigError("zero_stage", rule)
        wanted = "".join(f", {name} = {size}" for name, size in self.fixed.items())
        rule = f"no layout of {self.cluster.gpus} has a global batch of {self.batch}{wanted}"
        raise ConfigError("gpus", ": ".join([rule, *(reason for reason, _ in self.reasons.most_common(1))]))

    def _layer_seconds(self, layout: Parallel, recompute: str) -> tuple[float, float, dict[bool, Traffic], float]:
        """Predict the seconds of one microbatch in one layer, and in output layer and loss.

        Returns: the layer's forward; its recomputation; its collectives, from ``layer_traffic``; and the forward of
            output layer and loss.
        """
        forward = work_seconds(self.model.layer_work(layout), self.cluster)
        recomputation = work_seconds(self.model.added_work(layout, recompute), self.cluster)
        return (
            forward,
            recomputation,
            layer_traffic(self.model, layout, recompute, self.cluster),
            work_seconds(self.model.last_work(layout), self.cluster),
        )

    def _best(self, layout: Parallel, modes: Sequence[str]) -> Counted:
        """Return the plan for this layout in the first of ``modes`` in which it fits.

        If it fits in none, return the Counted of the last mode, which needs the fewest bytes.
        """
        self.counted += 1
        n = self.batch // (layout.data_parallel_size * layout.micro_batch_size)
        p = layout.pipeline_parallel_size
        # The ranks between rank 1 and the last hold no more than rank 1, which may have more layers than rank 0.
        ranks = sorted({0, min(1, p - 1), p - 1})
        static = {rank: sum(size for _, _, size, _ in _of_all_modes(self.model, layout, rank)) for rank in ranks}
        room = self.cluster.usable_bytes
        sizes: dict[int, int] = {}
        # If not even weights and states fit, only the smallest bytes are wanted, those of the last mode.
        hopeless = max(static.values()) > room
        for recompute in modes[-1:] if hopeless else modes:
            sizes = {
                rank: static[rank] + held_bytes(self.model, layout.stage_axes, recompute, n, rank) for rank in ranks
            }
            if max(sizes.values()) <= room:
                break
        fullest = max(sizes, key=lambda rank: (sizes[rank], -rank))
        if sizes[fullest] > room:
            return Counted(layout, modes[-1], n, fullest, sizes[fullest])
        return Plan(layout, recompute, n, fullest, sizes[fullest], self._seconds(layout, recompute, n))

    def _seconds(self, layout: Parallel, recompute: str, n: int) -> StepSeconds:
        """Predict the seconds of a plan's step.

        Args:
            layout: the plan's layout.
            recompute: the plan's mode of recomputation.
            n: microbatches of the step on one data-parallel rank.
        """
        forward, recomputation, traffic, output_layer = self._times(layout.layer_axes, recompute)
        p, m = layout.pipeline_parallel_size, layout.num_model_chunks
        per_rank = stage_layers(self.model.num_layers, p, m)
        # The slowest rank sets the pace: the one with most layers, or the last one, which has the output layer.
        most_layers = max(per_rank)
        loads = [(most_layers, 0.0), (per_rank[-1], output_layer)] if p > 1 else [(most_layers, output_layer)]
        layers, after_layers = max(loads, key=lambda load: load[0] * 3 * forward + 3 * load[1])
        compute = n * 3 * (layers * forward + after_layers)
        extra = n * layers * recomputation
        # Backward's reductions run beside the matmuls of weights' gradients, which take as long as forward's matmuls.
        # With sharded data parallelism they can't: its collectives have the only queue.
        beside = sum(link.beside for link in traffic.values())
        can_hide = forward if layout.zero_stage < 2 or self.cluster.device.hides_both else 0.0
        not_hidden = max(0.0, beside - can_hide)
        tensor = n * layers * (sum(link.forward + link.backward for link in traffic.values()) + not_hidden)
        pipeline = n * m * pipeline_seconds(self.model, layout, self.cluster)
        bubble = (p - 1) / (n * m) * (compute + extra + tensor)
        elements, of_layer, of_ends, of_experts = rank_parameters(self.model, layout.stage_axes, 0)
        # An expert's bytes are sent among fewer ranks than the rest, which is counted as sending fewer bytes.
        groups = (layout.expert_replicas, layout.expert_ranks), (layout.replicas, layout.tensor_parallel_size)
        seconds_of_experts, seconds_of_rest = (self.cluster.ring_seconds(*group) for group in groups)
        not_sent = 1 - seconds_of_experts / seconds_of_rest if of_experts else 0
        # While a layer waits for collectives on one kind of link, the other kind is free for data parallelism.
        inside = self.cluster.inside_node(layout.replicas, layout.tensor_parallel_size)
        same_link, other_link = traffic[inside], traffic[not inside]
        backward_room = 2 * forward + recomputation + other_link.backward - min(same_link.beside, can_hide)
        sent = of_layer - not_sent * self.model.expert_parameters(layout.layer_axes)
        shards = Shards(sent, of_ends, layers, gradient_size=self.model.states[1].bytes_per_parameter)
        data, hidden = data_seconds(shards, layout, n, (forward + other_link.forward, backward_room), self.cluster)
        stepped = share(elements, layout, layout.zero_stage >= 1, of_experts)
        step = optimizer_seconds(stepped, self.model.states, self.cluster)
        hidden += n * layers * (beside - not_hidden)
        return StepSeconds(compute, extra, tensor, pipeline, data, bubble, step, hidden)


def bill_of(model: PlannedModel, plan: Counted) -> Bill:
    """List everything that the pipeline rank with the highest peak holds at that peak.

    Args:
        model: the planned model.
        plan: a plan, or a layout that doesn't fit, from ``Request.search``; its ``pipeline_rank`` is that rank.
    """
    return rank_bill(model, plan.layout, plan.recompute, plan.num_microbatches, plan.pipeline_rank)
