"""Mixture of experts: a router sends each token to κ of E gated MLPs; no token is dropped.

**Dispatch.** With κ experts a token, sb tokens make sb·κ pairs of a token and an expert. A rank has E/t experts, each
with all of its weights. Under sequence parallelism a rank routes its own tokens: an all-to-all sends each pair's token
to the rank of its expert, and a second one sends the result back. It is the same if more ranks than t share the
experts. Without sequence parallelism every rank has every token, computes the pairs of its own experts, and an
all-reduce adds up the ranks' results. The router decides how many pairs a rank's experts get; this number is R.

**What is not saved**, although a plain implementation saves it: the tokens that arrive at an expert, because backward
sends them again, as sequence parallelism gathers again; the experts' outputs, because the routing weight is multiplied
in before the down matmul; the probabilities of experts that were not chosen.

**DeepSeek-V3's router** (2412.19437 section 2.1.2) weighs the chosen experts by sigmoids of their scores, divided by
their sum. In DeepSeek-V3 a bias that evens out the load, and a choice of 4 of 8 groups, come before the choice of
experts. They change which experts a token takes and no byte that is saved, so they are left out here, and so is the
constant 2.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from actmem.config import check_choice, check_divides, check_size
from actmem.drop import KEEP_ALL, NamedForward
from actmem.keep import differentiates_once
from actmem.parallel.collectives import all_gather, all_reduce
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import as_rows
from actmem.parallel.weights import ParallelModule, child_seed, own_weight
from actmem_more.all_to_all import all_to_all
from actmem_more.llama_modules import GatedMLP, ReplicatedLinear
from actmem_more.llama_shape import LlamaShape

#: How experts are chosen.  "learned" takes those with the best scores.  The others ignore the scores: "even" gives each
#: expert the same number of pairs, "one-sided" sends every token to the first κ experts.
Routing = Literal["learned", "even", "one-sided"]


class ExpertMLP(ParallelModule):
    """A mixture of experts: the sum over a token's κ experts of weight · down(silu(gate(x)) · up(x)).

    If the shape has shared experts, their output is added.

    Args:
        shape: the sizes of the layer; ``num_experts`` must be set.
        tp: the t ranks that share the layer.
        seed: seed from which the weights are drawn, the same on all ranks.
        routing: how tokens choose experts. "learned": by the router's scores. "even": each expert gets the same number
            of tokens. "one-sided": every token goes to the first κ experts. The last two ignore the scores' values, so
            an emulated rank can run them.
        experts: the ranks that share the experts, from ``expert_ranks``; None: the ranks of ``tp``.
        factory: dtype and device of the weights.

    Args of ``forward``: x ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism; ``terms``, the NamedForward of
        the layer's forward pass, which says which tensors are not saved.
    Returns: a tensor of the shape of x.

    Attributes:
        routed_tokens: R, how many pairs of a token and an expert this rank's experts computed in the last forward pass.
    """

    def __init__(
        self,
        shape: LlamaShape,
        tp: TensorParallel,
        *,
        seed: int,
        routing: Routing = "learned",
        experts: TensorParallel | None = None,
        **factory,
    ):
        super().__init__()
        ranks = experts or tp
        check_choice("routing", routing, get_args(Routing))
        assert shape.num_experts and shape.experts_per_token
        h, f, held = shape.hidden_size, shape.ffn_hidden_size, shape.num_experts // ranks.size
        self.ranks, self.routing = ranks, routing
        self.num_experts, self.taken = shape.num_experts, shape.experts_per_token
        self.routed_tokens = 0
        self.sigmoid = shape.sigmoid_router
        self.router = ReplicatedLinear(h, shape.num_experts, tp, seed=child_seed(seed, "router"), **factory)
        self.gate, self.up = (
            own_weight(ranks, child_seed(seed, n), held, f, h, dim=0, **factory) for n in ("gate", "up")
        )
        self.down = own_weight(ranks, child_seed(seed, "down"), held, h, f, dim=0, **factory)
        self.shared = None
        if width := shape.shared_ffn_size:
            self.shared = GatedMLP(h, width, tp, seed=child_seed(seed, "shared"), prefix="shared ", **factory)

    def forward(self, x: Tensor, terms: NamedForward = KEEP_ALL) -> Tensor:
        chosen, weights = terms(("chosen experts", "routing weights"), self.route, x)
        plan = self._plan(chosen)
        self.routed_tokens = sum(plan.by_expert)
        order = terms("dispatch order", _sorted_by_expert, chosen)
        own_weights = terms("dispatched weights", self.to_experts, weights, order, plan)
        columns = lambda x, order: _ExpertColumns.apply(x, order, plan, self.gate, self.up)  # noqa: E731
        gate, up = terms(("gate", "up"), columns, x, order)
        y = terms("down input", _WeightedSwiGLU.apply, gate, up, own_weights)
        y = _ExpertRows.apply(y, order, plan, self.down, x.shape)
        return y if self.shared is None else y + self.shared(x, terms)

    def to_experts(self, weights: Tensor, order: Tensor, plan: Dispatch) -> Tensor:
        """Send each routing weight to the rank of its expert.

        The weights of a sigmoid router are first divided by the sum of each token's weights.

        Args:
            weights: ``[s, b, κ]``, one for each pair of a token and an expert.
            order: ``[s·b·κ]``, the numbers of the pairs, sorted by expert.
            plan: how many pairs go to each expert.

        Returns: ``[R, 1]``, the weights of the pairs that this rank's experts compute, sorted by expert.
        """
        return _ToExperts.apply(weights, order, plan, self.sigmoid)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose κ experts for each token of x ``[s, b, h]``.

        Returns: the chosen experts' numbers ``[s, b, κ]``, and their weights ``[s, b, κ]``. A token's weights add up to
            1 with a softmax router; those of a sigmoid router are not yet divided by their sum.
        """
        scores = self.router(x)
        if self.routing == "learned":
            chosen = scores.detach().topk(self.taken, dim=-1).indices
        else:
            first = torch.arange(x.shape[0] * x.shape[1], device=x.device) * (self.taken * (self.routing == "even"))
            chosen = (first[:, None] + torch.arange(self.taken, device=x.device)) % self.num_experts
            chosen = chosen.view(*x.shape[:2], self.taken)
        top = _ChosenScores.apply(scores, chosen)
        return chosen, top.sigmoid() if self.sigmoid else top.softmax(-1)

    def _plan(self, chosen: Tensor) -> Dispatch:
        if self.routing == "learned":
            return Dispatch.of(chosen, self.num_experts, self.ranks)
        tokens, experts = chosen.shape[0] * chosen.shape[1], range(self.num_experts)
        each, more = divmod(tokens * self.taken, self.num_experts)
        counts = [each + (e < more) if self.routing == "even" else tokens * (e < self.taken) for e in experts]
        return Dispatch(self.ranks, (tuple(counts),) * self.ranks.sequence_parts)


