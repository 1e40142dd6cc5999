"""What each operation of a layer's forward pass computes and moves, and the least time for it.

Each operation is counted alone, as eager code runs it: it reads its inputs from the device's memory
and writes its outputs there.  A fused kernel moves less.  Elements have 2 bytes, dropout masks 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from actmem.checks import checked
from actmem.config import ModelShape, Parallel, check_layer

#: FLOPs for each element of an operation that is no matrix product, by convention: what the
#: formula asks for, an exponential or tanh as one.
_PER_ELEMENT = {"layer norm": 7, "softmax": 5, "dropout": 2, "dropout and sum": 3, "GeLU": 8}

#: Highest 16-bit rate of one A100, on which the paper took all times (section 6).
A100_FLOPS_PER_SECOND = 312 * 10**12

#: NVIDIA's data sheet of the A100 with 80 GB (SXM).  The paper names the device and no bandwidth.
A100_BYTES_PER_SECOND = 2_039 * 10**9


@dataclass(frozen=True)
class Operation:
    """One operation on one rank.  product: a matrix product.  core: inside the attention core."""

    name: str
    flops: int
    bytes: int
    product: bool
    core: bool = False

    @property
    def intensity(self) -> Fraction:
        """FLOPs for each byte moved."""
        return Fraction(self.flops, self.bytes)

    def least_seconds(self, flops_per_second: int, bytes_per_second: int) -> Fraction:
        """The longer of computing at the peak rate and moving at full bandwidth."""
        return max(Fraction(self.flops, flops_per_second), Fraction(self.bytes, bytes_per_second))

    def bound_by_memory(self, flops_per_second: int, bytes_per_second: int) -> bool:
        """Whether moving takes longer than computing."""
        return Fraction(self.bytes, bytes_per_second) > Fraction(self.flops, flops_per_second)


@checked
def forward_operations(shape: ModelShape, parallel: Parallel = Parallel()) -> list[Operation]:
    """The forward pass of one layer on one rank, in order, exchanges left out.

    Products: FLOPs as in appendix A, divided by t.  Raises ConfigError if t ranks can't share the layer.
    """
    check_layer(shape, parallel)
    a, b, h, s = shape.letters()
    t = parallel.tensor_parallel_size
    # Elements of a block's input on this rank outside the two blocks, inside them, and of the scores.
    outside = s * b * h // parallel.sequence_parts
    whole, scores = s * b * h, a * s * s * b // t

    def elementwise(name: str, kind: str, elements: int, moved: int, core: bool = False) -> Operation:
        return Operation(name, _PER_ELEMENT[kind] * elements, moved, False, core)

    def linear(name: str, inputs: int, outputs: int, into: int, out_of: int) -> Operation:
        weights = into * out_of // t
        return Operation(name, 2 * s * b * weights, 2 * (inputs + weights + outputs), True)

    attention = 2 * s * s * b * h // t
    return [
        elementwise("layer norm 1", "layer norm", outside, 4 * outside),
        linear("QKV projection", whole, 3 * whole // t, h, 3 * h),
        Operation("QKᵀ", attention, 2 * (2 * whole // t + scores), True, True),
        elementwise("softmax", "softmax", scores, 4 * scores, True),
        elementwise("softmax dropout", "dropout", scores, 5 * scores, True),
        Operation("attention over V", attention, 2 * (scores + 2 * whole // t), True, True),
        linear("attention projection", whole // t, whole, h, h),
        elementwise("attention dropout and sum", "dropout and sum", outside, 7 * outside),
        elementwise("layer norm 2", "layer norm", outside, 4 * outside),
        linear("h→4h", whole, 4 * whole // t, h, 4 * h),
        elementwise("GeLU", "GeLU", 4 * whole // t, 16 * whole // t),
        linear("4h→h", 4 * whole // t, whole, 4 * h, h),
        elementwise("MLP dropout and sum", "dropout and sum", outside, 7 * outside),
    ]


@checked
def least_seconds(operations: list[Operation], flops_per_second: int, bytes_per_second: int) -> Fraction:
    """All of them one after the other."""
    return sum((o.least_seconds(flops_per_second, bytes_per_second) for o in operations), Fraction(0))
