"""Measure what one Llama layer saves for backward."""

from functools import partial

import torch

from actmem.ledger.measure_layer import confirmed_rows, layer_input
from actmem.parallel.groups import TensorParallel
from actmem.recipes import Recompute
from actmem.rows import Row
from actmem_more.context import ContextParallel
from actmem_more.experts import Routing
from actmem_more.llama import LlamaLayer
from actmem_more.llama_shape import LlamaShape


def measure_llama_layer(
    shape: LlamaShape,
    tp: TensorParallel = TensorParallel(),
    recompute: Recompute | str = "none",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    routing: Routing = "even",
    context: ContextParallel = ContextParallel(),
) -> list[Row]:
    """Make a LlamaLayer and an input, run it, and measure what it saves on this rank.

    Args:
        shape: the sizes of the layer, with the whole sequence.
        tp: the tensor-parallel ranks that share the layer; every one of them must call this.
        recompute: what backward recomputes: "none", "selective", "elementwise", "full" or another mode.
        device: the device on which the layer runs.
        dtype: dtype of the weights and the input.
        routing: how tokens choose experts: "learned" by the router's scores, "even" or "one-sided" whatever the scores
            are.
        context: the ranks that share the sequence; every one of them must call this too.

    Returns: a Row for each saved tensor, with the name that the formulas give it.
    Raises: LedgerMismatch if the rows' total isn't the bytes that the forward pass leaves alive (``census``).
    """
    layer = LlamaLayer(shape, tp, recompute=recompute, routing=routing, context=context, device=device, dtype=dtype)
    shape = shape.with_sizes(seq_length=layer.seq_length)
    return confirmed_rows(layer, partial(layer_input, shape, tp, device, dtype))
