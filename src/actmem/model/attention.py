"""Self-attention with the heads shared among the ranks (2205.05198 figures 3 and 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actmem.config import ModelShape
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import ColumnParallelLinear, RowParallelLinear
from actmem.parallel.rng import DropoutMask, DropoutStreams
from actmem.recompute import checkpoint


def causal_mask(seq_length: int, device: torch.device | str) -> Tensor:
    """``[s, s]`` bool, True where a query may not look: keys after its own position."""
    return torch.ones(seq_length, seq_length, dtype=torch.bool, device=device).triu_(1)


class CoreAttention(nn.Module):
    """The region that selective recomputation drops: QKᵀ, softmax, dropout, attention over V.

    In: q, k, v ``[b·a/t, s, h/a]`` and the mask ``[s, s]``.  Out: ``[b·a/t, s, h/a]``.
    Keeps, in 16 bits, 6sbh/t (Q, K, V) and 5as²b/t (softmax output, dropout mask, dropout
    output).  Source: 2205.05198 section 4.1 and figure 3.
    """

    def __init__(self, head_size: int, p: float, generator: torch.Generator):
        super().__init__()
        self.scale = head_size**-0.5
        self.dropout_mask = DropoutMask(p, generator)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        # -inf is added by the matrix product itself.  Where it is, the softmax output is 0 and so is
        # the gradient of the scores: backward needs no mask, and none is kept.
        hidden = q.new_zeros(mask.shape).masked_fill_(mask, float("-inf"))
        scores = torch.baddbmm(hidden.expand(q.shape[0], -1, -1), q, k.transpose(1, 2), alpha=self.scale)
        weights = F.softmax(scores, dim=-1)  # [b·a/t, s, s]
        return torch.bmm(self.dropout_mask(weights).drop(weights), v)


class SelfAttention(nn.Module):
    """Q, K, V projection by columns (whole heads to each rank), core attention, projection by rows.

    In and out: ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism.  The rows of the
    QKV weight are ordered head by head, ``[a, 3, h/a]``, so that cutting them into t equal
    blocks gives each rank the Q, K and V of the same heads.
    """

    def __init__(self, shape: ModelShape, tp: TensorParallel, p: float, streams: DropoutStreams, recompute: str, **factory):
        super().__init__()
        h = shape.hidden_size
        self.head_size, self.recompute = shape.head_size, recompute
        self.qkv = ColumnParallelLinear(h, 3 * h, tp, **factory)
        # The ranks hold different heads, so their dropout must differ.
        self.core = CoreAttention(shape.head_size, p, streams.sharded)
        self.generator = streams.sharded
        self.projection = RowParallelLinear(h, h, tp, **factory)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        qkv = self.qkv(x)  # [s, b, 3h/t]
        s, b, _ = qkv.shape
        # [s, b·a/t, 3, d]: three views of one tensor, no copy
        q, k, v = (part.transpose(0, 1) for part in qkv.view(s, -1, 3, self.head_size).unbind(2))
        if self.recompute in ("selective", "paper-selective"):
            stop_early = self.recompute == "selective"
            context = checkpoint(self.core, q, k, v, mask, generators=[self.generator], stop_early=stop_early)
        else:
            context = self.core(q, k, v, mask)
        return self.projection(context.transpose(0, 1).reshape(s, b, -1))
