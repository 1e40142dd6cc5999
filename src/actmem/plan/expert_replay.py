"""Replays of ``layers.experts``: router, dispatch and experts, operation by operation, forward and backward.

Experts run one after another, and their outputs or their weights' gradients are joined at the end:
for that moment both the parts and the whole are alive.
"""

from __future__ import annotations

from actmem.config import Parallel
from actmem.formulas.llama_terms import FLOAT32, INDEX
from actmem.llama_shape import LlamaShape
from actmem.plan.replay import Replay

_ARRIVED = "dispatched tokens"


class ExpertReplay:
    """Sizes of the experts of one rank in 16 bits.  routed_tokens (R): pairs of a token and an expert that they take."""

    def __init__(self, shape: LlamaShape, parallel: Parallel, routed_tokens: int):
        h, f, t = shape.hidden_size, shape.ffn_hidden_size, parallel.tensor_parallel_size
        experts, taken = shape.num_experts or 0, shape.experts_per_token or 0
        self.sends = parallel.sequence_parallel and t > 1
        tokens = shape.seq_length * shape.micro_batch_size // (t if self.sends else 1)
        self.pairs, self.routed = tokens * taken, routed_tokens
        self.hidden, self.wide, self.row = 2 * tokens * h, 2 * routed_tokens * f, 2 * h
        self.weight, self.router_weight = 2 * experts // t * h * f, 2 * experts * h
        self.scores, self.token_numbers = 2 * tokens * experts, FLOAT32 * tokens

    def forward(self, r: Replay, keeps_routing: bool) -> None:
        """From "router input" to "down input".  keeps_routing: the choice and its weights are kept, and gate and up."""
        if not keeps_routing:
            self._route(r)
        r.make("numbers of experts, sorted", INDEX * self.pairs)
        r.make("dispatch order", INDEX * self.pairs)
        r.free("numbers of experts, sorted")
        if not keeps_routing:
            self._dispatch(r)
            for name in ("gate", "up"):
                self._products(r, name, self.wide)
            r.free(_ARRIVED)
        self._sent(r, "weights in expert order", FLOAT32)
        r.make("dispatched weights", FLOAT32 * self.routed)
        r.free("weights in expert order")
        r.make("down input", self.wide)

    def _route(self, r: Replay) -> None:
        r.make("scores", self.scores)
        r.make("largest scores", 2 * self.pairs)
        r.make("chosen experts", INDEX * self.pairs)
        r.free("largest scores")
        r.make("scores of the chosen", 2 * self.pairs)
        r.make("the same, float32", FLOAT32 * self.pairs)
        r.free("scores of the chosen")
        r.make("routing weights", FLOAT32 * self.pairs)
        r.free("scores", "the same, float32")

    def _sent(self, r: Replay, result: str, size: int) -> None:
        """Pairs of ``size`` bytes each, sorted, to their experts; a part of all of them where every rank has every token."""
        if not self.sends:
            r.make(result, size * self.pairs)
            return
        r.make("sorted by expert", size * self.pairs)
        r.make("as they arrive", size * self.routed)
        r.make(result, size * self.routed)
        r.free("sorted by expert", "as they arrive")

    def _dispatch(self, r: Replay) -> None:
        """Each token's row once for each of its experts: makes "dispatched tokens"."""
        r.make("row of each pair", self.row * self.pairs)
        if self.sends:
            r.make("sorted by expert", self.row * self.pairs)
            r.free("row of each pair")
            r.make("as they arrive", self.row * self.routed)
            r.make(_ARRIVED, self.row * self.routed)
            r.free("sorted by expert", "as they arrive")
        else:
            r.make(_ARRIVED, self.row * self.pairs)
            r.free("row of each pair")

    def _products(self, r: Replay, result: str, size: int) -> None:
        r.make("outputs of each expert", size)
        r.make(result, size)
        r.free("outputs of each expert")

    def _weight_gradient(self, r: Replay, result: str) -> None:
        r.make("gradients of each expert", self.weight)
        r.make(result, self.weight)
        r.free("gradients of each expert")

    def _sent_back(self, r: Replay, result: str, size: int) -> None:
        """Pairs of ``size`` bytes each from their experts to their tokens, in the tokens' order."""
        if self.sends:
            r.make("sorted by sender", size * self.routed)
            r.make("as they come back", size * self.pairs)
            r.free("sorted by sender")
        else:
            r.make("zeros for other ranks' pairs", size * (self.pairs - self.routed))
            r.make("as they come back", size * self.pairs)
            r.free("zeros for other ranks' pairs")
        r.make(result, size * self.pairs)
        r.free("as they come back")

    def _summed(self, r: Replay, partial: str, result: str, size: int) -> None:
        r.rename(partial, result)  # the ranks add up in place

    def down_and_swiglu(self, r: Replay) -> None:
        """The first part of backward, from the gradient of the output, which stays, to those of gate, up and weights."""
        self._dispatch(r)
        self._products(r, "gradient of the product", self.wide)
        self._weight_gradient(r, "gradient of down")
        r.free(_ARRIVED, "down input", "gradient of down")
        self._swiglu(r)

    def _swiglu(self, r: Replay) -> None:
        wide = self.wide
        for name in ("SiLU", "gradient · SiLU", "gradient · SiLU · up"):
            r.make(name, wide)
        r.free("gradient · SiLU")
        r.make("gradient of the dispatched weights", FLOAT32 * self.routed)
        r.free("gradient · SiLU · up")
        r.make("weights in 16 bits", 2 * self.routed)
        r.make("gradient · weight", wide)
        r.free("weights in 16 bits")
        r.make("gradient · weight · up", wide)
        r.make("gradient of gate", wide)
        r.free("gradient · weight · up")
        r.rename("SiLU", "gradient of up")
        r.free("gradient · weight", "gradient of the product", "gate", "up", "dispatched weights")

    def gate_up_and_router(self, r: Replay) -> None:
        """The rest, which reads "router input": makes "gradient of the block's input"."""
        self._columns(r)
        self._router(r)

    def _columns(self, r: Replay) -> None:
        arrived = self.row * self.routed
        self._dispatch(r)
        self._products(r, "gradient by both weights", arrived)
        self._products(r, "gradient by one weight", arrived)
        r.free("gradient by one weight")
        for name in ("gate", "up"):
            self._weight_gradient(r, f"gradient of {name}'s weight")
        self._sent_back(r, "gradient of each pair's row", self.row)
        r.make("gradient of the tokens, partial", self.hidden)
        r.free("gradient of each pair's row")
        self._summed(r, "gradient of the tokens, partial", "gradient of the tokens", self.hidden)
        r.free(_ARRIVED, "gradient by both weights", "gradient of gate", "gradient of up")
        r.free("gradient of gate's weight", "gradient of up's weight")

    def _router(self, r: Replay) -> None:
        numbers = FLOAT32 * self.pairs
        self._sent_back(r, "gradient of the weights, partial", FLOAT32)
        self._summed(r, "gradient of the weights, partial", "gradient of the routing weights", numbers)
        r.free("gradient of the dispatched weights", "dispatch order")
        r.make("gradient · weights", numbers)
        r.make("its sum", self.token_numbers)
        r.free("gradient · weights")
        r.make("difference", numbers)
        r.free("its sum")
        r.make("gradient of the chosen scores", numbers)
        r.free("difference")
        r.make("gradient of the scores, float32", 2 * self.scores)
        r.make("gradient of the scores", self.scores)
        r.free("gradient of the scores, float32", "gradient of the chosen scores")
        r.free("gradient of the routing weights", "routing weights", "chosen experts")
        r.make("gradient by the router", self.hidden)
        r.make("gradient of the router's weight", self.router_weight)
        r.free("gradient of the scores", "router input")
        r.make("gradient of the block's input", self.hidden)
        r.free("gradient of the tokens", "gradient by the router", "gradient of the router's weight")
