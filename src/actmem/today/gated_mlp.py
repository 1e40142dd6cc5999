"""The gated MLP of today's layer, shared by columns and rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actmem.drop import KEEP_ALL, Terms
from actmem.parallel.conjugates import f_bar, g_bar
from actmem.parallel.groups import TensorParallel
from actmem.parallel.weights import ParallelModule, child_seed, draw_normal
from actmem.today.fused import columns, rows, swiglu


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
            (self.prefix + "gate", self.prefix + "up"), lambda x: columns(x, self.tp, self.gate, self.up), x
        )
        y = terms(self.prefix + "down input", swiglu, gate, up)
        leave = g_bar if self.tp.sequence_parallel else f_bar
        return leave(rows(y, self.down), self.tp)
