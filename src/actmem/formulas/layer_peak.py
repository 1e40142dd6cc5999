"""The peak of one layer's forward and backward, to the byte: what is held, and what the fullest operation adds.

Both passes are written down operation by operation: what each makes, and what is freed after it.
The peak is the fullest moment.  It is that of a layer between two others on a CPU, with dropout:
its input stays, the gradient of its output is freed as soon as nothing reads it, gradients of
weights stay, and what a kernel allocates and frees inside itself does not count.
"""

from __future__ import annotations

from actmem.config import ConfigError, ModelShape, Parallel
from actmem.formulas.activations import RNG_STATE_BYTES
from actmem.formulas.layer_forward import QKV_TERMS, Alive, LayerForward
from actmem.recipes import Recompute
from actmem.rows import Row, total

_STATES = "random-number states before the second run"
_BETWEEN = "backward of the next layer"
GIVEN_GRADIENT = "gradient of the layer's output"
#: Weights; in a stage the mask too, which all layers share; and states of generators, which no operation makes.
_OUTLIVE_THE_LAYER = ("weights", "causal mask", "random-number state", _STATES)


def layer_peak_rows(
    shape: ModelShape, parallel: Parallel = Parallel(), recompute: Recompute | str = "none", element_size: int = 2
) -> list[Row]:
    """Every tensor alive at the layer's peak on one rank of t, by name; their bytes add up to the peak.

    Exchanges are those of NCCL: a gather or a reduce-scatter allocates its result and nothing else.
    Raises ConfigError if t ranks can't share the layer, or on a set of terms: only the named modes are known.
    """
    return max(layer_moments(shape, parallel, recompute, element_size), key=lambda moment: total(moment[1]))[1]


def layer_moments(
    shape: ModelShape, parallel: Parallel = Parallel(), recompute: Recompute | str = "none", element_size: int = 2
) -> list[tuple[str, list[Row]]]:
    """Each operation of one layer's forward and backward pass that makes a tensor, and all tensors alive after it."""
    mode = Recompute.of(recompute)
    if mode.terms is not None:
        raise ConfigError("recompute", "the peak is known for the named modes, not for a set of terms")
    both = LayerBackward(shape, parallel, mode, element_size)
    both.run()
    return [(name, [Row(term, size) for term, size in live.items() if size]) for name, live in both.moments]


