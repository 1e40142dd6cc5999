"""Lab 6's gradient norm: each number of the unsharded gradient counts once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from actmem.layers.gpt import GPT
from actmem.measure.comms import Collective
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import load_dense
from actmem_course.judge.compare import grad_of, named_value
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
    everyone = b.gather((found, squares[True]))
    wrong = [rank for rank, (norm, _) in enumerate(everyone) if not math.isclose(norm, right, rel_tol=1e-9)]
    if not wrong:
        return
    if len(wrong) < b.size:
        ranks = f"rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))}"
        raise Wrong(f"the norm is wrong on {ranks} and right elsewhere: every rank needs it, so all-reduce")
    alike = all(math.isclose(norm, found, rel_tol=1e-9) for norm, _ in everyone)
    cuts = [cut for _, cut in everyone]
    mistakes = _mistakes(cuts, b.rank, squares[False], shared=model.tp.size > 1, alike=alike)
    if diagnosis := named_value(found, dict(mistakes)):
        raise Wrong(diagnosis)
    case = f"model.tp.size is {model.tp.size}: " if b.size > 1 else ""
    raise Wrong(
        f"{case}the norm is {found:.6g}, and the unsharded model's is {right:.6g}: the root of the sum of all squares"
    )


def _mistakes(cuts: list[float], rank: int, whole: float, shared: bool, alike: bool) -> Iterator[tuple[str, float]]:
    """What can be made of the squares: each rank's ``cuts``, and ``whole``, which all ranks have; fewest mistakes first.

    shared: the ranks share one model.  alike: all found the same number, which is then no rank's own.
    """
    t, own = len(cuts), cuts[rank]
    of_all = {
        "": own,
        "a model that is not shared (model.tp.size is 1) is summed over all ranks: then exchange nothing": t * own,
    }
    of_parts = {
        "": sum(cuts),
        "the squares are averaged over the ranks, not summed": sum(cuts) / t,
        "this is the largest of the ranks' norms: the squares must be summed over the ranks" if alike else
        "only this rank's parameters are counted: the squares of those that are cut must be summed over the ranks": max(cuts) if alike else own,
    }  # fmt: skip
    of_whole = {
        "": whole,
        "parameters that are replicated are counted t times: sum the squares of the cut ones over the ranks, and add the others once": t * whole,
        "parameters that are replicated are left out": 0.0,
    }  # fmt: skip
    roots = {"": math.sqrt, "the root is missing: this is the sum of the squares": float}
    if shared:
        added = sum(math.sqrt(cut + whole) for cut in cuts)
        yield "the ranks' norms are added up: add squares, and take the root of the sum", added
    choices = product((of_parts if shared else of_all).items(), of_whole.items(), roots.items())
    for (first, cut), (second, rest), (third, root) in sorted(choices, key=lambda c: sum(bool(word) for word, _ in c)):
        yield "; and ".join(filter(None, (first, second, third))), root(cut + rest)
