"""FLOPs of one iteration: equations 7 and 8 of appendix A, and what recomputation actually adds.

Only matmuls count; a multiplication and an addition are one FLOP each.  Attention counts
all s² scores, although the causal mask hides half of them.  ``B`` is the global batch in sequences.
Exact integers.  FLOPs are those of all ranks together, so parallelism doesn't change them.

``forward_operations`` lists a layer's operations with the FLOPs that each computes and the bytes that it moves, which
bound its time from below.  Each is counted alone, as eager code runs it: it reads its inputs from the device's memory
and writes its outputs there.  A fused kernel moves fewer bytes.  Elements have 2 bytes, those of dropout masks 1.
"""

from dataclasses import dataclass
from fractions import Fraction

from actmem.config import ModelShape, Parallel, check_layer, check_size
from actmem.recipes import PAPER_LAYER, Recompute


def layer_matmuls(shape: ModelShape) -> dict[str, int]:
    """Return the FLOPs of each matmul of one layer's forward pass of one microbatch, on all ranks together.

    Returns: a dict from the matmuls, in order, to FLOPs. The keys are "QKV projection", "QKᵀ", "attention over V",
        "attention projection", "h→4h" and "4h→h".
    Source: 2205.05198 appendix A.
    """
    _, b, h, s = shape.letters()
    linear, pairs = 2 * s * b * h * h, 2 * s * s * b * h
    return {
        "QKV projection": 3 * linear,
        "QKᵀ": pairs,
        "attention over V": pairs,
        "attention projection": linear,
        "h→4h": 4 * linear,
        "4h→h": 4 * linear,
    }


def forward_matmuls(shape: ModelShape, global_batch_size: int) -> dict[str, int]:
    """Return the FLOPs of each matmul of one forward pass of the whole model, on all ranks together.

    Args:
        shape: the sizes of the whole model; its micro_batch_size is not read.
        global_batch_size: B, the sequences of one step.

    Returns: a dict to FLOPs, with the keys of ``layer_matmuls`` ("QKV projection" and so on), each summed over all
        layers, and "logits", the output layer's matmul.
    Source: 2205.05198 appendix A.
    """
    B = check_size("global_batch_size", global_batch_size)
    layer = layer_matmuls(shape.with_sizes(micro_batch_size=B))
    logits = 2 * B * shape.seq_length * shape.hidden_size * shape.vocab_size
    return {**{name: flops * shape.num_layers for name, flops in layer.items()}, "logits": logits}


def hardware_flops(shape: ModelShape, global_batch_size: int, recompute: Recompute | str = "none") -> int:
    """Return the FLOPs that all devices run in one iteration: forward, backward (twice forward) and recomputation.

    Backward does not read the output of a recomputed region's last matmul. So "selective" and "full" stop before they
    run it again. "paper-selective" and "paper-full" run it and count it, as the paper's text does.

    Args:
        shape: the sizes of the whole model.
        global_batch_size: B, the sequences of one iteration.
        recompute: a mode of recomputation, or its name, such as "selective".

    Source: 2205.05198 section 5.
    """
    recomputed = PAPER_LAYER.recomputed_matmuls(recompute)
    return sum((3 + (name in recomputed)) * flops for name, flops in forward_matmuls(shape, global_batch_size).items())


def eq7(shape: ModelShape, global_batch_size: int) -> int:
    """Return the model FLOPs of one iteration, forward and backward without recomputation: 72BLsh²(1 + s/6h + v/12hL).

    Args:
        shape: the sizes of the whole model.
        global_batch_size: B, the sequences of one iteration.

    Source: 2205.05198 eq. 7.
    """
    B, L, s, h, v = _letters(shape, global_batch_size)
    return 72 * B * L * s * h * h + 12 * B * L * s * s * h + 6 * B * s * h * v