class LayerBackward(LayerForward):
    """Forward, and backward after it.  main_gradients: a weight's gradient is added to the main one once its node is done."""

    main_gradients = False

    def stage_moments(self) -> list[Alive]:
        """What is alive in backward as a layer of a stage with main gradients, without what outlives the layer."""
        self.main_gradients = True
        self.run()
        first = [name for name, _ in self.moments].index(_BETWEEN)
        return [
            {name: size for name, size in live.items() if name not in _OUTLIVE_THE_LAYER}
            for _, live in self.moments[first:]
        ]

    def done(self, *gradients: str) -> None:
        """The node that made these gradients of weights is done."""
        if self.main_gradients:
            self.free(*gradients)

    def run(self) -> None:
        whole_layer = self.mode.region == "layer"
        if whole_layer:
            self.live["random-number state"] = 2 * RNG_STATE_BYTES["cpu"]
        statistics = {"layer-norm 1 statistics", "layer-norm 2 statistics"} if whole_layer else frozenset()
        self.forward(self.dropped | statistics, to_the_end=True)
        if "softmax output" not in self.dropped or whole_layer:
            self.free("causal mask")
        self.make(_BETWEEN, GIVEN_GRADIENT, self.block)
        if whole_layer:
            self.live[_STATES] = 2 * RNG_STATE_BYTES["cpu"]
            self.forward(frozenset(), to_the_end=not self.mode.stop_early)
            self.free(_STATES, "causal mask")
        self.mlp()
        self.norm("2", GIVEN_GRADIENT)
        self.attention()
        self.norm("1", "gradient of the middle of the layer")

    def mlp(self) -> None:
        self.row_parallel("MLP dropout mask", "4h→h", "4h→h input", "MLP", make_input="GeLU")
        self.make("backward of GeLU", "gradient of the GeLU input", self.term["GeLU input"])
        self.free("GeLU input", "gradient of the 4h→h input")
        self.column_parallel("h→4h", "h→4h input", "gradient of the GeLU input", "layer-norm 2 statistics")

    def attention(self) -> None:
        self.row_parallel("attention dropout mask", "projection", "attention projection input", "attention")
        if self.mode.region == "core":
            self.live[_STATES] = RNG_STATE_BYTES["cpu"]
        if self.mode.region in ("core", "terms"):
            self.core()
        if self.mode.region == "core" and not self.mode.stop_early:
            self.make("second run of attention over V", "context", self.term["Q"])
        self.free(_STATES, "context")
        self.make("backward of attention over V", "gradient of V", self.term["V"])
        self.make("backward of attention over V", "gradient of the softmax dropout output", self.scores)
        self.free("softmax dropout output", "gradient of the attention projection input")
        self.make("backward of softmax dropout", "gradient of the softmax output", self.scores)
        self.free("softmax dropout mask", "gradient of the softmax dropout output")
        self.make("backward of softmax", "gradient of the scores", self.scores)
        self.free("softmax output", "gradient of the softmax output")
        if self.mode.region == "terms":
            self.free("causal mask")
        for name in ("Q", "K"):
            self.make("backward of QKᵀ", f"gradient of {name}, not scaled", self.term[name])
            self.make("backward of QKᵀ", f"gradient of {name}", self.term[name])
            self.free(f"gradient of {name}, not scaled")
        self.free("gradient of the scores", *QKV_TERMS, "causal mask")
        if self.mode.region == "core":  # that of a whole layer goes with its last tensor
            self.free("random-number state")
        self.make("Q, K and V side by side", "gradient of Q, K and V", sum(self.term[name] for name in QKV_TERMS))
        self.free(*(f"gradient of {name}" for name in QKV_TERMS))
        self.column_parallel("QKV", "QKV projection input", "gradient of Q, K and V", "layer-norm 1 statistics")

    def row_parallel(self, mask: str, linear: str, source: str, block: str, make_input: str = "") -> None:
        """Backward of a block's dropout and of its row-parallel linear."""
        if self.mode.region == "terms":
            self.draw(mask)
        grad = f"gradient of the {block} output"
        self.make(f"backward of {block} dropout", grad, self.block)
        if self.mode.region in ("terms", "layer"):
            self.free(mask)  # else it goes with the node that saved it, further down
        weight, bias = self.weight[linear]
        self.make("sum over the tokens", f"gradient of the {linear} bias", bias)
        self.done(f"gradient of the {linear} bias")
        if self.sequence_parallel:
            self.make("backward of ḡ: all-gather", f"{grad}, gathered", self.whole)
            self.free(grad)
        if make_input and self.mode.region == "terms":
            self.make(f"{make_input} again", source, self.term[source])
        self.make(f"backward of {linear}", f"gradient of the {linear} weight", weight)
        self.make(f"backward of {linear}", f"gradient of the {source}", self.term[source])
        self.free(source, grad, f"{grad}, gathered")
        self.done(f"gradient of the {linear} weight")

    def column_parallel(self, linear: str, source: str, grad: str, statistics: str) -> None:
        """Backward of f or g and its linear, which gathers its input again."""
        if self.mode.region == "terms":
            self.live[source] = self.term[source]
            self.make("layer norm again", f"{statistics}, again", self.term[statistics])
            self.free(f"{statistics}, again")
        if self.sequence_parallel:
            self.make("all-gather again", f"{source}, gathered", self.whole)
        self.make(f"backward of {linear}", f"gradient of the {source}, partial", self.whole)
        if self.sequence_parallel:
            self.make("backward of g: reduce-scatter", f"gradient of the {source}", self.block)
        weight, bias = self.weight[linear]
        self.make(f"backward of {linear}", f"gradient of the {linear} weight", weight)
        self.make("sum over the tokens", f"gradient of the {linear} bias", bias)
        self.free(grad, f"{source}, gathered", source)
        self.done(f"gradient of the {linear} weight", f"gradient of the {linear} bias")
        if self.sequence_parallel:
            self.free(f"gradient of the {source}, partial")

    def norm(self, number: str, residual: str) -> None:
        source = "h→4h input" if number == "2" else "QKV projection input"
        below = "middle of the layer" if number == "2" else "layer's input"
        self.live[f"gradient of layer norm {number}'s weight"], bias = self.weight["layer norm"]
        self.live[f"gradient of layer norm {number}'s bias"] = bias
        self.make("backward of layer norm", f"gradient through layer norm {number}", self.block)
        self.free(f"gradient of the {source}, partial", f"gradient of the {source}", f"layer-norm {number} statistics")
        if number == "2":
            self.free("layer-norm 2 input")
        self.make("sum of two gradients", f"gradient of the {below}", self.block)
        self.free(residual, f"gradient through layer norm {number}")
        self.done(f"gradient of layer norm {number}'s weight", f"gradient of layer norm {number}'s bias")
        if number == "2":
            self.free("MLP dropout mask")
