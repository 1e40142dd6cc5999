"""What is alive while one layer's forward pass runs: what each operation makes, and what is freed after it.

``layer_peak`` goes on with the backward pass.  A CPU draws a dropout mask as random numbers of 16 bits
each; the mask is applied by a copy.
"""

from __future__ import annotations

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import RNG_STATE_BYTES, layer_extra_rows, layer_rows
from actmem.recipes import PAPER_LAYER, Recompute

QKV_TERMS = ("Q", "K", "V")
#: Bytes of what is alive at one moment, by name.
Alive = dict[str, int]


class LayerForward:
    """One layer on one rank of t.  live: bytes by name; moments: what was alive after each operation."""

    def __init__(
        self, shape: ModelShape, parallel: Parallel, mode: Recompute, element_size: int, device_type: str = "cpu"
    ):
        a, b, h, s = shape.letters()
        t, e = parallel.tensor_parallel_size, element_size
        self.t, self.e, self.sequence_parallel = t, e, parallel.sequence_parallel and t > 1
        self.mode, self.dropped = mode, PAPER_LAYER.dropped(mode)
        self.live: Alive = {}
        self.draws_numbers = device_type == "cpu"
        every = layer_rows(shape, parallel, "none", e) + layer_extra_rows(shape, parallel, "none", e, device_type)
        self.term = {row.term: row.bytes for row in every}
        self.block, self.whole = self.term["layer-norm 1 input"], e * s * b * h
        self.scores, self.mask = self.term["softmax output"], s * s
        self.weight = {
            "QKV": (3 * e * h * h // t, 3 * e * h // t),
            "projection": (e * h * h // t, e * h),
            "h→4h": (4 * e * h * h // t, 4 * e * h // t),
            "4h→h": (4 * e * h * h // t, e * h),
            "layer norm": (e * h, e * h),
        }
        # The layer's input belongs to the layer before it, which keeps it in any case.
        self.live["layer-norm 1 input"] = self.block
        self.live["weights"] = sum(map(sum, self.weight.values())) + sum(self.weight["layer norm"])
        self.moments: list[tuple[str, Alive]] = []

    def make(self, operation: str, name: str, size: int) -> None:
        self.live[name] = size
        self.moments.append((operation, dict(self.live)))

    def free(self, *names: str) -> None:
        for name in names:
            self.live.pop(name, None)

    def forward(self, gone: frozenset[str], to_the_end: bool) -> None:
        """The forward pass.  gone: terms that only its variables hold, so that they go when their last reader is done."""
        free = lambda *names: self.free(*(name for name in names if name in gone))  # noqa: E731
        self.make("causal mask", "causal mask", self.mask)
        self.draw("attention dropout mask")
        self.normalize("1", "QKV projection input")
        free("layer-norm 1 statistics")
        self.column_forward("QKV projection", QKV_TERMS)
        if self.mode.region == "core":
            self.live["random-number state"] = RNG_STATE_BYTES["cpu"]
        self.core()
        free("softmax output", "softmax dropout mask")
        self.make("attention over V", "context", self.term["Q"])
        free("softmax dropout output")
        self.make("heads side by side", "attention projection input", self.term["Q"])
        self.free("context")
        self.row_forward("projection")
        free("attention projection input", *QKV_TERMS)
        self.dropout_forward()
        free("attention dropout mask", "QKV projection input")
        self.make("sum", "layer-norm 2 input", self.block)
        self.draw("MLP dropout mask")
        self.normalize("2", "h→4h input")
        self.free("dropped output")
        free("layer-norm 2 statistics")
        self.column_forward("h→4h", ("GeLU input",))
        self.make("GeLU", "4h→h input", self.term["4h→h input"])
        if to_the_end:
            self.row_forward("4h→h")
            free("GeLU input", "4h→h input")
            self.dropout_forward()
            free("MLP dropout mask")
            self.make("sum", "layer's output", self.block)
            self.free("dropped output")
        self.free("layer's output", "dropped output")
        free("layer-norm 2 input", "h→4h input")

    def normalize(self, number: str, result: str) -> None:
        self.live[f"layer-norm {number} statistics"] = self.term[f"layer-norm {number} statistics"]
        self.make("layer norm", result, self.term[result])

    def column_forward(self, linear: str, results: tuple[str, ...]) -> None:
        if self.sequence_parallel:
            self.make("g: all-gather", "gathered input", self.whole)
        self.live.update({name: self.term[name] for name in results[1:]})
        self.make(linear, results[0], self.term[results[0]])
        self.free("gathered input")

    def row_forward(self, linear: str) -> None:
        self.make(linear, "partial output", self.whole)
        if self.t > 1:
            self.make("f̄ or ḡ", "output without bias", self.block)
        self.make("bias", "output", self.block)
        self.free("partial output", "output without bias")

    def dropout_forward(self) -> None:
        self.make("block dropout", "dropped output", self.block)
        self.free("output")

    def draw(self, mask: str) -> None:
        size = self.term[mask]
        if self.draws_numbers:
            self.make("random numbers, 16 bits each", "random numbers", -(-size // 4) * 8)
        self.make("dropout mask", mask, size)
        self.free("random numbers")

    def core(self) -> None:
        """Softmax, its dropout mask and output; in forward and, where they are dropped, in backward."""
        self.make("causal mask to scores", "mask as scores", self.e * self.mask)
        self.make("QKᵀ", "scores", self.scores)
        self.make("softmax", "softmax output", self.scores)
        self.free("mask as scores", "scores")
        self.draw("softmax dropout mask")
        self.make("softmax dropout", "softmax dropout output", self.scores)
