"""The two-layer MLP, h → 4h → h (2205.05198 figures 4 and 6)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from actmem.config import ModelShape
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """First linear by columns, second by rows, so that GeLU between them needs no exchange.

    In and out: ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism.  Keeps, in 16
    bits, its input 2sbh (or 2sbh/t), the GeLU input 8sbh/t and the second linear's input 8sbh/t.
    Source: 2205.05198 section 4.1.
    """

    def __init__(self, shape: ModelShape, tp: TensorParallel, **factory):
        super().__init__()
        h = shape.hidden_size
        self.up = ColumnParallelLinear(h, 4 * h, tp, **factory)
        self.down = RowParallelLinear(4 * h, h, tp, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))