def expert_ranks(size: int) -> TensorParallel:
    """Make the group of ``size`` neighbouring ranks with which this rank shares experts; each rank has its own tokens.

    Every rank of the job must call this function.

    Raises: ConfigError if ``size`` doesn't divide the number of ranks.
    """
    world = dist.get_world_size()
    check_divides("ranks", world, "expert_parallel_size", check_size("expert_parallel_size", size))
    groups = [list(range(first, first + size)) for first in range(0, world, size)]
    return tensor_parallel(dist.new_subgroups_by_enumeration(groups)[0], sequence_parallel=True)


def _sorted_by_expert(chosen: Tensor) -> Tensor:
    return chosen.flatten().argsort(stable=True)


@dataclass(frozen=True)
class Dispatch:
    """Sends tokens to their experts' ranks and back, with the numbers of pairs (token, expert) that each rank sends.

    Attributes:
        tp: the ranks that share the experts.
        counts: for each sending rank, its number of pairs for each of the E experts. One entry for all ranks if they
            have the same tokens.
    """

    tp: TensorParallel
    counts: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(chosen: Tensor, num_experts: int, tp: TensorParallel) -> Dispatch:
        """Count the pairs of a router's choice, all-gather the ranks' counts, and make a Dispatch of them.

        Args:
            chosen: the numbers of each token's experts: ``[s, b, κ]``, or ``[s/t, b, κ]`` under sequence parallelism.
            num_experts: E, experts of the layer.
            tp: the ranks that share the experts.
        """
        # Not bincount: it makes the host wait for a GPU.  ``tolist`` does, once, because the sizes of matmuls and
        # messages are the host's.
        pairs = chosen.flatten()
        own_counts = pairs.new_zeros(num_experts).scatter_add_(0, pairs, torch.ones_like(pairs))
        all_counts = all_gather(own_counts[None], tp) if tp.sequence_parallel else own_counts[None]
        return Dispatch(tp, tuple(tuple(counts) for counts in all_counts.tolist()))

    def _of_rank(self, rank: int) -> slice:
        """Return the slice that a rank's experts take among all experts."""
        held = len(self.counts[0]) // self.tp.size
        return slice(rank * held, (rank + 1) * held)

    @property
    def received(self) -> list[tuple[int, ...]]:
        """Numbers of pairs that arrive at this rank: for each sender a tuple, with one number for each expert here."""
        return [counts[self._of_rank(self.tp.rank)] for counts in self.counts]

    @property
    def by_expert(self) -> list[int]:
        """Numbers of pairs, one for each of this rank's experts, from all senders together."""
        return [sum(of_expert) for of_expert in zip(*self.received)]

    def to_experts(self, pairs: Tensor, order: Tensor) -> Tensor:
        """Send a row for each pair (token, expert) to the rank of the expert.

        Args:
            pairs: ``[s·b·κ, …]``, a row for each pair of this rank's tokens.
            order: ``[s·b·κ]``, the numbers of the pairs, sorted by expert.

        Returns: ``[R, …]``, the rows for this rank's experts, sorted by expert.
        """
        pairs = pairs[order]
        if not self.tp.sequence_parallel:
            return pairs[self._before : self._before + sum(self.by_expert)]
        arrived = all_to_all(pairs, self.tp, [sum(part) for part in self.received], self._sent)
        return _regrouped(arrived, self.received)

    def from_experts(self, rows: Tensor, order: Tensor) -> Tensor:
        """Send each pair's row back from the expert's rank to the token's rank: the inverse of ``to_experts``.

        Without sequence parallelism nothing is sent, and the rows of other ranks' experts are zeros.

        Args:
            rows: ``[R, …]``, sorted by expert, as ``to_experts`` returns them.
            order: ``[s·b·κ]``, the numbers of the pairs, sorted by expert.

        Returns: ``[s·b·κ, …]``, a row for each pair of this rank's tokens.
        """
        if self.tp.sequence_parallel:
            senders = list(zip(*self.received))  # by expert, then by sender
            rows = all_to_all(_regrouped(rows, senders), self.tp, self._sent, [sum(part) for part in self.received])
        else:
            width, after = rows.shape[1:], len(order) - self._before - len(rows)
            rows = torch.cat([rows.new_zeros(self._before, *width), rows, rows.new_zeros(after, *width)])
        back = torch.empty_like(rows)
        back[order] = rows
        return back

    @property
    def _sent(self) -> list[int]:
        """Number of pairs that this rank sends to each rank."""
        return [sum(self.counts[self.tp.rank][self._of_rank(rank)]) for rank in range(self.tp.size)]

    @property
    def _before(self) -> int:
        """Number of pairs of the experts before this rank's, where every rank has all pairs and none is sent."""
        return sum(self.counts[0][: self._of_rank(self.tp.rank).start])


