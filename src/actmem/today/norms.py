"""RMSNorm over each token, or over each head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actmem.parallel.groups import TensorParallel
from actmem.parallel.weights import ParallelModule, mark_partial_gradient
from actmem.today.fused import rms_norm


class RMSNorm(ParallelModule):
    """Over the last dimension.  Keeps its input and 4 bytes a token.  Under sequence parallelism its gradient is partial."""

    def __init__(self, size: int, tp: TensorParallel, **factory):
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.ones(size, **factory))
        self.mark_parameters()

    def mark_parameters(self) -> None:
        mark_partial_gradient(self.weight, self.tp)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


class HeadNorm(RMSNorm):
    """Over the d elements of each head, with one weight for all heads.

    Every rank sees its own heads only, so the gradient is partial without sequence parallelism too.
    """

    def mark_parameters(self) -> None:
        self.weight.partial_gradient = self.tp.size > 1  # type: ignore[attr-defined]
