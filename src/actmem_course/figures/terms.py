"""What each stored tensor is: its kind, the block it belongs to, and the gradient that reads it.

One table that figures, hover texts and notebooks share.  Formulas know none of this.
"""

from __future__ import annotations

from dataclasses import dataclass

from actmem.config import ModelShape
from actmem.formulas.activations import CORE_ATTENTION_TERMS
from actmem.rows import Row
from actmem_more.llama_shape import LlamaShape

#: The kinds of tensor, in the order of legends.
KINDS = (
    *("layer-norm input", "input of a linear", "latents", "Q, K, V", "softmax", "dropout mask"),
    *("routing", "GeLU input", "extra"),
)

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


_NORM_WHY, _LINEAR_WHY = "the gradient needs x/rms again", "dW = Xᵀ dY"
_NORM, _LINEAR, _ROUTE = "layer-norm input", "input of a linear", "routing"
#: Those of the layers since: a dropped softmax, gates, experts, latents.
TERMS_TODAY = {
    "norm 1 input": Term(_NORM, "layer norms", _NORM_WHY),
    "Q latent": Term("latents", "attention", _NORM_WHY),
    "Q up-projection input": Term(_LINEAR, "attention", _LINEAR_WHY),
    "Q before its norm": Term(_NORM, "attention", _NORM_WHY),
    "KV latent": Term("latents", "attention", _NORM_WHY),
    "KV up-projection input": Term(_LINEAR, "attention", _LINEAR_WHY),
    "K before its norm": Term(_NORM, "attention", _NORM_WHY),
    "attention output before all-to-all": Term(_LINEAR, "attention", "the kernel's gradient reads its own result"),
    "log-sum-exp": Term("softmax", "attention", "the kernel makes the scores' softmax again from it, tile by tile"),
    "norm 2 input": Term(_NORM, "layer norms", _NORM_WHY),
    "gate and up input": Term(_LINEAR, "MLP", "dW = Xᵀ dY for both; they share X"),
    "gate": Term("GeLU input", "MLP", "d up = silu(gate) ∘ dY, and silu′ is a function of gate"),
    "up": Term("GeLU input", "MLP", "d gate = silu′(gate) ∘ up ∘ dY"),
    "down input": Term(_LINEAR, "MLP", _LINEAR_WHY),
    "router input": Term(_LINEAR, "MLP", "dW = Xᵀ dY of the router; the experts' rows are sent again from it"),
    "chosen experts": Term(_ROUTE, "MLP", "which scores a gradient goes to"),
    "routing weights": Term(_ROUTE, "MLP", "the softmax's gradient reads its result"),
    "dispatch order": Term(_ROUTE, "MLP", "where each row goes, and where its gradient comes from"),
    "dispatched weights": Term(_ROUTE, "MLP", "each row was multiplied by its weight"),
    "shared gate": Term("GeLU input", "MLP", "as gate, of the experts that every token takes"),
    "shared up": Term("GeLU input", "MLP", "as up, of the experts that every token takes"),
    "shared down input": Term(_LINEAR, "MLP", _LINEAR_WHY),
    "statistics": Term("extra", "extra", "a number or two for each token, head or query"),
}


def term_of(row: Row) -> Term:
    """What a row's tensor is; a row that the paper leaves out gives its own reason."""
    return TERMS.get(row.term) or TERMS_TODAY.get(row.term) or Term("extra", "extra", row.extra)


def _widths(shape: LlamaShape) -> dict[str, tuple[str, int]]:
    """Elements of a token in each tensor of today's layer, in letters and as a number."""
    hidden = "h", shape.hidden_size
    queries = hidden if shape.query_size == shape.hidden_size else ("ad", shape.query_size)
    keys = "kd", shape.key_value_size
    values, outputs, latents = keys, queries, {}
    if shape.latent is not None:
        queries = keys = "a(n+r)", shape.query_size
        values = outputs = "av", shape.num_attention_heads * shape.value_size
        q, c, r = shape.latent.query_rank, shape.latent.key_value_rank, shape.latent.rope_head_size
        latents = {"Q latent": ("q", q), "KV latent": ("(c+r)", c + r)}
        latents |= {"Q up-projection input": ("q", q), "KV up-projection input": ("c", c)}
    taken = shape.experts_per_token
    wide = ("κf", taken * shape.ffn_hidden_size) if taken else ("f", shape.ffn_hidden_size)
    inputs = ("norm 1 input", "QKV projection input", "norm 2 input", "gate and up input", "router input")
    return {
        **dict.fromkeys(inputs, hidden),
        **dict.fromkeys(("Q", "Q before its norm"), queries),
        **dict.fromkeys(("K", "K before its norm"), keys),
        **latents,
        "V": values,
        **dict.fromkeys(("attention projection input", "attention output before all-to-all"), outputs),
        **dict.fromkeys(("gate", "up", "down input"), wide),
    }


def llama_formula(row: Row, shape: LlamaShape, ranks: str) -> str:
    """A row's bytes in the letters of today's layers, such as ``2sbkd/t``; empty for numbers of tokens and heads.

    shape: with the whole sequence.  ranks: the letter of the ranks that share the layer.
    """
    letters, width = _widths(shape).get(row.term, ("", 0))
    if not width:
        return ""
    coefficient, rest = divmod(row.bytes * row.split_by, shape.seq_length * shape.micro_batch_size * width)
    return "" if rest else f"{coefficient}sb{letters}{f'/{ranks}' if row.split_by > 1 else ''}"


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
