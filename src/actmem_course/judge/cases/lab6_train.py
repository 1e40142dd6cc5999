"""Lab 6: on what a gradient's norm is judged, and the mistakes that are edits of ours.

The others keep checks of their own: many batches (6.1), ways to draw the same weights (6.2) and loops (6.5) are right, and to
run every mistake in a training step (6.4) takes seconds, where sums of the microbatches' gradients say the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actmem.layers.gpt import GPT
from actmem.measure.comms import Collective
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import load_dense
from actmem_course.judge.case import CaseRun
from actmem_course.judge.compare import grad_of
from actmem_course.judge.lab_checks.lab6_model import small_shape
from actmem_course.judge.verdict import Wrong


def gradient_norm(r: CaseRun) -> None:
    for case, found, _ in _norms(r):
        r.see_tensor(f"{case}the norm", torch.tensor(found, dtype=torch.float64))


def _norms(r: CaseRun):
    """For models that are shared in one way or the other: in words, the norm that is found, and what is exchanged."""
    shape = small_shape(r.b)
    dense = GPT(shape, p=0.0, dtype=torch.float64, device=r.device)
    gradients = {name: r.same(*parameter.shape) for name, parameter in dense.named_parameters()}
    for tp in (tensor_parallel(r.group, sequence_parallel=True), tensor_parallel(r.group), TensorParallel()):
        model = GPT(shape, tp, p=0.0, dtype=torch.float64, device=r.device)
        load_dense(model, gradients, tp)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
            parameter.data.mul_(2).add_(1)  # so that the parameters' own norm is another
        case = f"model.tp.size is {tp.size}{', with sequence parallelism' * tp.sequence_parallel}: " if r.t > 1 else ""
        yield case, *_norm(r, model)


def _norm(r: CaseRun, model: GPT) -> tuple[float, list[Collective]]:
    """What the function finds, and what it exchanges."""
    before = [grad_of(parameter).clone() for parameter in model.parameters()]
    with r.b.watching() as seen:
        found = r["gradient_norm"](model)
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


def remark_on_norm(r: CaseRun) -> str:
    """Not an error: whoever gathers all gradients finds the right norm."""
    exchanges = [collectives for _, _, collectives in _norms(r)]
    sent, times = max(sum(c.payload_bytes for c in one) for one in exchanges), max(map(len, exchanges))
    if sent > 64:
        return f"right, but it exchanges {sent:,} B; a single number would do"
    return f"right, but it exchanges {times} times; once would do" if times > 1 else ""


_EXCHANGED = (
    "    if model.tp.size > 1:\\n        dist.all_reduce(cut, group=model.tp.group)\\n    return math.sqrt(cut + whole)"
)
_OF_NORMS = "    norm = (cut + whole).sqrt()\\n    if model.tp.size > 1:\\n        dist.all_reduce(norm, {}group=model.tp.group)\\n    return norm.item()"
#: What to say of a right answer.
REMARKS = {"6.3": remark_on_norm}
MISTAKES = {
    "6.3": rf"""
        dist.all_reduce(cut, group=model.tp.group) -> pass | only this rank's parameters are counted: the squares of those that are cut must be summed over the ranks
        hasattr(parameter, "partition_dim") -> True | parameters that are replicated are counted t times: sum the squares of the cut ones over the ranks, and add the others once
        `{_EXCHANGED}` -> {_OF_NORMS.format("")} | the ranks' norms are added up: add squares, and take the root of the sum
        `{_EXCHANGED}` -> {_OF_NORMS.format("dist.ReduceOp.MAX, ")} | this is the largest of the ranks' norms: the squares must be summed over the ranks
        return math.sqrt(cut + whole) -> return float(cut + whole) | the root is missing: this is the sum of the squares
        return math.sqrt(cut + whole) -> return math.sqrt(cut) | parameters that are replicated are left out
        return math.sqrt(cut + whole) -> return math.sqrt(cut / model.tp.size + whole) | the squares are averaged over the ranks, not summed
        if model.tp.size > 1:\n        dist.all_reduce(cut, group=model.tp.group) -> dist.all_reduce(cut) | a model that is not shared (model.tp.size is 1) is summed over all ranks: then exchange nothing
        dist.all_reduce(cut, -> dist.reduce(cut, dist.get_global_rank(model.tp.group, 0), | the norm is right on rank 0 only: every rank needs it, so all-reduce
        parameter.grad.double() -> parameter.detach().double() | this is the norm of the parameters; expected that of their .grad
    """,
}
