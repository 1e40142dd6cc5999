"""One of today's layers' backward, operation by operation, as our code runs it: what each makes and frees.

As ``formulas.layer_peak`` for the paper's layer; norms and rotations are in ``fused_replay``.
"""

from __future__ import annotations

from collections.abc import Sequence

from actmem.config import Parallel
from actmem.llama_shape import LlamaShape
from actmem.plan.expert_replay import ExpertReplay
from actmem.plan.fused_replay import WEIGHT_GRADIENT, NormReplay, replay_rotation
from actmem.plan.replay import Replay
from actmem.recipes import Recompute


class LlamaLayerBackward:
    """Sizes of one layer on one rank, in 16 bits.  ``run`` replays the backward pass of the layer in one mode."""

    def __init__(self, shape: LlamaShape, parallel: Parallel, recompute: str, routed_tokens: int = 0):
        s, b, h, f, d = shape.seq_length, shape.micro_batch_size, shape.hidden_size, shape.ffn_hidden_size, shape.d
        self.t = parallel.tensor_parallel_size
        self.gathers = parallel.sequence_parallel and self.t > 1
        cut = self.t if self.gathers else 1
        key_heads = max(shape.num_key_value_heads // self.t, 1)
        self.hidden, self.whole, self.wide = 2 * s * b * h // cut, 2 * s * b * h, 2 * s * b * f // self.t
        self.query, self.key = 2 * s * b * shape.num_attention_heads * d // self.t, 2 * s * b * key_heads * d
        self.table, self.log_sum = 2 * s * d, 2 * self.query // d
        self.norms = [
            NormReplay(f"norm {number} input", f"norm {number} statistics", self.hidden, 4 * s * b // cut, 2 * h)
            for number in (1, 2)
        ]
        self.heads = {"Q": self.query, "K": self.key}
        # By name; a head's statistic is float32.
        self.head_norms = {
            name: NormReplay(f"{name} before its norm", f"{name} norm statistics", size, 2 * size // d, 2 * d)
            for name, size in self.heads.items()
            if shape.qk_norm
        }
        # A weight's gradient has as many bytes as its product's output has for h tokens.
        self.weights = {size: size * h // (s * b) for size in (self.query, self.key, self.wide)}
        self.copies_value = b * key_heads > 1
        self.region = Recompute.of(recompute).region
        self.experts = ExpertReplay(shape, parallel, routed_tokens) if shape.num_experts else None

    def run(self, r: Replay, gradient: str, stays: bool = False) -> None:
        """Backward of the layer whose output's gradient is ``gradient``.  stays: the caller holds it."""
        if self.experts:
            self._expert_mlp(r, self.experts)
        else:
            self._mlp(r, self._entering(r, gradient))
        between = self._norm(r, 2)
        if not stays:
            r.free(gradient)
        self._attention(r, self._entering(r, between))
        self._norm(r, 1)

    def _entering(self, r: Replay, gradient: str) -> str:
        """The gradient as the block's last product takes it."""
        if not self.gathers:
            return gradient
        r.make("gradient, gathered", self.whole)
        return "gradient, gathered"

    def _row_product(self, r: Replay, result: str, size: int, entering: str, *read: str) -> None:
        r.make(result, size)
        r.pass_by("gradient of a weight", self.weights[size])
        r.free(*read, *[entering] * self.gathers)

    def _expert_mlp(self, r: Replay, experts: ExpertReplay) -> None:
        if self.region == "layer":
            self._second_run(r)
        if self.region == "terms":
            experts.forward(r, keeps_routing=True)
        experts.down_and_swiglu(r)
        if self.region == "terms":
            self.norms[1].forward(r, "router input")
        experts.gate_up_and_router(r)

    def _mlp(self, r: Replay, entering: str) -> None:
        if self.region == "layer":
            self._second_run(r)
        if self.region == "terms":
            r.make("down input", self.wide)
        self._row_product(r, "gradient of the product", self.wide, entering, "down input")
        r.make("gradient of SiLU's output", self.wide)
        r.make("gradient of gate", self.wide)
        r.free("gradient of SiLU's output")
        r.make("gradient of up", self.wide)
        r.free("gradient of the product", "gate", "up")
        if self.region == "terms":
            self.norms[1].forward(r, "gate and up input")
        gradients = {"gradient of gate": self.wide, "gradient of up": self.wide}
        self._columns(r, "gate and up input", gradients)

    def _attention(self, r: Replay, entering: str) -> None:
        self._row_product(r, "gradient of the context", self.query, entering)
        if self.region == "terms" and self.head_norms:
            for name in self.heads:
                self._head_again(r, name, keeps_statistics=False)
        r.make("gradient of Q, rotated", self.query)
        r.make("gradient of K, rotated", self.key)
        r.make("gradient of V", self.key)
        r.free("Q", "K", "V", "attention projection input", "log-sum-exp", "gradient of the context")
        for name in ("K", "Q"):
            norm, size = self.head_norms.get(name), self.heads[name]
            turned = f"gradient of {name} after its norm" if norm else f"gradient of {name}"
            replay_rotation(r, f"gradient of {name}, rotated", turned, size, self.table)
            if norm:
                norm.backward(r, turned, f"gradient of {name}")
                r.free(WEIGHT_GRADIENT)
        if self.region == "terms":
            self.norms[0].forward(r, "QKV projection input")
        gradients = {"gradient of Q": self.query, "gradient of K": self.key, "gradient of V": self.key}
        self._columns(r, "QKV projection input", gradients)

    def _columns(self, r: Replay, kept: str, gradients: dict[str, int]) -> None:
        """Column-parallel products of one input: makes "gradient of the block's input"."""
        if self.gathers:
            r.make("linear's input, gathered again", self.whole)
        total = "gradient of the input, partial"
        for number, name in enumerate(gradients):
            self._value_copy(r, name, gradients[name])
            if number == 0:  # the others are added to it in place
                r.make(total, self.whole)
            self._free_copy(r, name)
        if self.gathers:
            r.make("gradient of the block's input", self.hidden)
        for name, size in gradients.items():
            self._value_copy(r, name, size)
            r.make("gradients of weights", self.weights[size])
        self._free_copy(r, list(gradients)[-1])
        r.free(*gradients, kept, "gradients of weights", *["linear's input, gathered again"] * self.gathers)
        if self.gathers:
            r.free(total)
        else:  # the ranks add up in place
            r.rename(total, "gradient of the block's input")

    def _value_copy(self, r: Replay, name: str, size: int) -> None:
        # Attention lays V's gradient out by heads; Q's and K's come out of the rotation in order.
        if name == "gradient of V" and self.copies_value:
            r.make("copy of V's gradient", size)

    def _free_copy(self, r: Replay, name: str) -> None:
        if name == "gradient of V" and self.copies_value:
            r.free("copy of V's gradient")

    def _norm(self, r: Replay, number: int) -> str:
        self.norms[number - 1].backward(r, "gradient of the block's input", "gradient of the norm's input")
        result = f"gradient of the residual stream, {number}"
        r.make(result, self.hidden)
        r.free("gradient of the norm's input", WEIGHT_GRADIENT)
        return result

    def _head_again(self, r: Replay, name: str, keeps_statistics: bool) -> None:
        """Q or K, from what its product made."""
        before = f"{name} before its rotation"
        if norm := self.head_norms.get(name):
            norm.forward(r, before, keeps_statistics)
        replay_rotation(r, before, name, self.heads[name])

    def _gathered(self, r: Replay, outputs: Sequence[tuple[str, int]]) -> None:
        if self.gathers:
            r.make("linear's input, gathered", self.whole)
        for name, size in outputs:
            r.make(name, size)
        if self.gathers:
            r.free("linear's input, gathered")

    def _second_run(self, r: Replay) -> None:
        """All terms again from the layer's input."""
        self.norms[0].forward(r, "QKV projection input", keeps_statistics=True)
        sizes = [(f"{name} before its {'norm' if self.head_norms else 'rotation'}", self.heads[name]) for name in "QK"]
        self._gathered(r, (*sizes, ("V", self.key)))
        for name in self.heads:
            self._head_again(r, name, keeps_statistics=True)
        r.make("attention projection input", self.query)
        r.make("log-sum-exp", self.log_sum)
        r.make("projection, partial", self.whole)
        last = "projection, partial"
        if self.t > 1:
            last = "projection, summed"
            r.make(last, self.hidden)
            r.free("projection, partial")
        r.make("norm 2 input", self.hidden)
        r.free(last)
        if self.experts:
            self.norms[1].forward(r, "router input", keeps_statistics=True)
            self.experts.forward(r, keeps_routing=False)
            return
        self.norms[1].forward(r, "gate and up input", keeps_statistics=True)
        self._gathered(r, (("gate", self.wide), ("up", self.wide)))
        r.make("down input", self.wide)
