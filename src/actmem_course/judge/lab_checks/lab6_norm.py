"""Lab 6's gradient norm: each number of the unsharded gradient counts once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actmem.measure.comms import Collective
from actmem.model.gpt import GPT
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import load_dense
from actmem_course.judge.compare import grad_of
from actmem_course.judge.lab_checks.lab6_model import small_shape
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench


def check_gradient_norm(b: Bench) -> str | None:
    shape = small_shape(b)
    dense = GPT(shape, p=0.0, dtype=torch.float64, device=b.device)
    names = {name: parameter.shape for name, parameter in dense.named_parameters()}
    gradients = {name: b.random(*sizes, seed=60 + i) for i, (name, sizes) in enumerate(names.items())}
    right = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
    sent, times = 0, 0
    for tp in (tensor_parallel(b.group, sequence_parallel=True), tensor_parallel(b.group), TensorParallel()):
        model = GPT(shape, tp, p=0.0, dtype=torch.float64, device=b.device)
        load_dense(model, gradients, tp)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
            parameter.data.mul_(2).add_(1)  # so that the parameters' own norm is another
        found, exchanges = _norm(b, model)
        _check(b, found, right, model)
        sent, times = max(sent, sum(c.payload_bytes for c in exchanges)), max(times, len(exchanges))
    # Not an error: whoever gathers all gradients finds the right norm.
    if sent > 64:
        return f"right, but it exchanges {sent:,} B; a single number would do"
    return f"right, but it exchanges {times} times; once would do" if times > 1 else None


def _norm(b: Bench, model: GPT) -> tuple[float, list[Collective]]:
    """What the learner's function finds, and what it exchanges."""
    before = [grad_of(parameter).clone() for parameter in model.parameters()]
    with b.watching() as seen:
        found = b["gradient_norm"](model)
    if any(p.grad is None or not torch.equal(p.grad, old) for p, old in zip(model.parameters(), before)):
        raise Wrong("a .grad is changed: only compute the norm; scaling comes later")
    if isinstance(found, Tensor):
        if type(found).__name__ == "DTensor":
            raise Wrong("the result is a DTensor; expected a float (full_tensor().item())")
        if found.numel() != 1:
            raise Wrong(f"the result has shape {list(found.shape)}; expected one number")
        found = found.item()
    if not isinstance(found, float):
        missing = ": is a return missing?" if found is None else ""
        raise Wrong(f"expected a float, got {type(found).__name__}{missing}")
    return found, seen.collectives


def _check(b: Bench, found: float, right: float, model: GPT) -> None:
    squares = {True: 0.0, False: 0.0}
    for parameter in model.parameters():
        squares[hasattr(parameter, "partition_dim")] += grad_of(parameter).square().sum().item()
    cut, whole = squares[True], squares[False]
    everyone = b.gather((found, cut))
    wrong = [rank for rank, (norm, _) in enumerate(everyone) if not _same(norm, right)]
    if not wrong:
        return
    if len(wrong) < b.size:
        ranks = f"rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))}"
        raise Wrong(f"the norm is wrong on {ranks} and right elsewhere: every rank needs it, so all-reduce")
    mistakes = _unshared(b.size, cut, whole) if model.tp.size == 1 else _shared(everyone, b.rank, whole, right)
    for diagnosis, value in mistakes.items():
        if _same(found, value):
            raise Wrong(diagnosis)
    case = f"model.tp.size is {model.tp.size}: " if b.size > 1 else ""
    raise Wrong(
        f"{case}the norm is {found:.6g}, and the unsharded model's is {right:.6g}: the root of the sum of all squares"
    )


def _unshared(t: int, cut: float, whole: float) -> dict[str, float]:
    """Mistakes that show where every rank has the whole model."""
    summed = "a model that is not shared (model.tp.size is 1) is summed over all ranks: then exchange nothing"
    return {
        summed: math.sqrt(t * cut + whole),
        summed + ".": math.sqrt(t * (cut + whole)),
        "the root is missing: this is the sum of the squares": cut + whole,
        "parameters that are replicated are left out": math.sqrt(cut),
    }


def _shared(everyone: list[tuple[float, float]], rank: int, whole: float, right: float) -> dict[str, float]:
    """Mistakes by what they make of the ranks' cut squares, and of the squares that all have.

    everyone: each rank's norm and its cut squares.
    """
    cuts, t = [cut for _, cut in everyone], len(everyone)
    mistakes = {
        "parameters that are replicated are counted t times: sum the squares of the cut ones over the ranks, "
        "and add the others once": math.sqrt(sum(cuts) + t * whole),
        "the ranks' norms are added up: add squares, and take the root of the sum": sum(
            math.sqrt(c + whole) for c in cuts
        ),
        "the root is missing: this is the sum of the squares": right**2,
        "parameters that are replicated are left out": math.sqrt(sum(cuts)),
        "the squares are averaged over the ranks, not summed": math.sqrt(sum(cuts) / t + whole),
    }
    if all(_same(norm, everyone[0][0]) for norm, _ in everyone):
        largest = "this is the largest of the ranks' norms: the squares must be summed over the ranks"
        return mistakes | {largest: math.sqrt(max(cuts) + whole)}
    own = "only this rank's parameters are counted: the squares of those that are cut must be summed over the ranks"
    return mistakes | {own: math.sqrt(cuts[rank] + whole)}


def _same(found: float, value: float) -> bool:
    return math.isclose(found, value, rel_tol=1e-9)
