"""The layer on torch's own tensor parallelism: DTensor, with a plan of Colwise, Rowwise, SequenceParallel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from actmem.config import ModelShape
from actmem.parallel.groups import TensorParallel
from actmem_course.bench.peers.plain import PlainLayer


def dtensor_layer(
    shape: ModelShape,
    tp: TensorParallel,
    recompute: str = "none",
    *,
    p: float = 0.1,
    device: str = "cpu",
    dtype=torch.float32,
) -> nn.Module:
    """PlainLayer cut by torch's plan.  In and out: plain tensors, ``[s/t, b, h]`` or ``[s, b, h]``.

    Under sequence parallelism it keeps the gathered inputs of both column-parallel linears whole
    (formulas.activations.gathered_input_bytes).
    """
    layer = PlainLayer(shape, recompute, p, device=device, dtype=dtype)
    assert tp.group is not None
    mesh = DeviceMesh.from_group(tp.group, device)
    if not tp.sequence_parallel:
        column, row = ColwiseParallel(), RowwiseParallel()
        parallelize_module(layer, mesh, {"qkv": column, "projection": row, "up": column, "down": row})
        return _filled(layer)
    norm, row = SequenceParallel(sequence_dim=0), RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
    plan = {
        "norm1": norm,
        # The core attention works on plain tensors, each rank on its own heads.
        "qkv": ColwiseParallel(input_layouts=Shard(0)),
        "projection": row,
        "norm2": norm,
        "up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
        "down": row,
    }
    parallelize_module(layer, mesh, plan)
    return _Local(_filled(layer), mesh)


def _filled(layer: PlainLayer) -> PlainLayer:
    """The layer with weights as ours begin: torch scatters its own from rank 0, which an emulated rank is never sent."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if name.endswith("bias"):
                local.zero_()
            elif name.startswith("norm"):
                local.fill_(1)
            else:
                local.normal_(std=0.02)
    return layer


class _Local(nn.Module):
    """Plain shards of the sequence in and out, DTensors inside."""

    def __init__(self, layer: PlainLayer, mesh: DeviceMesh):
        super().__init__()
        self.layer, self.mesh = layer, mesh

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)).to_local()
