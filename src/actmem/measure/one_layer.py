"""Measure one transformer layer: build it, run its forward, read the ledger."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from actmem.config import ModelShape
from actmem.layers.context import ContextParallel
from actmem.layers.experts import Routing
from actmem.layers.llama import LlamaLayer
from actmem.layers.transformer import TransformerLayer
from actmem.llama_shape import LlamaShape
from actmem.measure.census import census
from actmem.measure.ledger import SavedTensor, record
from actmem.measure.step_bill import StepBill
from actmem.measure.term_names import llama_term_name, rows_by_term, term_name
from actmem.measure.whole_step import watch_step
from actmem.parallel.groups import TensorParallel
from actmem.recipes import Recompute
from actmem.rows import Row, total


class LedgerMismatch(RuntimeError):
    """The ledger and the census disagree: hooks can't see something that is kept."""


def layer_input(shape: ModelShape | LlamaShape, tp: TensorParallel, device: str, dtype: torch.dtype) -> Tensor:
    """A random input for one layer: ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism."""
    s = shape.seq_length // tp.sequence_parts
    sizes = (s, shape.micro_batch_size, shape.hidden_size)
    return torch.randn(sizes, device=device, dtype=dtype, requires_grad=True)


def layer_rows_of(layer: nn.Module, x: Tensor, name: Callable[[SavedTensor], str] = term_name) -> list[Row]:
    """What ``layer(x)`` keeps for backward, as rows by the paper's terms, or by those of ``name``."""
    with record(layer) as ledger:
        y = layer(x)
    del y
    return rows_by_term(ledger.saved, name)


def measure_layer(
    shape: ModelShape,
    tp: TensorParallel = TensorParallel(),
    recompute: Recompute | str = "none",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> list[Row]:
    """What one layer keeps on this rank: the ledger's rows, confirmed by the census.

    Runs the layer's forward twice.  Raises LedgerMismatch if the two counts disagree.
    """
    layer = TransformerLayer(shape, tp, recompute=recompute, device=device, dtype=dtype)
    return _confirmed(layer, lambda: layer_input(shape, tp, device, dtype), term_name)


def measure_llama(
    shape: LlamaShape,
    tp: TensorParallel = TensorParallel(),
    recompute: Recompute | str = "none",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    routing: Routing = "even",
    context: ContextParallel = ContextParallel(),
) -> list[Row]:
    """The same for one of today's layers.  routing: of its experts, without their router's scores by default."""
    layer = LlamaLayer(shape, tp, recompute=recompute, routing=routing, context=context, device=device, dtype=dtype)
    own = shape.with_sizes(seq_length=layer.seq_length)
    return _confirmed(layer, lambda: layer_input(own, tp, device, dtype), llama_term_name)


def _confirmed(layer: nn.Module, make_input: Callable[[], Tensor], name: Callable[[SavedTensor], str]) -> list[Row]:
    rows = layer_rows_of(layer, make_input(), name)
    counted = census(layer, make_input)
    if counted != total(rows):
        raise LedgerMismatch(f"the ledger holds {total(rows):,} B, the census {counted:,} B")
    return rows


def measure_layer_peak(
    shape: ModelShape,
    tp: TensorParallel = TensorParallel(),
    recompute: Recompute | str = "none",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> StepBill:
    """The bill of one layer's forward and backward, as between two others.

    Its input is the caller's, and so is the gradient of its input at the end.  The gradient of its
    output comes when backward begins, and goes when nothing reads it any more.
    """
    layer = TransformerLayer(shape, tp, recompute=recompute, device=device, dtype=dtype)
    x = layer_input(shape, tp, device, dtype)
    with watch_step(layer, None, x) as bill:
        end = _NextLayer.apply(layer(x))
        end.backward(end.detach())
    return bill


class _NextLayer(torch.autograd.Function):
    """Holds nothing, and gives back a gradient."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        ctx.shape = y.shape
        return y.new_empty(0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.new_empty(ctx.shape)
