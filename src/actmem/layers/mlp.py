"""The paper's MLP, h → 4h → h (2205.05198 figures 4 and 6), and the gated MLP of Llama and its like."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from actmem.config import ModelShape
from actmem.drop import KEEP_ALL, Terms
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import ColumnParallelLinear, RowParallelLinear, column_parallel, row_parallel
from actmem.parallel.weights import ParallelModule, child_seed, draw_normal, fresh_seed


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


class GatedMLP(ParallelModule):
    """silu(gate(x)) · up(x), then down.  Gate and up are cut by columns, down by rows.

    width: of all ranks together.  prefix: before the names of its terms.
    """

    def __init__(self, h: int, width: int, tp: TensorParallel, *, seed: int, prefix: str = "", **factory):
        super().__init__()
        own, self.tp, self.prefix = width // tp.size, tp, prefix
        self.gate = nn.Parameter(torch.empty(own, h, **factory))
        self.up = nn.Parameter(torch.empty(own, h, **factory))
        self.down = nn.Parameter(torch.empty(h, own, **factory))
        self.mark_parameters()
        for name, weight in self.named_parameters():
            draw_normal(weight, tp, child_seed(seed, name))

    def mark_parameters(self) -> None:
        self.gate.partition_dim = self.up.partition_dim = 0  # type: ignore[attr-defined]
        self.down.partition_dim = 1  # type: ignore[attr-defined]

    def forward(self, x: Tensor, terms: Terms = KEEP_ALL) -> Tensor:
        gate, up = terms(
            (self.prefix + "gate", self.prefix + "up"), lambda x: column_parallel(x, self.tp, self.gate, self.up), x
        )
        y = terms(self.prefix + "down input", swiglu, gate, up)
        return row_parallel(y, self.down, self.tp)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up.  Keeps its two inputs, which the two products before it made: nothing of its own."""
    return _SwiGLU.apply(gate, up)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


#: The autograd Functions here, for tools that time or name them.
FUNCTIONS = {"swiglu": _SwiGLU}
