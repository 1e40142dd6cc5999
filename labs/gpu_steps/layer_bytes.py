"""Table 2 by the allocator: what one layer holds between forward and backward, counted four ways.

By the formula, by the ledger (what autograd saved), by the bytes that torch asked the GPU's allocator for, and by the
blocks that it got.  A block is a tensor's bytes rounded up to 512, or more where a larger free block was not split.
"""

from typing import Any

import torch

from actmem.config import ModelShape
from actmem.formulas.activations import Configuration, layer_extra_rows, layer_rows
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.measure_layer import layer_input
from actmem.ledger.recorder import record
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.rows import total

#: Term of the states of random-number generators, which torch keeps in the host's memory.
_ON_HOST = "random-number state"


def measure_layer_bytes(
    shape: ModelShape, configuration: Configuration, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Count what one layer saves on this rank, in one configuration of Table 2.

    Args:
        shape: the layer's sizes, unsharded.
        configuration: a row of Table 2.
        device: "cpu" or "cuda".
        dtype: of the weights and the input.

    Returns: a dict with the configuration's "configuration" (its name), "formula" and "tensor_parallel_size", and with
        bytes on the device:
        "predicted_bytes": by formula, with the tensors that the paper leaves out.
        "ledger_bytes": what autograd saved.
        "requested_bytes": what torch requested from the GPU's allocator; None on a CPU.
        "allocated_bytes": the blocks that the allocator gave; None on a CPU.
        "blocks": the number of these blocks; only on a GPU.
        "largest_rounding_bytes": the most bytes by which a block is larger than its tensor; only on a GPU.
    """
    tp = TensorParallel()
    if configuration.tensor_parallel:
        tp = tensor_parallel(sequence_parallel=configuration.sequence_parallel)
    layer = TransformerLayer(shape, tp, recompute=configuration.recompute, device=device, dtype=dtype)
    # Workspaces of the matmul libraries are made once, in the first step.
    output = layer(layer_input(shape, tp, device, dtype))
    output.backward(output.detach())
    del output
    layer.zero_grad()

    x = layer_input(shape, tp, device, dtype)
    with record(layer) as ledger:
        output = layer(x.clone())
    in_ledger = [saved for saved in ledger.tensors if saved.kind != "generator state"]
    del output

    parallel = configuration.parallel(tp.size)
    sizes = shape, parallel, configuration.recompute, dtype.itemsize
    predicted = [row for row in layer_rows(*sizes) + layer_extra_rows(*sizes, device) if row.term != _ON_HOST]
    found: dict[str, Any] = {
        "configuration": configuration.name,
        "formula": configuration.formula(dtype.itemsize),
        "tensor_parallel_size": tp.size,
        "predicted_bytes": total(predicted),
        "ledger_bytes": sum(saved.bytes for saved in in_ledger),
        "requested_bytes": None,
        "allocated_bytes": None,
    }
    if device == "cuda":
        before = _blocks()
        # The output counts if and only if the graph holds it: the next layer would save it as its own input.
        graph = layer(x.clone()).grad_fn
        new = [block for address, block in _blocks().items() if address not in before]
        del graph
        found["requested_bytes"] = sum(requested for requested, _ in new)
        found["allocated_bytes"] = sum(size for _, size in new)
        found["blocks"] = len(new)
        found["largest_rounding_bytes"] = max(size - requested for requested, size in new)
    return found


def _blocks() -> dict[int, tuple[int, int]]:
    """Address of each allocation that is alive: the bytes asked for, and the bytes of its block."""
    torch.cuda.synchronize()
    return {
        block["address"]: (block["requested_size"], block["size"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