def _regrouped(rows: Tensor, blocks: list[tuple[int, ...]]) -> Tensor:
    """Reorder blocks of rows that lie in groups: the first block of each group, then the second of each, and so on.

    Args:
        rows: ``[R, …]``, the blocks of the first group, then those of the second, and so on.
        blocks: for each group, the number of rows of each of its blocks.
    """
    parts = iter(rows.split([size for group in blocks for size in group]))
    grouped = [[next(parts) for _ in group] for group in blocks]
    return torch.cat([part for turn in zip(*grouped) for part in turn])


def _summed(partial: Tensor, tp: TensorParallel) -> Tensor:
    """Add up the ranks' results; under sequence parallelism return ``partial``, which is complete then."""
    return partial if tp.sequence_parallel else all_reduce(partial, tp, in_place=True)


def _matmuls(rows: Tensor, weights: Tensor, plan: Dispatch) -> Tensor:
    """Multiply each expert's rows by its weight, which is stored transposed as a linear's."""
    return torch.cat([F.linear(part, weight) for part, weight in zip(rows.split(plan.by_expert), weights)])


def _weight_gradients(grads: Tensor, rows: Tensor, plan: Dispatch) -> Tensor:
    pairs = zip(grads.split(plan.by_expert), rows.split(plan.by_expert))
    return torch.stack([grad.t() @ part for grad, part in pairs])


class _ChosenScores(Function):
    """Picks the chosen experts' scores, ``[s, b, κ]`` in float32.

    Saves: the choice. torch.gather would save all scores as well.
    """

    @staticmethod
    def forward(ctx, scores: Tensor, chosen: Tensor) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.scores = scores.shape, scores.dtype
        top = scores.gather(-1, chosen)
        return top if top.dtype is torch.float64 else top.float()

    @staticmethod
    @differentiates_once
    def backward(ctx, grad: Tensor):
        (chosen,) = ctx.saved_tensors
        shape, dtype = ctx.scores
        return grad.new_zeros(shape).scatter_(-1, chosen, grad).to(dtype), None


class _ToExperts(Function):
    """Sends the pairs' weights ``[s, b, κ]`` to the pairs' experts, ``[R, 1]``.

    With ``divided`` it first divides them by each token's sum.
    Saves: the order, and with ``divided`` also its input, which the sigmoid saves too.
    """

    @staticmethod
    def forward(ctx, weights: Tensor, order: Tensor, plan: Dispatch, divided: bool) -> Tensor:
        ctx.plan, ctx.shape = plan, weights.shape
        ctx.save_for_backward(order, weights if divided else None)
        if divided:
            weights = weights / _sum_of_weights(weights)
        return plan.to_experts(weights.reshape(-1, 1), order).clone()

    @staticmethod
    @differentiates_once
    def backward(ctx, grad: Tensor):
        order, weights = ctx.saved_tensors
        grad = _summed(ctx.plan.from_experts(grad, order).view(ctx.shape), ctx.plan.tp)
        if weights is not None:
            sums = _sum_of_weights(weights)
            grad = (grad - (grad * weights).sum(-1, keepdim=True) / sums) / sums
        return grad, None, None, None


