"""Weights that ranks hold alike: linears whose result can't be cut, and key and value heads where ranks outnumber them.

With k heads on t > k ranks, t/k neighbouring ranks hold the same head.  Each finds the gradient from
its own query heads; the head's gradient is their sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actmem.checks import ConfigError
from actmem.main_grad import gradient_of
from actmem.parallel.collectives import all_reduce
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import reduce_partial_gradients
from actmem.parallel.weights import ParallelModule, draw_normal, mark_partial_gradient
from actmem.today.fused import rows


def key_value_group(num_key_value_heads: int, tp: TensorParallel) -> TensorParallel:
    """How k heads are cut: into min(t, k) parts, and which of them this rank holds."""
    parts = min(tp.size, num_key_value_heads)
    return TensorParallel(None, parts, tp.rank * parts // tp.size)


def mark_replicas(parameter: nn.Parameter, num_key_value_heads: int, tp: TensorParallel) -> None:
    """Note that dimension 0 is cut into min(t, k) parts."""
    parameter.partition_dim = 0  # type: ignore[attr-defined]
    parameter.partition = key_value_group(num_key_value_heads, tp)  # type: ignore[attr-defined]


def own_part(full: Tensor, parameter: nn.Parameter, tp: TensorParallel) -> Tensor:
    """This rank's part of an unsharded parameter or gradient; all of it if it is replicated."""
    dim, group = getattr(parameter, "partition_dim", None), getattr(parameter, "partition", tp)
    return full if dim is None else full.chunk(group.size, dim=dim)[group.rank]


@torch.no_grad()
def load_whole(module: nn.Module, whole: dict[str, Tensor], tp: TensorParallel) -> None:
    """Copy this rank's part of an unsharded state dict into the module, name by name.

    Raises ConfigError, before anything is copied, unless names and shapes are those of the module.
    """
    parameters = dict(module.named_parameters())
    if wrong := sorted(whole.keys() ^ parameters.keys()):
        raise ConfigError(wrong[0], f"is {'missing' if wrong[0] in parameters else 'no parameter of the module'}")
    parts = {name: own_part(whole[name], parameter, tp) for name, parameter in parameters.items()}
    for name, part in parts.items():
        if part.shape != parameters[name].shape:
            raise ConfigError(name, f"this rank's part must have shape {list(parameters[name].shape)}")
    for name, part in parts.items():
        parameters[name].copy_(part)


@torch.no_grad()
def reduce_all_gradients(module: nn.Module, tp: TensorParallel) -> None:
    """Once an iteration, after backward: sum the gradients that are partial, and those of weights held alike.

    The second takes one all-reduce for each dtype: every rank adds its part to a tensor of zeros for all
    parts, so no further process group is needed.
    """
    reduce_partial_gradients(module, tp)
    alike: dict[torch.dtype, list[tuple[Tensor, TensorParallel]]] = {}
    for parameter in module.parameters():
        group, grad = getattr(parameter, "partition", tp), gradient_of(parameter)
        if group.size < tp.size and grad is not None:
            alike.setdefault(grad.dtype, []).append((grad, group))
    for pairs in alike.values():
        placed = [torch.zeros(group.size, *grad.shape, dtype=grad.dtype, device=grad.device) for grad, group in pairs]
        for zeros, (grad, group) in zip(placed, pairs):
            zeros[group.rank] = grad
        summed = all_reduce(torch.cat([zeros.flatten() for zeros in placed]), tp)
        for part, zeros, (grad, group) in zip(summed.split([zeros.numel() for zeros in placed]), placed, pairs):
            grad.copy_(part.view_as(zeros)[group.rank])


class ReplicatedLinear(ParallelModule):
    """``[s, b, in_features]`` to ``[s, b, out_features]``, alike on every rank: a latent, or a score for each expert.

    Under sequence parallelism of this rank's tokens; the weight's gradient is partial then.  Keeps its input as given.
    """

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel, *, seed: int, **factory):
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **factory))
        self.mark_parameters()
        draw_normal(self.weight, tp, seed)

    def mark_parameters(self) -> None:
        mark_partial_gradient(self.weight, self.tp)

    def forward(self, x: Tensor) -> Tensor:
        return rows(x, self.weight)
