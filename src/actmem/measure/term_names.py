"""The formulas' term for each saved tensor of our models.

Layers name their tensors as they make them (``drop.Terms``); here is what has no name there: what a ledger sees of the
ends, of a checkpoint, and of a linear that keeps another tensor than it was given.  Identified by the running module, the
operation and the argument; never by size, because two different tensors can have the same size.  A tensor without a rule
keeps the ledger's own name, so the comparison shows it as not predicted.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from actmem import keep
from actmem.measure.ledger import SavedTensor
from actmem.parallel import linear, vocab
from actmem.rows import Row

_COLUMNS = linear.FUNCTIONS["column_parallel"].__name__
_KEEP = keep.FUNCTIONS["keep"].__name__
_LOOKUP, _CROSS_ENTROPY = (vocab.FUNCTIONS[name].__name__ for name in ("lookup", "cross_entropy"))
#: Linears whose input autocast converts, or the plain form gathers, before it is kept.
_LINEAR_TERMS = {
    "qkv": "QKV projection input",
    "projection": "attention projection input",
    "up": "h→4h input",
    "down": "4h→h input",
    "output": "output layer input",
}


def term_name(saved: SavedTensor) -> str:
    """The term that formulas use for this tensor, or a description of it."""
    op, argument, last = saved.op, saved.argument, saved.module.rsplit(".", 1)[-1]
    term = saved.term or (argument if op == _KEEP and not argument.isdigit() else "")  # ``drop`` keeps by name
    if term == "log-sum-exp" and not saved.dtype.is_floating_point:
        return "attention seed"  # of a GPU's kernel, and its offset
    if term:
        return term
    if op == _CROSS_ENTROPY:
        return "target ids" if argument else "logits (float32)"
    if op == _LOOKUP:
        return "token ids"
    if last in _LINEAR_TERMS and op in (_COLUMNS, "linear"):
        return _LINEAR_TERMS[last]
    if op == _KEEP and saved.dtype is torch.uint8:
        return "random-number state"
    return f"{saved.module or 'root'}: {op} {argument}".rstrip()


def rows_by_term(saved: Iterable[SavedTensor]) -> list[Row]:
    """One row for each saved tensor, named as in the formulas."""
    return [Row(term_name(t), t.bytes, source=f"{t.module or 'layer'}: {t.op}, {t.line}") for t in saved]
