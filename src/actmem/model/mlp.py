"""The two-layer MLP, h → 4h → h (2205.05198 figures 4 and 6)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from actmem.config import ModelShape
from actmem.drop import KEEP_ALL, Terms
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import ColumnParallelLinear, RowParallelLinear
from actmem.parallel.weights import child_seed, fresh_seed


class MLP(nn.Module):
    """First linear cut by columns, second by rows, so GeLU between them needs no exchange.

    In and out: ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism.  Keeps, in 16
    bits, its input 2sbh (or 2sbh/t), the GeLU input 8sbh/t and the second linear's input 8sbh/t.
    seed: see ``weights.draw_normal``.  Raises ConfigError if t does not divide 4h.
    Source: 2205.05198 section 4.1.
    """

    def __init__(self, shape: ModelShape, tp: TensorParallel, *, seed: int | None = None, **factory):
        super().__init__()
        h, seed = shape.hidden_size, fresh_seed() if seed is None else seed
        self.up = ColumnParallelLinear(h, 4 * h, tp, seed=child_seed(seed, "up"), **factory)
        self.down = RowParallelLinear(4 * h, h, tp, seed=child_seed(seed, "down"), **factory)

    def forward(self, x: Tensor, terms: Terms = KEEP_ALL) -> Tensor:
        x = terms("GeLU input", self.up, x)
        return self.down(terms("4h→h input", lambda x: F.gelu(x, approximate="tanh"), x))
