"""The layer under FSDP2: the other choice, which shares out weights and batch and cuts no layer.

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
from actmem.peers.plain import PlainLayer


def fsdp_layer(
    shape: ModelShape, tp: TensorParallel, recompute: str = "none", *, p: float = 0.1, device: str = "cpu", dtype=torch.float32
) -> nn.Module:
    """PlainLayer with its parameters sharded over the ranks.  In and out: ``[s, b', h]``, b' sequences of its own.

    Keeps what an uncut layer keeps for b' sequences; t ranks share a microbatch of b if b' = b/t.
    """
    layer = PlainLayer(shape, recompute, p, device=device, dtype=dtype)
    return fully_shard(layer, mesh=DeviceMesh.from_group(tp.group, device), reshard_after_forward=True)