def eq8(shape: ModelShape, global_batch_size: int) -> int:
    """Return the hardware FLOPs of one iteration with selective recomputation, as printed: 72BLsh²(1 + s/3h + v/12hL).

    This is equation 7 + 12BLs²h, three more forward passes of the core attention. The paper's text speaks of one more
    pass, 4BLs²h: see ``text_selective``.

    Args:
        shape: the sizes of the whole model.
        global_batch_size: B, the sequences of one iteration.

    Source: 2205.05198 eq. 8.
    """
    B, L, s, h, v = _letters(shape, global_batch_size)
    return 72 * B * L * s * h * h + 24 * B * L * s * s * h + 6 * B * s * h * v


def text_selective(shape: ModelShape, global_batch_size: int) -> int:
    """Return the hardware FLOPs with selective recomputation as the paper's text counts them: equation 7 + 4BLs²h.

    Args:
        shape: the sizes of the whole model.
        global_batch_size: B, the sequences of one iteration.

    Source: 2205.05198 appendix A.
    """
    B, L, s, h, _ = _letters(shape, global_batch_size)
    return eq7(shape, B) + 4 * B * L * s * s * h


def layer_overhead(shape: ModelShape, recompute: Recompute | str) -> Fraction:
    """Return the FLOPs of recomputation in one layer as a fraction of the layer's FLOPs without it, 72Bsh² + 12Bs²h.

    Args:
        shape: the sizes of the layer.
        recompute: a mode of recomputation, or its name. "paper-selective" and "paper-full" recompute a region to its
            end, as the paper counts it; "selective" and "full" stop before the region's last matmul.

    Returns: 2s/(72h + 12s) for "selective" and "elementwise", 4s/(72h + 12s) for "paper-selective",
        (16h + 4s)/(72h + 12s) for "full", 1/3 for "paper-full".
    """
    matmuls = layer_matmuls(shape)
    recomputed = sum(matmuls[name] for name in PAPER_LAYER.recomputed_matmuls(recompute))
    return Fraction(recomputed, 3 * sum(matmuls.values()))


def utilisation(flops: int, seconds: float, num_devices: int, peak_flops_per_second: float) -> float:
    """Return the share of the devices' peak rate that a run reached, from 0 to 1: MFU or HFU.

    Args:
        flops: FLOPs of all devices together. ``eq7`` returns those for the model FLOPs utilisation (MFU),
            ``hardware_flops`` those for the hardware FLOPs utilisation (HFU).
        seconds: how long the devices took for these FLOPs.
        num_devices: how many devices took part.
        peak_flops_per_second: the highest rate of one device, such as ``A100_FLOPS_PER_SECOND``.

    Source: 2205.05198 section 6.3.
    """
    return flops / (seconds * num_devices * peak_flops_per_second)


def _letters(shape: ModelShape, global_batch_size: int) -> tuple[int, int, int, int, int]:
    B = check_size("global_batch_size", global_batch_size)
    return B, shape.num_layers, shape.seq_length, shape.hidden_size, shape.vocab_size


#: FLOPs for each element of an operation that is no matmul.  By convention they are what the formula asks for; an
#: exponential or a tanh counts as one.
_PER_ELEMENT = {"layer norm": 7, "softmax": 5, "dropout": 2, "dropout and sum": 3, "GeLU": 8}

#: Highest 16-bit rate of one A100, on which the paper took all times (section 6).
A100_FLOPS_PER_SECOND = 312 * 10**12

#: NVIDIA's data sheet of the A100 with 80 GB (SXM).  The paper names the device and no bandwidth.
A100_BYTES_PER_SECOND = 2_039 * 10**9


