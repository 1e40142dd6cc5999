"""Measure a part of a model by itself: one layer, or one pipeline rank with all that it has in flight.

For real ranks, and for emulated ones whose neighbours send nothing: random activations replace those that would arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from actmem.config import ModelShape
from actmem.layers.gpt import GPT, ModelPart
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.census import census
from actmem.ledger.recorder import SavedTensor, record
from actmem.ledger.savers import kept_as
from actmem.parallel import linear, vocab
from actmem.parallel.groups import TensorParallel
from actmem.recipes import Recompute
from actmem.rows import Row, merge, total

#: Layers name their tensors as they make them (``drop.Terms``).  What follows names the rest: what a ledger sees of the ends,
#: of a checkpoint, and of a linear whose input autocast converts, or the plain form gathers, before it is kept.  By the
#: running module, the operation and the argument; never by size, because two different tensors can have the same size.
_LINEARS = ("linear", linear.FUNCTIONS["column_parallel"].__name__)
_LOOKUP, _CROSS_ENTROPY = (vocab.FUNCTIONS[name].__name__ for name in ("lookup", "cross_entropy"))
_LINEAR_TERMS = {
    "qkv": "QKV projection input", "projection": "attention projection input", "up": "h→4h input", "down": "4h→h input",
    "output": "output layer input",
}  # fmt: skip


class Sizes(Protocol):
    """What a layer's input needs of a shape."""

    @property
    def seq_length(self) -> int: ...
    @property
    def micro_batch_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...


class LedgerMismatch(RuntimeError):
    """The ledger and the census disagree: hooks can't see something that is kept."""


def layer_input(shape: Sizes, tp: TensorParallel, device: str, dtype: torch.dtype) -> Tensor:
    """A random input for one layer: ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism."""
    s = shape.seq_length // tp.sequence_parts
    sizes = (s, shape.micro_batch_size, shape.hidden_size)
    return torch.randn(sizes, device=device, dtype=dtype, requires_grad=True)


def term_name(saved: SavedTensor) -> str:
    """The term that formulas use for this tensor; one without a rule keeps the ledger's own name, so it shows as not predicted."""
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
    """One row for each saved tensor, named as in the formulas."""
    return [Row(term_name(t), t.bytes, source=f"{t.module or 'layer'}: {t.op}, {t.line}") for t in saved]


def layer_rows_of(layer: nn.Module, x: Tensor) -> list[Row]:
    """What ``layer(x)`` keeps for backward, as rows by the formulas' terms."""
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
    """What one layer keeps on this rank: the ledger's rows, confirmed by the census (``confirmed_rows``)."""
    layer = TransformerLayer(shape, tp, recompute=recompute, device=device, dtype=dtype)
    return confirmed_rows(layer, partial(layer_input, shape, tp, device, dtype))


def confirmed_rows(layer: nn.Module, make_input: Callable[[], Tensor]) -> list[Row]:
    """``layer_rows_of``, confirmed by the census.  Runs the layer twice.  Raises LedgerMismatch if the two counts disagree."""
    rows = layer_rows_of(layer, make_input())
    if (counted := census(layer, make_input)) != total(rows):
        raise LedgerMismatch(f"the ledger holds {total(rows):,} B, the census {counted:,} B")
    return rows


def run_between_others(layer: nn.Module, x: Tensor) -> None:
    """One layer's forward and backward, as between two others.

    The gradient of its output comes when backward begins, and goes when nothing reads it any more.
    """
    end = _NextLayer.apply(layer(x))
    end.backward(end.detach())


class _NextLayer(torch.autograd.Function):
    """Holds nothing, and gives back a gradient."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        ctx.shape = y.shape
        return y.new_empty(0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.new_empty(ctx.shape)


def measure_stage(
    shape: ModelShape,
    tp: TensorParallel,
    chunks: list[range],
    actions: Iterable[tuple[str, int, int]],
    recompute: Recompute | str = "none",
) -> list[Row]:
    """What one pipeline rank of the paper's model keeps after the last of ``actions``, one row for each term.

    chunks: the layers of each of this rank's model chunks.  actions: see ``measure_parts``.
    """
    parts = [GPT(shape, tp, layers=layers, recompute=recompute, dtype=torch.bfloat16) for layers in chunks]
    return measure_parts(parts, [], actions)


def measure_parts(
    parts: Sequence[ModelPart],
    whole_parts: Sequence[ModelPart],
    actions: Iterable[tuple[str, int, int]],
    whole: Collection[tuple[int, int]] = (),
) -> list[Row]:
    """What one rank's model chunks, ``parts``, keep after the last of ``actions``, one row for each term.

    actions: ``(kind, chunk, microbatch)`` in order; "F" runs the chunk's forward, and holds its graph; "B" drops
    that graph.  whole: ``(chunk, microbatch)`` pairs that ``whole_parts`` run (2205.05198 appendix C).
    """
    held: dict[tuple[int, int], tuple[Tensor, list[Row]]] = {}
    for kind, chunk, microbatch in actions:
        if kind == "B":
            del held[chunk, microbatch]
            continue
        part = (whole_parts if (chunk, microbatch) in whole else parts)[chunk]
        with record(part) as ledger:
            output = run_part(part)
        held[chunk, microbatch] = output, rows_by_term(ledger.saved)
    return merge(row for _, rows in held.values() for row in rows)


def run_part(part: ModelPart) -> Tensor:
    """The part's output for random input, or the loss if it has the model's last layer."""
    sizes = part.shape.micro_batch_size, part.shape.seq_length
    ids = lambda: torch.randint(0, part.shape.vocab_size, sizes)  # noqa: E731
    y = part(ids() if part.is_first else layer_input(part.shape, part.tp, "cpu", torch.bfloat16))
    return part.loss(y, ids()) if part.is_last else y
