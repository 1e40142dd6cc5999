"""Sharded against unsharded: the same numbers in float64, which exchanges that took, and which gradients were partial."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actmem.config import ConfigError, ModelShape, Parallel, check_layer
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.comms import count_collectives
from actmem.parallel.collectives import all_gather
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import load_dense, reduce_partial_gradients, shard
from actmem_course.bench.measure_communication import FORMS
from actmem_course.judge.compare import grad_of
from actmem_course.ranks import Ranks
from actmem_course.results import ParityResult

#: Beyond rounding in float64; elements of size 1 and less are compared as they are, larger ones by their share.
LARGEST_ERROR = 1e-12


def check_parity(shape: ModelShape, size: int) -> None:
    """Raise ConfigError if the ranks cannot share the layer, or if it is too large to be run whole in float64."""
    check_layer(shape, Parallel(size, sequence_parallel=True))
    a, b, h, s = shape.letters()
    if 12 * h * h + 20 * s * b * h + 4 * a * s * s * b > 2**27:
        raise ConfigError(
            "model shape", "too large for a comparison in float64 on every rank: use tiny, or sizes near it"
        )


def measure_parity(
    shape: ModelShape, ranks: Ranks, on_form: Callable[[str], None] = lambda form: None
) -> list[ParityResult]:
    """This rank's results, a form each.  Every rank must call it.  Without dropout, which draws other numbers on each rank."""
    results = []
    for form, options in FORMS.items():
        on_form(form)
        results.append(_compare(form, tensor_parallel(**options), shape, ranks))
    return results


def _compare(form: str, tp: TensorParallel, shape: ModelShape, ranks: Ranks) -> ParityResult:
    factory: dict[str, Any] = {"dtype": torch.float64, "device": ranks.device}
    torch.manual_seed(7)  # the same weights and input on every rank
    dense = TransformerLayer(shape, p=0.0, **factory)
    for parameter in dense.parameters():  # biases and norms too, or their errors would hide
        torch.nn.init.normal_(parameter, std=0.8 * shape.hidden_size**-0.5)
    full = torch.randn(shape.seq_length, shape.micro_batch_size, shape.hidden_size, **factory)
    layer = TransformerLayer(shape, tp, p=0.0, **factory)
    load_dense(layer, dense.state_dict(), tp)

    def own(tensor: Tensor) -> Tensor:
        """This rank's tokens under sequence parallelism; else all of them."""
        return tensor.chunk(tp.size)[tp.rank] if tp.sequence_parallel else tensor

    x_dense, x = full.clone().requires_grad_(), own(full).clone().requires_grad_()
    # Weights of the loss: every element of the output counts differently, so that mixed-up ranks are found.
    weights = torch.linspace(-1, 1, full.numel(), **factory).view_as(full)
    y_dense = dense(x_dense)
    (y_dense * weights).sum().backward()
    with count_collectives() as forward:
        y = layer(x)
    with count_collectives() as backward:
        (y * own(weights)).sum().backward()

    whole = {name: grad_of(parameter) for name, parameter in dense.named_parameters()}
    wanted = {name: shard(whole[name], getattr(p, "partition_dim", None), tp) for name, p in layer.named_parameters()}
    partial = [name for name, p in layer.named_parameters() if _error(grad_of(p), wanted[name]) > LARGEST_ERROR]
    reduce_partial_gradients(layer, tp)
    pairs = [(grad_of(p), wanted[name]) for name, p in layer.named_parameters()]
    for ours, theirs in ((y.detach(), y_dense.detach()), (grad_of(x), grad_of(x_dense))):
        pairs.append((all_gather(ours, tp) if tp.sequence_parallel else ours, theirs))
    error = max(_error(ours, theirs) for ours, theirs in pairs)
    return ParityResult(
        form, tp.size, tp.rank, error, error <= LARGEST_ERROR, dict(forward.counts), dict(backward.counts), partial
    )


def _error(ours: Tensor, theirs: Tensor) -> float:
    share = (ours - theirs).abs() / theirs.abs().clamp_min(1.0)
    return share.nan_to_num(nan=math.inf, posinf=math.inf).max().item()  # max() of Python's may pass over a NaN
