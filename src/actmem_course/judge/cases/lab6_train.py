"""Lab 6: on what a gradient's norm and a training step are judged, and the mistakes that are edits of ours.

The others keep checks of their own: many batches (6.1), ways to draw the same weights (6.2) and loops (6.5) are right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actmem.layers.gpt import GPT
from actmem.measure.comms import Collective
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import load_dense
from actmem_course.judge.case import CaseRun
from actmem_course.judge.compare import another_kind, grad_of
from actmem_course.judge.lab_checks.lab6_train import mode_named, small_shape
from actmem_course.judge.solutions.lab6_train import make_model
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench

_RATE = 0.5
#: Norms of the gradient: far above any, and far below.
_NO_LIMIT, _LIMIT = 1e9, 1e-3


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
        raise another_kind("a float", found)
    return found, seen.collectives


def remark_on_norm(r: CaseRun) -> str:
    """Not an error: whoever gathers all gradients finds the right norm."""
    exchanges = [collectives for _, _, collectives in _norms(r)]
    sent, times = max(sum(c.payload_bytes for c in one) for one in exchanges), max(map(len, exchanges))
    if sent > 64:
        return f"right, but it exchanges {sent:,} B; a single number would do"
    return f"right, but it exchanges {times} times; once would do" if times > 1 else ""


def training_step(r: CaseRun) -> None:
    _steps(r, "tensor+sequence", _LIMIT, 2)  # whose gradients are those of the step before shows in the second
    if not r.b.group_name:
        _steps(r, "tensor+sequence", _NO_LIMIT)
        for name in ("tensor", "none"):  # whoever forgets the group shows in one of them
            _steps(r, name, _LIMIT)


def _steps(r: CaseRun, name: str, max_norm: float, count: int = 1) -> None:
    """By how much the parameters move in each step, in units of the rate and of a small limit, and the result."""
    mode = mode_named(name)
    model = make_model(small_shape(r.b), mode, r.group, dtype=torch.float64, device=r.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    unit = _RATE * min(1.0, max_norm)
    for number in range(1, count + 1):
        microbatches = random_microbatches(r.b, number)
        # Partial ones first: most mistakes show there.
        parameters = sorted(model.named_parameters(), key=lambda pair: not getattr(pair[1], "partial_gradient", False))
        before = [parameter.detach().clone() for _, parameter in parameters]
        with r.b.watching():
            returned = r["training_step"](model, optimizer, microbatches, max_norm)
        limited = ", with a norm above max_norm" * (max_norm == _LIMIT)
        case = f"mode {name!r}, step {number}{limited}: "
        for (name, parameter), old in zip(parameters, before):
            r.see_tensor(f"{case}the step of {name}", (old - parameter.detach()) / unit, "near")
        if not isinstance(returned, float):
            missing = ": is a return missing?" if returned is None else ""
            raise Wrong(
                f"the parameters are right; expected the mean loss as a float, got {returned!r}"[:160] + missing
            )
        r.see_tensor(f"{case}the result", torch.tensor(returned, dtype=torch.float64))


def random_microbatches(b: Bench, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of three."""
    shape = small_shape(b)
    generator = torch.Generator().manual_seed(70 + seed)
    sizes = (2, 3, shape.micro_batch_size, shape.seq_length)
    tokens, targets = torch.randint(shape.vocab_size, sizes, generator=generator).to(b.device)
    return list(zip(tokens, targets))


