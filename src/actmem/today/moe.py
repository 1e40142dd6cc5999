"""Mixture of experts: a router sends each token to κ of E gated MLPs; no token is dropped.

The ranks of the layer share the experts, each whole (see ``dispatch``).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from actmem.drop import KEEP_ALL, Terms
from actmem.llama_shape import LlamaShape
from actmem.parallel.groups import TensorParallel
from actmem.parallel.weights import ParallelModule, child_seed, draw_normal
from actmem.today.dispatch import Dispatch
from actmem.today.expert_ops import expert_columns, expert_rows, routing_weights, to_experts, weighted_swiglu
from actmem.today.gated_mlp import GatedMLP
from actmem.today.replicas import ReplicatedLinear
from actmem.today.sigmoid_router import normalised_weights, sigmoid_weights

#: "even" and "one-sided" ignore the router's scores: every expert alike, or the first κ experts for every token.
Routing = Literal["learned", "even", "one-sided"]


class ExpertMLP(ParallelModule):
    """Σ over a token's κ experts of weight · down(silu(gate(x)) · up(x)), and the shared experts' if there are any.

    In and out: ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism.  routing: see Routing; a
    forced one needs no values, so an emulated rank can run it.  routed_tokens: of the last forward
    pass, the pairs of a token and an expert that this rank's experts took (R).
    """

    def __init__(self, shape: LlamaShape, tp: TensorParallel, *, seed: int, routing: Routing = "learned", **factory):
        super().__init__()
        assert shape.num_experts and shape.experts_per_token
        h, f, held = shape.hidden_size, shape.ffn_hidden_size, shape.num_experts // tp.size
        self.tp, self.routing, self.num_experts, self.taken = tp, routing, shape.num_experts, shape.experts_per_token
        self.routed_tokens = 0
        self.sigmoid = shape.sigmoid_router
        self.router = ReplicatedLinear(h, shape.num_experts, tp, seed=child_seed(seed, "router"), **factory)
        self.gate = nn.Parameter(torch.empty(held, f, h, **factory))
        self.up = nn.Parameter(torch.empty(held, f, h, **factory))
        self.down = nn.Parameter(torch.empty(held, h, f, **factory))
        self.mark_parameters()
        for name in ("gate", "up", "down"):
            draw_normal(getattr(self, name), tp, child_seed(seed, name))
        self.shared = None
        if width := shape.shared_ffn_size:
            self.shared = GatedMLP(h, width, tp, seed=child_seed(seed, "shared"), prefix="shared ", **factory)

    def mark_parameters(self) -> None:
        for parameter in (self.gate, self.up, self.down):
            parameter.partition_dim = 0  # type: ignore[attr-defined]

    def forward(self, x: Tensor, terms: Terms = KEEP_ALL) -> Tensor:
        chosen, weights = terms(("chosen experts", "routing weights"), self.route, x)
        plan = self._plan(chosen)
        self.routed_tokens = sum(plan.by_expert)
        order = terms("dispatch order", _sorted_by_expert, chosen)
        own_weights = terms("dispatched weights", self.to_experts, weights, order, plan)
        gate, up = terms(("gate", "up"), lambda x, order: expert_columns(x, order, plan, self.gate, self.up), x, order)
        y = terms("down input", weighted_swiglu, gate, up, own_weights)
        y = expert_rows(y, order, plan, self.down, x.shape)
        return y if self.shared is None else y + self.shared(x, terms)

    def to_experts(self, weights: Tensor, order: Tensor, plan: Dispatch) -> Tensor:
        """The weights, which add up to 1 for each token, to the ranks of their experts."""
        return to_experts(normalised_weights(weights) if self.sigmoid else weights, order, plan)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts ``[s, b, κ]`` and their weights; of a sigmoid router not yet divided by their sum."""
        scores = self.router(x)
        if self.routing == "learned":
            chosen = scores.detach().topk(self.taken, dim=-1).indices
        else:
            first = torch.arange(x.shape[0] * x.shape[1], device=x.device) * (self.taken * (self.routing == "even"))
            chosen = (first[:, None] + torch.arange(self.taken, device=x.device)) % self.num_experts
            chosen = chosen.view(*x.shape[:2], self.taken)
        return chosen, (sigmoid_weights if self.sigmoid else routing_weights)(scores, chosen)

    def _plan(self, chosen: Tensor) -> Dispatch:
        if self.routing == "learned":
            return Dispatch.of(chosen, self.num_experts, self.tp)
        tokens, experts = chosen.shape[0] * chosen.shape[1], range(self.num_experts)
        each, more = divmod(tokens * self.taken, self.num_experts)
        counts = [each + (e < more) if self.routing == "even" else tokens * (e < self.taken) for e in experts]
        return Dispatch(self.tp, (tuple(counts),) * (self.tp.size if self.tp.sequence_parallel else 1))


def _sorted_by_expert(chosen: Tensor) -> Tensor:
    return chosen.flatten().argsort(stable=True)
