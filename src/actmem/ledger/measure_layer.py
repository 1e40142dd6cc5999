"""Measure what one layer saves for backward, as rows with the formulas' names, to compare with a prediction."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from actmem.config import ModelShape
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.census import census
from actmem.ledger.recorder import SavedTensor, record
from actmem.ledger.save_sites import kept_as
from actmem.parallel import linear, vocab
from actmem.parallel.groups import TensorParallel
from actmem.recipes import Recompute
from actmem.rows import Row, total

#: Layers name their tensors as they make them (``drop.NamedForward``).  What follows names the others that a ledger
#: sees: those of embedding and loss, of a checkpoint, and of a linear whose input autocast converts, or the plain form
#: gathers, before it is saved.  They are told apart by the running module, the operation and the argument, and never by
#: size, because two different tensors can have the same size.
_LINEARS = ("linear", linear.FUNCTIONS["column_parallel"].__name__)
_LOOKUP, _CROSS_ENTROPY = (vocab.FUNCTIONS[name].__name__ for name in ("lookup", "cross_entropy"))
_LINEAR_TERMS = {
    "qkv": "QKV projection input", "projection": "attention projection input", "up": "h→4h input", "down": "4h→h input",
    "output": "output layer input",
}  # fmt: skip


class LedgerMismatch(RuntimeError):
    """Error: two counts of a layer's saved bytes disagree, so something stays alive that saved-tensor hooks don't see.

    One count is the ledger's, the sum of the tensors that these hooks see. The other is ``census``, the sum of the
    storages that the forward pass leaves alive.
    """


def layer_input(shape: Any, tp: TensorParallel, device: str, dtype: torch.dtype) -> Tensor:
    """Return a random input for one layer: ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism.

    Args:
        shape: of any model that has ``seq_length``, ``micro_batch_size`` and ``hidden_size``.
        tp: the ranks that share the layer.
        device: the input's device, such as "cpu".
        dtype: the input's dtype.
    """
    s = shape.seq_length // tp.sequence_parts
    sizes = (s, shape.micro_batch_size, shape.hidden_size)
    return torch.randn(sizes, device=device, dtype=dtype, requires_grad=True)


def term_name(saved: SavedTensor) -> str:
    """Return the name that the formulas give to a tensor of the ledger, such as "QKV projection input".

    If the formulas have no name for the tensor, return the ledger's (module, operation and argument). A comparison then
    shows the tensor as not predicted.
    """
    op, last = saved.op, saved.module.rsplit(".", 1)[-1]
    term = saved.term or kept_as(op, saved.argument)
    if term == "log-sum-exp" and not saved.dtype.is_floating_point:
        return "attention seed"  # of a GPU's kernel, and its offset
    if term:
        return term
    if op == _CROSS_ENTROPY:
        return "target ids" if saved.argument else "logits (float32)"
    if op == _LOOKUP:
        return "token ids"
    if op in _LINEARS and last in _LINEAR_TERMS:
        return _LINEAR_TERMS[last]
    if saved.kind == "generator state":
        return "random-number state"
    return saved.name


def rows_by_term(saved: Iterable[SavedTensor]) -> list[Row]:
    """Make a Row of each saved tensor, with the formulas' name for it; several rows may have one name."""
    return [Row(term_name(t), t.bytes, source=f"{t.module or 'layer'}: {t.op}, {t.line}") for t in saved]


def layer_rows_of(layer: nn.Module, x: Tensor) -> list[Row]:
    """Run ``layer(x)`` and return a Row for each tensor that it saves for backward, with the formulas' names."""
    with record(layer) as ledger:
        y = layer(x)
    del y
    return rows_by_term(ledger.saved)


def measure_layer(
    shape: ModelShape,
    tp: TensorParallel = TensorParallel(),
    recompute: Recompute | str = "none",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> list[Row]:
    """Make one of the paper's layers and an input, run it, and measure what it saves on this rank.

    Args:
        shape: the sizes of the layer and of its input.
        tp: the ranks that share the layer; every one of them must call this.
        recompute: what backward recomputes: "none", "selective", "elementwise", "full" or another mode.
        device: the device on which the layer runs.
        dtype: dtype of the weights and the input.

    Returns: a Row for each saved tensor, with the name that the formulas give it.
    Raises: LedgerMismatch if the rows' total isn't the bytes that the forward pass leaves alive (``census``).
    """
    layer = TransformerLayer(shape, tp, recompute=recompute, device=device, dtype=dtype)
    return confirmed_rows(layer, partial(layer_input, shape, tp, device, dtype))


def confirmed_rows(layer: nn.Module, make_input: Callable[[], Tensor]) -> list[Row]:
    """Measure what a layer saves for backward, by two ways of counting that must agree.

    The ledger lists the saved tensors one by one. ``census`` counts the bytes that the forward pass leaves alive.

    Args:
        layer: the layer to run.
        make_input: makes an input for the layer; it is called twice, once for each count.

    Returns: a Row for each saved tensor, with the name that the formulas give it.
    Raises: LedgerMismatch if the two totals disagree.
    """
    rows = layer_rows_of(layer, make_input())
    if (counted := census(layer, make_input)) != total(rows):
        raise LedgerMismatch(f"the ledger holds {total(rows):,} B, the census {counted:,} B")
    return rows