class _ExpertColumns(Function):
    """Dispatches the tokens and multiplies them by the experts' weights, each ``[E/t, f, h]``.

    Returns: ``[R, f]`` for each weight.
    Saves: ``x`` as given, and the order.
    """

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, plan: Dispatch, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.shape, ctx.dtype = plan, x.shape, x.dtype
        needs_x, _, _, *needs_weights = ctx.needs_input_grad
        ctx.save_for_backward(x if any(needs_weights) else None, order, *(weights if needs_x else ()))
        arrived = plan.to_experts(_for_each_pair(x, order), order)
        return tuple(_matmuls(arrived, weight, plan) for weight in weights)

    @staticmethod
    @differentiates_once
    def backward(ctx, *grads: Tensor):
        plan: Dispatch = ctx.plan
        x, order, *weights = ctx.saved_tensors
        needs_x, _, _, *needs_weights = ctx.needs_input_grad
        weights = [weight.to(grads[0].dtype) for weight in weights]  # under autocast they have another
        arrived = None if x is None else plan.to_experts(_for_each_pair(x, order).to(grads[0].dtype), order)
        grad_x = None
        if needs_x:
            grad_pairs = _matmuls(grads[0], weights[0].transpose(1, 2), plan)
            for grad, weight in zip(grads[1:], weights[1:]):
                grad_pairs += _matmuls(grad, weight.transpose(1, 2), plan)
        grad_weights = [
            _weight_gradients(grad, arrived, plan) if need and arrived is not None else None
            for grad, need in zip(grads, needs_weights)
        ]
        if needs_x:
            experts_of_token = len(order) * ctx.shape[-1] // ctx.shape.numel()
            back = plan.from_experts(grad_pairs, order).view(-1, experts_of_token, ctx.shape[-1]).sum(1)
            grad_x = _summed(back.view(ctx.shape), plan.tp).to(ctx.dtype)
        return grad_x, None, None, *grad_weights


def _for_each_pair(x: Tensor, order: Tensor) -> Tensor:
    """Repeat each token of ``[s, b, h]`` once for each of its experts: ``[pairs, h]``."""
    tokens = as_rows(x)
    return tokens.repeat_interleave(len(order) // len(tokens), 0)


class _WeightedSwiGLU(Function):
    """Computes weight · silu(gate) · up. Saves the three."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.silu(gate).mul_(up).mul_(weight)

    @staticmethod
    @differentiates_once
    def backward(ctx, grad: Tensor):
        gate, up, weight = ctx.saved_tensors
        silu = F.silu(gate)
        grad_weight = (grad * silu * up).sum(-1, keepdim=True, dtype=weight.dtype)
        grad = grad * weight.to(grad.dtype)
        return torch.ops.aten.silu_backward(grad * up, gate), silu.mul_(grad), grad_weight


class _ExpertRows(Function):
    """Multiplies by the down weights ``[E/t, h, f]``, sends the rows back, and sums over each token's experts.

    Returns: a tensor of shape ``shape``.
    Saves: ``y`` and the order.
    """

    @staticmethod
    def forward(ctx, y: Tensor, order: Tensor, plan: Dispatch, weight: Tensor, shape: torch.Size) -> Tensor:
        ctx.plan, ctx.shape = plan, shape
        needs_y, _, _, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(y if needs_weight else None, order, weight if needs_y else None)
        pairs = plan.from_experts(_matmuls(y, weight, plan), order)
        tokens = shape.numel() // shape[-1]
        return _summed(pairs.view(tokens, -1, shape[-1]).sum(1).view(shape), plan.tp)

    @staticmethod
    @differentiates_once
    def backward(ctx, grad: Tensor):
        plan: Dispatch = ctx.plan
        y, order, weight = ctx.saved_tensors
        arrived = plan.to_experts(_for_each_pair(grad, order), order)
        grad_y = None if weight is None else _matmuls(arrived, weight.to(grad.dtype).transpose(1, 2), plan)
        return grad_y, None, None, None if y is None else _weight_gradients(arrived, y, plan), None


def _sum_of_weights(weights: Tensor) -> Tensor:
    # DeepSeek-V3's constant.  In float32 the sigmoids of scores below -104 are 0, and 0 / 0 would be NaN.
    return weights.sum(-1, keepdim=True).add_(1e-20)
