"""Measure one of today's layers by itself."""

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
    """Measure what one of today's layers keeps on this rank: the ledger's rows, confirmed by the census.

    It is ``measure_layer`` for this layer. By default experts run with even routing, which doesn't read the router's
    scores.
    """
    layer = LlamaLayer(shape, tp, recompute=recompute, routing=routing, context=context, device=device, dtype=dtype)
    shape = shape.with_sizes(seq_length=layer.seq_length)
    return confirmed_rows(layer, partial(layer_input, shape, tp, device, dtype))
