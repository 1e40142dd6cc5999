"""What each stored tensor is: its kind, the block it belongs to, and the gradient that reads it.

One table that figures, hover texts and notebooks share.  Formulas know none of this.
"""

from __future__ import annotations

from dataclasses import dataclass

from actmem.config import ModelShape
from actmem.formulas.activations import CORE_ATTENTION_TERMS
from actmem.rows import Row

#: The kinds of tensor, in the order of legends.
KINDS = ("layer-norm input", "input of a linear", "Q, K, V", "softmax", "dropout mask", "GeLU input", "extra")

#: The blocks of the layer, in the order of the forward pass, and rows that the paper leaves out.
BLOCKS = ("layer norms", "attention", "MLP", "extra")


@dataclass(frozen=True)
class Term:
    """One of the 15 tensors.  why: what backward computes from it, in one line."""

    kind: str
    block: str
    why: str


TERMS = {
    "layer-norm 1 input": Term("layer-norm input", "layer norms", "the gradient needs x̂ = (x − mean)/deviation again"),
    "QKV projection input": Term(
        "input of a linear", "attention", "dW = Xᵀ dY for the three projections; they share X"
    ),
    "Q": Term("Q, K, V", "attention", "S = QKᵀ, so dK = dSᵀ Q"),
    "K": Term("Q, K, V", "attention", "S = QKᵀ, so dQ = dS K"),
    "softmax output": Term("softmax", "attention", "dS = P ∘ (dP − sum(dP ∘ P)): P alone, not the scores"),
    "softmax dropout mask": Term("dropout mask", "attention", "dP = mask ∘ dD / (1 − rate)"),
    "softmax dropout output": Term("softmax", "attention", "C = DV, so dV = Dᵀ dC"),
    "V": Term("Q, K, V", "attention", "C = DV, so dD = dC Vᵀ"),
    "attention projection input": Term("input of a linear", "attention", "dW = Cᵀ dY"),
    "attention dropout mask": Term("dropout mask", "attention", "dX = mask ∘ dY / (1 − rate)"),
    "layer-norm 2 input": Term("layer-norm input", "layer norms", "the gradient needs x̂ = (x − mean)/deviation again"),
    "h→4h input": Term("input of a linear", "MLP", "dW = Xᵀ dY"),
    "GeLU input": Term("GeLU input", "MLP", "dZ = gelu′(Z) ∘ dG: the slope is a function of Z"),
    "4h→h input": Term("input of a linear", "MLP", "dW = Gᵀ dY, and G is four times as wide"),
    "MLP dropout mask": Term("dropout mask", "MLP", "dX = mask ∘ dY / (1 − rate)"),
}


def term_of(row: Row) -> Term:
    """What a row's tensor is; a row that the paper leaves out gives its own reason."""
    return TERMS.get(row.term) or Term("extra", "extra", row.extra)


def formula_of(row: Row, shape: ModelShape) -> str:
    """A row's bytes in the paper's letters, such as ``2sbh`` or ``5as²b/t``, worked out from the row.

    Empty for rows that the paper leaves out: they have other letters.
    """
    if row.term not in TERMS:
        return ""
    a, b, h, s = shape.letters()
    letters, unit = ("as²b", a * s * s * b) if row.term in CORE_ATTENTION_TERMS else ("sbh", s * b * h)
    coefficient, rest = divmod(row.bytes * row.split_by, unit)
    if rest:
        return ""
    return f"{'' if coefficient == 1 else coefficient}{letters}{'/t' if row.split_by > 1 else ''}"