@dataclass(frozen=True)
class Operation:
    """One operation of a layer's forward pass on one rank: its work and its memory traffic.

    Attributes:
        name: the operation's name, such as "QKᵀ" or "layer norm 1".
        flops: FLOPs that the operation computes.
        bytes: bytes that the operation reads from and writes to the device's memory.
        matmul: whether the operation is a matmul.
        core: whether the operation is inside the core attention.
    """

    name: str
    flops: int
    bytes: int
    matmul: bool
    core: bool = False

    @property
    def intensity(self) -> Fraction:
        """Arithmetic intensity: FLOPs for each byte moved."""
        return Fraction(self.flops, self.bytes)

    def least_seconds(self, flops_per_second: int, bytes_per_second: int) -> Fraction:
        """Return the least seconds that the operation can take.

        That is the time for its FLOPs at the peak rate or for its bytes at full bandwidth, whichever is longer.

        Args:
            flops_per_second: the device's highest rate, such as ``A100_FLOPS_PER_SECOND``.
            bytes_per_second: the memory's bandwidth, such as ``A100_BYTES_PER_SECOND``.
        """
        return max(Fraction(self.flops, flops_per_second), Fraction(self.bytes, bytes_per_second))

    def bound_by_memory(self, flops_per_second: int, bytes_per_second: int) -> bool:
        """Return whether moving the operation's bytes takes longer than computing its FLOPs.

        Args:
            flops_per_second: the device's highest rate, such as ``A100_FLOPS_PER_SECOND``.
            bytes_per_second: the memory's bandwidth, such as ``A100_BYTES_PER_SECOND``.
        """
        return Fraction(self.bytes, bytes_per_second) > Fraction(self.flops, flops_per_second)


def forward_operations(shape: ModelShape, parallel: Parallel = Parallel()) -> list[Operation]:
    """List the operations of one layer's forward pass on one rank, in order, without its collectives.

    A matmul's FLOPs are those of appendix A divided by t.

    Args:
        shape: the sizes of the layer.
        parallel: how the ranks share the layer; only t and ``sequence_parallel`` are read.

    Raises: ConfigError if t ranks can't share the layer.
    """
    check_layer(shape, parallel)
    a, b, h, s = shape.letters()
    t = parallel.tensor_parallel_size
    # Elements of [s, b, h]: between attention and MLP on this rank, a shard under sequence parallelism; and within
    # these two blocks, all of it.  Elements of the rank's scores.
    outside = s * b * h // parallel.sequence_parts
    inside, scores = s * b * h, a * s * s * b // t

    def elementwise(name: str, kind: str, elements: int, moved_bytes: int, core: bool = False) -> Operation:
        return Operation(name, _PER_ELEMENT[kind] * elements, moved_bytes, False, core)

    matmuls = layer_matmuls(shape)

    def matmul(name: str, moved_elements: int, core: bool = False) -> Operation:
        return Operation(name, matmuls[name] // t, 2 * moved_elements, True, core)

    return [
        elementwise("layer norm 1", "layer norm", outside, 4 * outside),
        matmul("QKV projection", inside + 3 * h * h // t + 3 * inside // t),
        matmul("QKᵀ", 2 * inside // t + scores, True),
        elementwise("softmax", "softmax", scores, 4 * scores, True),
        elementwise("softmax dropout", "dropout", scores, 5 * scores, True),
        matmul("attention over V", scores + 2 * inside // t, True),
        matmul("attention projection", inside // t + h * h // t + inside),
        elementwise("attention dropout and sum", "dropout and sum", outside, 7 * outside),
        elementwise("layer norm 2", "layer norm", outside, 4 * outside),
        matmul("h→4h", inside + 4 * h * h // t + 4 * inside // t),
        elementwise("GeLU", "GeLU", 4 * inside // t, 16 * inside // t),
        matmul("4h→h", 4 * inside // t + 4 * h * h // t + inside),
        elementwise("MLP dropout and sum", "dropout and sum", outside, 7 * outside),
    ]


def least_seconds(operations: list[Operation], flops_per_second: int, bytes_per_second: int) -> Fraction:
    """Return the least seconds that these operations can take, one after the other.

    Args:
        operations: from ``forward_operations``.
        flops_per_second: the device's highest rate, such as ``A100_FLOPS_PER_SECOND``.
        bytes_per_second: the memory's bandwidth, such as ``A100_BYTES_PER_SECOND``.
    """
    return sum((o.least_seconds(flops_per_second, bytes_per_second) for o in operations), Fraction(0))
