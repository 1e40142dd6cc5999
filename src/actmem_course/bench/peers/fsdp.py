"""The layer under FSDP2: the alternative, which splits weights and batch but no layer.

Each rank runs whole sequences of its own with the whole layer, whose weights it gathers for
forward, drops, and gathers again for backward.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from actmem.config import ModelShape
from actmem.parallel.groups import TensorParallel
from actmem_course.bench.peers.plain import PlainLayer


def fsdp_layer(
    shape: ModelShape,
    tp: TensorParallel,
    recompute: str = "none",
    *,
    p: float = 0.1,
    device: str = "cpu",
    dtype=torch.float32,
) -> nn.Module:
    """PlainLayer with its parameters sharded over the ranks.  In and out: ``[s, b', h]``, b' sequences of its own.

    Keeps what an uncut layer keeps for b' sequences; t ranks share a microbatch of b if b' = b/t.
    """
    layer = PlainLayer(shape, recompute, p, device=device, dtype=dtype)
    assert tp.group is not None
    fully_shard(layer, mesh=DeviceMesh.from_group(tp.group, device), reshard_after_forward=True)  # in place
    return layer
