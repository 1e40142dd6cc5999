"""Pipelines after 2022 on the paper's models: would they have fitted with nothing recomputed?

By formula: parameters, gradients and Adam (18 bytes a parameter), the layers and both ends of the model.  A real GPU needs
workspaces, communication buffers and room for fragmentation too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actmem.config import check_choice
from actmem.formulas.activations import layer_bytes
from actmem.formulas.schedule import Schedule, held, interleaved, one_forward_one_backward, stage_at
from actmem.formulas.states import state_rows
from actmem.models import PAPER_MODELS, PaperModel
from actmem.rows import total
from actmem_course.others.paper import A100_BYTES
from actmem_course.others.zero_bubble import (
    dual_pipe_v,
    v_half,
    v_min,
    weight_gradient_rows,
    zero_bubble_h1,
    zero_bubble_v,
)


@dataclass(frozen=True)
class PipelineOrder:
    """A schedule for p ranks and n microbatches; how many chunks a rank has, and whether they lie as a V."""

    make: Callable[[int, int], Schedule]
    num_model_chunks: int
    v_shaped: bool = False


ORDERS_BY_NAME = {
    "1F1B": PipelineOrder(one_forward_one_backward, 1),
    "interleaved": PipelineOrder(lambda p, n: interleaved(p, 2, n), 2),
    "short warm-up": PipelineOrder(lambda p, n: interleaved(p, 2, n, short_warmup=True), 2),
    "ZB-H1": PipelineOrder(zero_bubble_h1, 1),
    "ZB-V": PipelineOrder(zero_bubble_v, 2, True),
    "DualPipeV": PipelineOrder(dual_pipe_v, 2, True),
    "V-Half": PipelineOrder(v_half, 2, True),
    "V-Min": PipelineOrder(v_min, 2, True),
}
THE_PAPERS = "the paper's"


@dataclass(frozen=True)
class OrderNeeds:
    """One of the paper's models under one order: bytes that each rank keeps for backward, and bytes that it has for them."""

    model: str
    order: str
    recompute: str
    held: tuple[int, ...]
    free: tuple[int, ...]

    @property
    def fits(self) -> bool:
        """True if every rank has room."""
        return all(held <= free for held, free in zip(self.held, self.free))

    @property
    def tightest(self) -> int:
        """The rank with the least room left."""
        return min(range(len(self.held)), key=lambda rank: self.free[rank] - self.held[rank])


def held_by_ranks(ranks: Schedule, layers: list[int], each: int, waiting: int) -> list[int]:
    """The most bytes that each rank's layers hold.

    layers: of each chunk.  each: bytes that a layer's forward keeps.  waiting: what it keeps between "B" and "W".
    """
    return [
        max(held(actions, lambda action: layers[action.chunk] * each, lambda action: layers[action.chunk] * waiting))
        for actions in ranks
    ]


def order_names(model: str) -> list[str]:
    """The orders that one of the paper's models can run: its own, and with p > 1 those that came later."""
    paper = _paper_model(model)
    p, m = paper.parallel.pipeline_parallel_size, paper.parallel.num_model_chunks
    later = [
        name for name in ORDERS_BY_NAME if name not in ("1F1B", "interleaved") and (m > 1 or name != "short warm-up")
    ]
    return [THE_PAPERS, *(later if p > 1 else [])]


def order_needs(model: str, order: str = THE_PAPERS, recompute: str = "none") -> OrderNeeds:
    """What each rank keeps under an order of ``order_names``, on the paper's own t, p and microbatches.

    Chunks are the paper's m for its own order and the short warm-up, 1 for ZB-H1, 2 on a V (3 layers as 1 and 2).  From "B"
    to "W" a layer keeps ``weight_gradient_rows``, the output layer its input and its output's gradient.
    Raises ConfigError on another name.
    """
    paper = _paper_model(model)
    check_choice("order", order, order_names(model))
    shape, parallel = paper.shape, paper.parallel
    p, t = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    ranks, layers, v_shaped = _laid_out(paper, order)
    each, waiting = layer_bytes(shape, parallel, recompute), total(weight_gradient_rows(shape, parallel))
    (_, b, h, s), v = shape.letters(), shape.vocab_size
    last = p * len(layers) - 1
    most = []
    for rank, actions in enumerate(ranks):
        stages = [stage_at(rank, chunk, p, v_shaped) for chunk in range(len(layers))]
        # With the embedding's mask; the last norm's input, the output layer's and the logits.
        ends = [s * b * h * (stage == 0) + (4 * s * b * h + 4 * s * b * v) * (stage == last) for stage in stages]
        kept = [count * each + end // t for count, end in zip(layers, ends)]
        until_weight = [
            count * waiting + (2 * s * b * h + 2 * s * b * v) * (stage == last) // t
            for count, stage in zip(layers, stages)
        ]
        most.append(max(held(actions, lambda a: kept[a.chunk], lambda a: until_weight[a.chunk])))  # noqa: B023
    free = tuple(A100_BYTES - size for size in _states(paper, v_shaped))
    return OrderNeeds(model, order, recompute, tuple(most), free)


def _paper_model(model: str) -> PaperModel:
    check_choice("model", model, PAPER_MODELS)
    return PAPER_MODELS[model]


def _laid_out(paper: PaperModel, order: str) -> tuple[Schedule, list[int], bool]:
    """Actions of every rank, layers of each chunk, whether on a V."""
    p, m = paper.parallel.pipeline_parallel_size, paper.parallel.num_model_chunks
    of_rank = paper.shape.num_layers // p
    # From 3p microbatches on, each repeats what the rank held before.
    n = min(paper.global_batch_size // paper.shape.micro_batch_size, 3 * p)
    if order == THE_PAPERS and m == 1:
        return one_forward_one_backward(p, n), [of_rank], False
    if order in (THE_PAPERS, "short warm-up"):
        return interleaved(p, m, n, short_warmup=order != THE_PAPERS), [of_rank // m] * m, False
    found = ORDERS_BY_NAME[order]
    layers = [of_rank] if found.num_model_chunks == 1 else [of_rank // 2, of_rank - of_rank // 2]
    return found.make(p, n), layers, found.v_shaped


def _states(paper: PaperModel, v_shaped: bool) -> list[int]:
    """Bytes of parameters and optimizer of each rank; on a V rank 0 has both ends, each with its copy of the embedding."""
    p = paper.parallel.pipeline_parallel_size
    sizes = [total(state_rows(paper.shape, paper.parallel, rank)) for rank in range(p)]
    if not v_shaped:
        return sizes
    between = sizes[1]  # the paper's pipelines have at least 8 ranks
    return [sizes[0] + sizes[-1] - between, *[between] * (p - 1)]
