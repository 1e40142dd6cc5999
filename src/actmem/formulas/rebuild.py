"""What it costs to recompute each stored tensor from those stored before it: bytes against FLOPs.

Only matrix products count as FLOPs, as in appendix A; softmax, dropout, GeLU and layer norm cost
none.  The question behind 2205.05198 section 5: which tensors to drop.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from actmem.config import ModelShape
from actmem.formulas.activations import CORE_ATTENTION_TERMS, layer_rows


@dataclass(frozen=True)
class Rebuild:
    """Tensors that are recomputed together.  how: from what, by what.  flops: of its matrix products."""

    name: str
    terms: tuple[str, ...]
    how: str
    bytes: int
    flops: int

    @property
    def bytes_per_flop(self) -> Fraction | None:
        """Bytes freed per FLOP; None if no product runs."""
        return Fraction(self.bytes, self.flops) if self.flops else None


def rebuilds(shape: ModelShape) -> list[Rebuild]:
    """All tensors of a layer except its input, from which the rest is computed; 16 bits, one rank.

    In the order of the forward pass.  Bytes add up to equation 1 without the input's 2sbh,
    FLOPs to the forward pass without the last product, 4h→h, whose output nothing keeps.
    """
    _, b, h, s = shape.letters()
    linear, scores = 2 * s * b * h * h, 2 * s * s * b * h
    groups = (
        ("layer-norm outputs", ("QKV projection input", "h→4h input"), "layer norm of its input", 0),
        ("Q, K, V", ("Q", "K", "V"), "QKV projection", 3 * linear),
        ("attention core", CORE_ATTENTION_TERMS, "QKᵀ, softmax, dropout", scores),
        ("attention output", ("attention projection input",), "attention over V", scores),
        ("middle of the layer", ("layer-norm 2 input",), "attention projection, dropout, sum", linear),
        ("GeLU input", ("GeLU input",), "h→4h", 4 * linear),
        ("GeLU output", ("4h→h input",), "GeLU of its input", 0),
        ("block dropout masks", ("attention dropout mask", "MLP dropout mask"), "draw again", 0),
    )
    sizes = {row.term: row.bytes for row in layer_rows(shape)}
    return [Rebuild(name, terms, how, sum(sizes[term] for term in terms), flops) for name, terms, how, flops in groups]


def core_over_gelu(shape: ModelShape) -> Fraction:
    """Bytes freed per FLOP in the attention core, relative to h→4h: 5a/2.

    (5as²b / 2s²bh) divided by (8sbh / 8sbh²); s and h cancel.
    """
    return Fraction(5 * shape.num_attention_heads, 2)
