"""The transformer layer as one would write it for a single device, with torch's own checkpoint.

DTensor and FSDP start from it: they cut it, or its weights, without changes to its code.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actmem.config import ModelShape
from actmem.layers.attention import causal_mask
from actmem.recipes import Recompute
from actmem_course.bench.peers import PeerUnavailable


class PlainLayer(nn.Module):
    """x + dropout(attention(norm(x))), then the same with the MLP: ``[s, b, h]`` in and out.

    recompute: "none", "selective" or "full", by ``torch.utils.checkpoint``.  Raises PeerUnavailable for other modes.
    """

    mask: Tensor

    def __init__(self, shape: ModelShape, recompute: str, p: float, **factory):
        super().__init__()
        h = shape.hidden_size
        self.head_size, self.p, self.region = shape.head_size, p, Recompute.of(recompute).region
        if self.region == "terms":
            raise PeerUnavailable("torch.utils.checkpoint runs a region again, not single tensors")
        self.norm1, self.norm2 = nn.LayerNorm(h, **factory), nn.LayerNorm(h, **factory)
        self.qkv, self.projection = nn.Linear(h, 3 * h, **factory), nn.Linear(h, h, **factory)
        self.up, self.down = nn.Linear(h, 4 * h, **factory), nn.Linear(4 * h, h, **factory)
        self.register_buffer("mask", causal_mask(shape.seq_length, factory.get("device") or "cpu"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.region == "layer":
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        x = x + dropout(self.attention(self.norm1(x)), self.p)
        return x + dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), self.p)

    def attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)  # [s, b, 3h/t], a plain tensor
        s, b, _ = qkv.shape
        q, k, v = (part.transpose(0, 1) for part in qkv.view(s, -1, 3, self.head_size).unbind(2))
        if self.region == "core":
            context = checkpoint(self.core, q, k, v, use_reentrant=False)
        else:
            context = self.core(q, k, v)
        return self.projection(context.transpose(0, 1).reshape(s, b, -1))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(self.head_size**-0.5).masked_fill_(self.mask, float("-inf"))
        return torch.bmm(dropout(F.softmax(scores, dim=-1), self.p), v)


def dropout(x: Tensor, p: float) -> Tensor:
    """Dropout with a 1-byte mask; on CPU F.dropout would keep one of the activations' dtype."""
    return torch.native_dropout(x, p, True)[0] if p else x
