"""FLOPs of one iteration: equations 7 to 9 of appendix A, and what recomputation actually adds.

Only matrix products count; a multiplication and an addition are one FLOP each.  Attention counts
all s² scores, although the causal mask hides half of them.  ``B`` is the global batch in sequences.
Exact integers.  FLOPs are those of all ranks together, so parallelism doesn't change them.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from actmem.checks import checked
from actmem.config import ModelShape, check_size
from actmem.recipes import PAPER_LAYER, Recompute


@dataclass(frozen=True)
class Product:
    """FLOPs of one kind of matrix product over the whole model, in one forward pass."""

    term: str
    flops: int
    source: str


@checked
def forward_products(shape: ModelShape, global_batch_size: int) -> list[Product]:
    """The products of one forward pass over B sequences, in order.  Appendix A."""
    B = check_size("global_batch_size", global_batch_size)
    _, _, h, s = shape.letters()
    layers, v = shape.num_layers, shape.vocab_size
    tokens, pairs = 2 * B * s * layers, 2 * B * s * s * h * layers
    return [
        Product("QKV projection", tokens * 3 * h * h, "6Bsh² a layer"),
        Product("QKᵀ", pairs, "2Bs²h a layer"),
        Product("attention over V", pairs, "2Bs²h a layer"),
        Product("attention projection", tokens * h * h, "2Bsh² a layer"),
        Product("h→4h", tokens * 4 * h * h, "8Bsh² a layer"),
        Product("4h→h", tokens * 4 * h * h, "8Bsh² a layer"),
        Product("logits", 2 * B * s * h * v, "2Bshv"),
    ]


@checked
def recomputed_products(shape: ModelShape, global_batch_size: int, recompute: Recompute | str) -> list[Product]:
    """The products that a mode recomputes in backward.  Section 5.

    Backward does not read the output of a region's last product, so the modes that stop early
    leave that product out; the text of the paper counts it.
    """
    again = PAPER_LAYER.products_again(recompute)
    return [product for product in forward_products(shape, global_batch_size) if product.term in again]


@checked
def hardware_flops(shape: ModelShape, global_batch_size: int, recompute: Recompute | str = "none") -> int:
    """FLOPs that the devices run in one iteration: forward, twice that in backward, recomputation."""
    forward = sum(product.flops for product in forward_products(shape, global_batch_size))
    return 3 * forward + sum(product.flops for product in recomputed_products(shape, global_batch_size, recompute))


@checked
def eq7(shape: ModelShape, global_batch_size: int) -> int:
    """Model FLOPs of one iteration: 72BLsh²(1 + s/6h + v/12hL).  2205.05198 eq. 7."""
    B, L, s, h, v = _letters(shape, global_batch_size)
    return 72 * B * L * s * h * h + 12 * B * L * s * s * h + 6 * B * s * h * v


@checked
def eq8(shape: ModelShape, global_batch_size: int) -> int:
    """Hardware FLOPs with selective recomputation as printed: 72BLsh²(1 + s/3h + v/12hL).

    It adds 12BLs²h, three forward passes of the core attention, where the text names one
    (see ``text_selective``).  2205.05198 eq. 8.
    """
    B, L, s, h, v = _letters(shape, global_batch_size)
    return 72 * B * L * s * h * h + 24 * B * L * s * s * h + 6 * B * s * h * v


@checked
def text_selective(shape: ModelShape, global_batch_size: int) -> int:
    """Hardware FLOPs with selective recomputation as the text counts: equation 7 + 4BLs²h.  Appendix A."""
    B, L, s, h, _ = _letters(shape, global_batch_size)
    return eq7(shape, B) + 4 * B * L * s * s * h


@checked
def eq9(shape: ModelShape) -> Fraction:
    """Hardware over model FLOPs as the paper rounds it: 1 + s/6h.  2205.05198 eq. 9."""
    return 1 + Fraction(shape.seq_length, 6 * shape.hidden_size)


@checked
def layer_overhead(shape: ModelShape, recompute: Recompute | str) -> Fraction:
    """FLOPs that a mode adds to one layer, as a share of the layer's own 72Bsh² + 12Bs²h.

    selective and elementwise 2s/(72h + 12s), paper-selective 4s/(72h + 12s), full
    (16h + 4s)/(72h + 12s), paper-full 1/3.
    """
    _, _, h, s = shape.letters()
    cost = {
        "QKV projection": 6 * h,
        "QKᵀ": 2 * s,
        "attention over V": 2 * s,
        "attention projection": 2 * h,
        "h→4h": 8 * h,
        "4h→h": 8 * h,
    }
    return Fraction(sum(cost[product] for product in PAPER_LAYER.products_again(recompute)), 72 * h + 12 * s)


@checked
def utilisation(flops: int, seconds: float, num_devices: int, peak_flops_per_second: float) -> float:
    """Share of the devices' peak rate, from 0 to 1.

    With equation 7's FLOPs it is the model FLOPs utilisation (MFU), with those that the devices
    ran the hardware FLOPs utilisation (HFU).  Section 6.3.
    """
    return flops / (seconds * num_devices * peak_flops_per_second)


def _letters(shape: ModelShape, global_batch_size: int) -> tuple[int, int, int, int, int]:
    B = check_size("global_batch_size", global_batch_size)
    return B, shape.num_layers, shape.seq_length, shape.hidden_size, shape.vocab_size
