"""One layer by its library's name: ours, or one of the peers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actmem.config import ModelShape
from actmem.layers.attention import causal_mask
from actmem.layers.transformer import TransformerLayer
from actmem.parallel.groups import TensorParallel
from actmem_course.peers.megatron import megatron_layer
from actmem_course.peers.plain import dtensor_layer, fsdp_layer

OURS = "ours"
PEERS = {"DTensor": dtensor_layer, "megatron-core": megatron_layer, "FSDP2": fsdp_layer}


class WithMask(nn.Module):
    """Our layer with a causal mask made once, as peers have it and as layers of one model share it."""

    def __init__(self, layer: TransformerLayer, mask: Tensor):
        super().__init__()
        self.layer = layer
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.mask)


def build(
    name: str, shape: ModelShape, tp: TensorParallel, mode: str, device: str, dtype: torch.dtype, p: float = 0.1
) -> nn.Module:
    """The layer of one peer, or ours.  Raises PeerUnavailable, or whatever the peer raises."""
    if name == OURS:
        layer = TransformerLayer(shape, tp, recompute=mode, p=p, device=device, dtype=dtype)
        return WithMask(layer, causal_mask(shape.seq_length, device))
    return PEERS[name](shape, tp, mode, p=p, device=device, dtype=dtype)
