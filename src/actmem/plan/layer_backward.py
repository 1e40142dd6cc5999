"""One paper layer's backward, operation by operation, as our code runs it: what each makes and frees.

Autograd frees what a node saved once the node is done, so what an operation reads and what it makes
are alive together.  A weight's gradient is added to the main gradient and freed at once.  On a CPU a
dropout mask is drawn as 64-bit numbers first; memory inside kernels is in none of this.
"""

from __future__ import annotations

from collections.abc import Callable

from actmem.config import ModelShape, Parallel
from actmem.plan.replay import Replay
from actmem.recipes import Recompute

_QKV = ("Q", "K", "V")


class LayerBackward:
    """Sizes of one layer on one rank, in 16 bits.  ``run`` replays the backward pass of the layer in one mode."""

    def __init__(self, shape: ModelShape, parallel: Parallel, recompute: str, device_type: str):
        a, b, h, s = shape.letters()
        t = parallel.tensor_parallel_size
        self.t, self.gathers = t, parallel.sequence_parallel and t > 1
        self.hidden, self.whole = 2 * s * b * h // (t if self.gathers else 1), 2 * s * b * h
        self.head, self.wide, self.scores = 2 * s * b * h // t, 8 * s * b * h // t, 2 * a * s * s * b // t
        self.square, self.vector = 2 * h * h // t, 2 * h
        self.wide_vector, self.qkv_vector = 8 * h // t, 6 * h // t
        # One rank's context is laid out for the projection already if it has a single head of a single sequence.
        self.copies_context = b * a // t > 1
        tokens = self.hidden // (2 * h)
        self.statistic = (2 if device_type == "cpu" else 4) * tokens
        self.draws = device_type == "cpu"
        self.region = Recompute.of(recompute).region

    def run(self, r: Replay, gradient: str, stays: bool = False) -> str:
        """Backward of the layer whose output's gradient is ``gradient``; the name of its input's.  stays: the caller holds it."""
        if self.region == "layer":
            self._second_run(r)
        between = self._block(r, "MLP", "layer-norm 2", self._mlp)
        if not stays:
            r.free(gradient)
        result = self._block(r, "attention", "layer-norm 1", self._attention)
        r.free(between)
        return result

    def _block(self, r: Replay, block: str, norm: str, inside: Callable[[Replay, str], None]) -> str:
        """x + dropout(block(norm(x))): the gradient of x."""
        mask = f"{block} dropout mask"
        if self.region == "terms":
            self._draw(r, mask, self.hidden // 2)
        r.make("gradient before dropout", self.hidden)
        if self.region in ("terms", "layer"):
            r.free(mask)  # else the node that drew it holds it until backward comes there
        r.pass_by("gradient of a bias", self.vector)
        entering = "gradient before dropout"
        if self.gathers:
            r.make("gradient, gathered", self.whole)
            r.free(entering)
            entering = "gradient, gathered"
        inside(r, entering)
        r.make(f"gradient of {norm}'s input", self.hidden)
        r.make("gradients of a layer norm's weights", 2 * self.vector)
        r.free(f"{norm} input", f"{norm} statistics", "gradient of the block's input")
        result = f"gradient of the residual stream, {block}"
        r.make(result, self.hidden)
        r.free(f"gradient of {norm}'s input", "gradients of a layer norm's weights")
        if self.region not in ("terms", "layer"):
            r.free(mask)
        return result

    def _draw(self, r: Replay, mask: str, elements: int) -> None:
        if self.draws:
            r.make("random numbers", 8 * -(-elements // 4))
        r.make(mask, elements)
        if self.draws:
            r.free("random numbers")

    def _norm_again(self, r: Replay, output: str) -> None:
        r.make(output, self.hidden)
        r.pass_by("statistics made again", 2 * self.statistic)

    def _linear(self, r: Replay, output_gradient: str, kept: str, weights: int, biases: int) -> None:
        """A column-parallel linear: makes "gradient of the block's input"."""
        if self.gathers:
            r.make("linear's input, gathered again", self.whole)
            r.make("gradient of the input, partial", self.whole)
        r.make("gradient of the block's input", self.hidden)
        r.make("gradient of a weight", weights)
        r.make("gradient of a bias", biases)
        r.free(output_gradient, kept, "gradient of a weight", "gradient of a bias")
        if self.gathers:
            r.free("linear's input, gathered again", "gradient of the input, partial")

    def _mlp(self, r: Replay, entering: str) -> None:
        if self.region == "terms":
            r.make("4h→h input", self.wide)
        r.make("gradient of a weight", 4 * self.square)
        r.make("gradient of GeLU's output", self.wide)
        r.free("4h→h input", entering, "gradient of a weight")
        r.make("gradient of GeLU's input", self.wide)
        r.free("GeLU input", "gradient of GeLU's output")
        if self.region == "terms":
            self._norm_again(r, "h→4h input")
        self._linear(r, "gradient of GeLU's input", "h→4h input", 4 * self.square, self.wide_vector)

    def _attention(self, r: Replay, entering: str) -> None:
        r.make("gradient of a weight", self.square)
        r.make("gradient of the context", self.head)
        r.free("attention projection input", entering, "gradient of a weight")
        if self.region in ("core", "terms"):
            self._core(r)
        r.make("gradient of V", self.head)
        r.make("gradient of the dropout's output", self.scores)
        r.free("softmax dropout output", "gradient of the context")
        r.make("gradient of the softmax's output", self.scores)
        r.free("softmax dropout mask", "gradient of the dropout's output")
        r.make("gradient of the scores", self.scores)
        r.free("softmax output", "gradient of the softmax's output")
        for name in ("gradient of Q", "gradient of K"):
            r.make(f"{name}, unscaled", self.head)
            r.make(name, self.head)
            r.free(f"{name}, unscaled")
        r.free(*_QKV, "gradient of the scores")
        r.make("gradient of Q, K, V", 3 * self.head)
        r.free("gradient of Q", "gradient of K", "gradient of V")
        if self.region == "terms":
            self._norm_again(r, "QKV projection input")
        self._linear(r, "gradient of Q, K, V", "QKV projection input", 3 * self.square, self.qkv_vector)

    def _core(self, r: Replay) -> None:
        """Softmax and its dropout, made (again) from Q and K."""
        r.make("scores", self.scores)
        r.make("softmax output", self.scores)
        r.free("scores")
        self._draw(r, "softmax dropout mask", self.scores // 2)
        r.make("softmax dropout output", self.scores)

    def _gathered(self, r: Replay, output: str, size: int) -> None:
        if self.gathers:
            r.make("linear's input, gathered", self.whole)
        r.make(output, size)
        if self.gathers:
            r.free("linear's input, gathered")

    def _second_run(self, r: Replay) -> None:
        """The whole layer again from its input, to the last tensor that backward reads."""
        self._draw(r, "attention dropout mask", self.hidden // 2)
        r.make("QKV projection input", self.hidden)
        r.make("layer-norm 1 statistics", 2 * self.statistic)
        self._gathered(r, "Q", 3 * self.head)
        r.make("K", 0)
        r.make("V", 0)
        self._core(r)
        if self.copies_context:
            r.make("context", self.head)
        r.make("attention projection input", self.head)
        if self.copies_context:
            r.free("context")
        r.make("projection, partial", self.whole)
        summed = ["projection, summed"] * (self.t > 1)
        for name in summed:
            r.make(name, self.hidden)
        r.make("projection with its bias", self.hidden)
        r.free("projection, partial", *summed)
        r.make("projection after dropout", self.hidden)
        r.free("projection with its bias")
        r.make("layer-norm 2 input", self.hidden)
        self._draw(r, "MLP dropout mask", self.hidden // 2)
        r.make("h→4h input", self.hidden)
        r.make("layer-norm 2 statistics", 2 * self.statistic)
        r.free("projection after dropout")
        self._gathered(r, "GeLU input", self.wide)
        r.make("4h→h input", self.wide)
