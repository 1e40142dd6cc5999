"""What each saved tensor is: its kind, the dimension that tensor parallelism shards, and why backward needs it.

Figures, hover texts and notebooks read this table (terms.tsv). The formulas don't need it.
"""

from dataclasses import dataclass

from actmem.config import ModelShape
from actmem.formulas.activations import CORE_ATTENTION_TERMS
from actmem.rows import LAYER_TERMS, Row
from actmem_course.others import table_rows
from actmem_more.llama_shape import LlamaShape

#: The kinds of tensor, in the order of legends.
KINDS = (
    *("layer-norm input", "input of a linear", "latents", "Q, K, V", "softmax", "dropout mask"),
    *("routing", "GeLU input", "extra"),
)


@dataclass(frozen=True)
class Term:
    """One line of terms.tsv: a saved tensor of the paper's layer or of today's.

    Attributes:
        kind: The kind of tensor, one of KINDS, such as "dropout mask"; it decides the colour.
        shared_by: The dimension that tensor parallelism shards: "heads", "width" (the MLP's) or "experts"; "" for none.
        why: A line of text: what backward computes from the tensor.
    """

    kind: str
    shared_by: str = ""
    why: str = ""


TERMS = {line.pop("term"): Term(**line) for line in table_rows("terms.tsv", __package__)}


def term_of(row: Row) -> Term:
    """Return what terms.tsv says about a saved tensor: its kind, how it is sharded, and why backward needs it.

    Args:
        row: The saved tensor. For a tensor that isn't in terms.tsv, because the paper leaves it out, a ``Term`` of kind
            "extra" is returned, whose ``why`` is the row's reason why the paper leaves it out.
    """
    return TERMS.get(row.term) or Term("extra", why=row.extra)


def _widths(shape: LlamaShape) -> dict[str, tuple[str, int]]:
    """Return the elements of a token in each tensor of today's layer, in letters and as a number."""
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
    """Return the formula of a row's bytes in the letters of today's layers, as a text such as ``2sbkd/t``.

    Args:
        row: A saved tensor with its bytes.
        shape: The layer's sizes, with the unsharded sequence.
        ranks: The letter by which a sharded tensor is divided: "t", "c" or "k".

    Returns: the formula; "" for small tensors, such as statistics, that have no such formula.
    """
    letters, width = _widths(shape).get(row.term, ("", 0))
    if not width:
        return ""
    coefficient, rest = divmod(row.bytes * row.split_by, shape.seq_length * shape.micro_batch_size * width)
    if rest:
        return ""
    if row.split_by > 1 and ranks == "k":  # as many ranks as heads
        return f"{coefficient}sb{letters.removeprefix('k')}"
    return f"{coefficient}sb{letters}{f'/{ranks}' if row.split_by > 1 else ''}"


def formula_of(row: Row, shape: ModelShape) -> str:
    """Return the formula of a row's bytes in the paper's letters, as a text such as ``2sbh`` or ``2as²b/t``.

    It is found from the row's bytes and the layer's sizes.

    Args:
        row: A saved tensor with its bytes.
        shape: The layer's sizes.

    Returns: the formula; "" for tensors that the paper leaves out, and for bytes that have no such formula.
    """
    if row.term not in LAYER_TERMS:
        return ""
    a, b, h, s = shape.letters()
    letters, unit = ("as²b", a * s * s * b) if row.term in CORE_ATTENTION_TERMS else ("sbh", s * b * h)
    coefficient, rest = divmod(row.bytes * row.split_by, unit)
    if rest:
        return ""
    return f"{'' if coefficient == 1 else coefficient}{letters}{'/t' if row.split_by > 1 else ''}"