_EXCHANGED = (
    "    if model.tp.size > 1:\\n        dist.all_reduce(cut, group=model.tp.group)\\n    return math.sqrt(cut + whole)"
)
_OF_NORMS = "    norm = (cut + whole).sqrt()\\n    if model.tp.size > 1:\\n        dist.all_reduce(norm, {}group=model.tp.group)\\n    return norm.item()"
_REDUCE, _NORM = "    reduce_partial_gradients(model, model.tp)", "    norm = gradient_norm(model)"
_BACKWARD, _STEP = "        loss.backward()", r"    optimizer.step()\n"
_REDUCED = f"{_REDUCE.lstrip()}"
_SUMMED = "[dist.all_reduce(p.grad{}, group=model.tp.group) for p in model.parameters() if model.tp.size > 1]"
_CLIPPED = "norm = gradient_norm(model); [p.grad.mul_(min(1.0, max_norm / norm)) for p in model.parameters()]"
_BELONGS = (
    "between the last backward and gradient_norm: some parameters saw only this rank's tokens, and reduce_partial_gradients "
    "sums their gradients over the ranks, once, after the last backward; only then has gradient_norm the norm of the whole, complete gradient"
)
_BY_THE_WHOLE = "by max_norm / norm, with the norm of the whole, complete gradient (gradient_norm)"
_ONCE = f"reduce_partial_gradients runs after each backward: it belongs {_BELONGS}"
_TOO_LONG = "steps are too long, as often as there are microbatches: the loss is their mean, so divide each loss by their number"
_AS_DATA = (
    "gradients of parameters that are cut are added up over the ranks: each rank has another part of the weight, "
    "and its gradient is complete; only reduce_partial_gradients remains to be called (this is not a data-parallel group)"
)
_OWN_NORM = f"each parameter's gradient is scaled by its own norm; scale all of them down {_BY_THE_WHOLE}"
_EACH_CLIPPED = "the gradient is clipped after each microbatch; clip once, after the last, what they add up to"
_LAST = "only the last microbatch counts: zero_grad belongs before the first, so that gradients add up"
#: Where the statements of a training step belong.
PLACES = {
    "optimizer.zero_grad()": "before the first backward",
    "reduce_partial_gradients": _BELONGS,
    "gradient_norm": "after reduce_partial_gradients",
    "“if norm > max_norm”": "between gradient_norm and optimizer.step()",
    "optimizer.step()": "at the end",
}
#: What to say of a right answer.
REMARKS = {"6.3": remark_on_norm}
MISTAKES = {
    "6.3": rf"""
        dist.all_reduce(cut, group=model.tp.group) -> pass | only this rank's parameters are counted: the squares of those that are cut must be summed over the ranks
        hasattr(parameter, "partition_dim") -> True | parameters that are replicated are counted t times: sum the squares of the cut ones over the ranks, and add the others once
        `{_EXCHANGED}` -> {_OF_NORMS.format("")} | the ranks' norms are added up: add squares, and take the root of the sum
        `{_EXCHANGED}` -> {_OF_NORMS.format("dist.ReduceOp.MAX, ")} | this is the largest of the ranks' norms: the squares must be summed over the ranks
        square = parameter.grad.double().square().sum()\n -> square = parameter.grad.double().square().sum()\n        if model.tp.size > 1 and hasattr(parameter, "partition_dim"):\n            dist.all_reduce(square, group=model.tp.group)\n        square = square.sqrt()\n ;; `        dist.all_reduce(cut, group=model.tp.group)` ->         pass ;; return math.sqrt(cut + whole) -> return float(cut + whole) | the parameters' norms are added up: add squares, and take the root of the sum
        hasattr(parameter, "partition_dim") -> getattr(parameter, "partition_dim", None) | parameters that are cut along dimension 0 are treated as replicated: partition_dim is 0 there, so ask hasattr
        hasattr(parameter, "partition_dim") -> getattr(parameter, "partition_dim", None) == 0 | parameters that are cut along dimension 1 are treated as replicated: whatever has a partition_dim is cut
        hasattr(parameter, "partition_dim") -> parameter.dim() > 1 | the shape decides here which parameters are cut: biases can be cut as well; whatever has a partition_dim is cut
        return math.sqrt(cut + whole) -> return float(cut + whole) | the root is missing: this is the sum of the squares
        return math.sqrt(cut + whole) -> return math.sqrt(cut) | parameters that are replicated are left out
        return math.sqrt(cut + whole) -> return math.sqrt(cut / model.tp.size + whole) | the squares are averaged over the ranks, not summed
        if model.tp.size > 1:\n        dist.all_reduce(cut, group=model.tp.group) -> dist.all_reduce(cut) | a model that is not shared (model.tp.size is 1) is summed over all ranks: exchange nothing in that case
        dist.all_reduce(cut, -> dist.reduce(cut, dist.get_global_rank(model.tp.group, 0), | the norm is right on rank 0 only: every rank needs it, so all-reduce
        parameter.grad.double() -> parameter.detach().double() | this is the norm of the parameters; expected that of their .grad
    """,
    "6.4": rf"""
        `{_STEP}` ->     pass\n | no parameter has changed: is optimizer.step() missing?
        optimizer.zero_grad() -> pass | the gradients of the step before are still there: optimizer.zero_grad() is missing
        ` / len(microbatches)\n` -> \n | {_TOO_LONG}
        ` / len(microbatches)\n` -> \n ;; return total -> return total / len(microbatches) | {_TOO_LONG}
        loss.backward() -> (loss / len(microbatches)).backward() | steps are too short: the losses are divided by the number of microbatches twice
        `{_STEP}` ->     [p.grad.neg_() for p in model.parameters()]; optimizer.step()\n | steps go the wrong way
        `{_BACKWARD}` ->         optimizer.zero_grad(); loss.backward() | {_LAST}
        `{_BACKWARD}` ->         optimizer.zero_grad(); (loss * len(microbatches)).backward() | {_LAST}
        in microbatches: -> in microbatches[-1:]: | only the last microbatch counts
        in microbatches: -> in microbatches[:1]: | only the first microbatch counts
        in microbatches: -> in microbatches[1:]: | the first microbatch is left out
        in microbatches: -> in microbatches[:-1]: | the last microbatch is left out
        `{_REDUCE}` ->     pass | reduce_partial_gradients is missing: it belongs {_BELONGS}
        `{_BACKWARD}` -> {_BACKWARD}; {_REDUCED} | {_ONCE}
        `{_REDUCE}` ->     pass ;; `{_BACKWARD}` -> {_BACKWARD}; {_REDUCED} | {_ONCE}
        `{_REDUCE}` ->     pass ;; `{_NORM}` -> {_NORM}; {_REDUCED} | reduce_partial_gradients comes after gradient_norm: it belongs {_BELONGS}
        `{_REDUCE}` ->     pass ;; `{_STEP}` -> {_REDUCE}; optimizer.step()\n | reduce_partial_gradients comes after the scaling to max_norm: it belongs {_BELONGS}
        `{_REDUCE}` -> {_REDUCE}; {_REDUCED} | reduce_partial_gradients comes twice: it belongs {_BELONGS}
        `{_REDUCE}` -> {_REDUCE}; [p.grad.div_(model.tp.size) for p in model.parameters() if getattr(p, "partial_gradient", False)] | the partial gradients are averaged over the ranks: each rank's part comes from other tokens, so add the parts up and divide nothing by t
        `{_REDUCE}` ->     {_SUMMED.format("")} | {_AS_DATA}
        `{_REDUCE}` ->     {_SUMMED.format(", dist.ReduceOp.AVG")} | {_AS_DATA}
        `{_REDUCE}` -> {_REDUCE}; {_SUMMED.format("")} | {_AS_DATA}
        `{_REDUCE}` -> {_REDUCE}; {_SUMMED.format(", dist.ReduceOp.AVG")} | {_AS_DATA}
        if norm > max_norm: -> if False: | gradients are not scaled down to max_norm before optimizer.step()
        if norm > max_norm: -> if True: | gradients are scaled up to max_norm; scale them only if the norm is larger than max_norm
        `{_NORM}` ->     norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters())) | gradients are scaled by the norm of this rank's parameters, so ranks scale differently; scale each {_BY_THE_WHOLE}
        parameter.grad *= max_norm / norm -> parameter.grad.clamp_(-max_norm, max_norm) | each element of a gradient is clipped to max_norm by itself; scale the gradients down {_BY_THE_WHOLE}
        parameter.grad *= max_norm / norm -> parameter.grad *= min(1.0, max_norm / (parameter.grad.norm().item() + 1e-30)) | {_OWN_NORM}
        parameter.grad *= max_norm / norm -> torch.nn.utils.clip_grad_norm_([parameter], max_norm) | {_OWN_NORM}
        `{_BACKWARD}` -> {_BACKWARD}; {_CLIPPED} | {_EACH_CLIPPED}
        `{_BACKWARD}` -> {_BACKWARD}; {_CLIPPED} ;; if norm > max_norm: -> if False: | {_EACH_CLIPPED}
        `{_BACKWARD}` -> {_BACKWARD}; optimizer.step() ;; `{_STEP}` ->     pass\n | optimizer.step() runs after each microbatch: it belongs at the end, once
        `{_STEP}` ->     optimizer.step(); optimizer.step()\n | optimizer.step() comes twice: it belongs at the end, once
        return total -> return total * len(microbatches) | the parameters are right, but the result is the sum of the microbatches' losses; return their mean
        return total -> return total / len(microbatches) | the parameters are right, but the result is the mean of the losses, divided by the number of microbatches once more
        return total -> return loss.item() * len(microbatches) | the parameters are right, but the result is the last microbatch's loss; return the mean of all
        return total -> return loss.item() | the parameters are right, but the result is the last microbatch's loss, divided by the number of microbatches; return the mean of all
        total += loss.item() -> total = total or loss.item() * len(microbatches) | the parameters are right, but the result is the first microbatch's loss; return the mean of all
    """,
}
