"""Lab 6: its cases, the functions that test a learner's answers."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from actmem.config import ModelShape
from actmem.formulas.activations import TABLE2, Configuration
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import load_dense
from actmem_course.judge.case import CaseRun
from actmem_course.judge.compare import another_kind, close, dtype_name, grad_of
from actmem_course.judge.observations import SingleTensor
from actmem_course.judge.saved_bytes import SavingRecorder
from actmem_course.judge.solutions import lab6_train as ours
from actmem_course.judge.verdict import Wrong, clipped
from actmem_course.standard_library import standard_library


def small_shape(r: CaseRun) -> ModelShape:
    """Return the shape of a model that trains within seconds; its tokens are bytes of text."""
    heads = 2 * r.t
    return ModelShape(4 * r.t, 2, 4 * heads, heads, num_layers=1, vocab_size=256)


def make_model(r: CaseRun) -> None:
    """Compare the weights of every mode with those of the first mode: the weights are right if all modes agree."""
    shape, first = small_shape(r), dict[str, Tensor]()
    for mode, p in [(TABLE2[0], 0.0), *((mode, 0.1) for mode in TABLE2)]:
        torch.manual_seed(r.rank)  # ranks of a real run do not start alike
        with r.watching():
            model = r["make_model"](shape, mode, r.group, dropout=p, dtype=torch.float64, device=r.device)
        if not isinstance(model, GPT):
            raise another_kind("a GPT", model)

        def equal(what: str, value: object, repair: str) -> None:
            r.see_value(f"mode {mode.name!r}, dropout={p}: {what}", value, repair)

        for what, value, repair in _of_this_mode(r, model, mode):
            equal(what, value, repair)
        shards = {name: (x.detach().cpu(), getattr(x, "partition_dim", None)) for name, x in model.named_parameters()}
        everyone = r.gather({name: part for name, (part, _) in shards.items()})
        for name, (part, dim) in shards.items():
            parts = [weights[name] for weights in everyone]
            if not mode.tensor_parallel or dim is None:
                unsharded, fault = part, any(not torch.equal(part, other) for other in parts)
                on_all = "pass seed=SEED to GPT, the same on all ranks"
                equal(f"whether {name} differs between the ranks", fault, on_all)
            else:
                unsharded = torch.cat(parts, dim)
                fault = len(parts) > 1 and torch.equal(*parts[:2]) and bool((part != part.flatten()[0]).any())
                own_part = "each rank draws its own: GPT(…, tp, seed=SEED)"
                equal(f"whether the ranks' parts of {name} are equal", fault, own_part)
            what = f"whether {name} is another than in mode {TABLE2[0].name!r}"
            unlike = not torch.equal(unsharded, first.setdefault(name, unsharded))
            equal(what, unlike, "pass seed=SEED to GPT in every mode")
        tokens = torch.zeros(shape.micro_batch_size, shape.seq_length, dtype=torch.int64, device=r.device)
        if not r.group_name:  # what it saves doesn't depend on the group, and counting takes half the time
            with r.watching(), SavingRecorder([*model.parameters(), *model.buffers()]) as recorder:
                loss = model.loss(model(tokens), tokens)
                equal("the number of bytes that the model saves", recorder.alive().bytes, "change nothing in GPT")
            del loss


def _of_this_mode(r: CaseRun, model: GPT, mode: Configuration) -> Iterator[tuple[str, object, str]]:
    """Yield what a model must be in a mode: a property's name, its value, and the repair if it is another."""
    tp, shared = model.tp, mode.tensor_parallel and r.t > 1
    if not shared:
        size = "only modes with tensor parallelism share the model"
    elif tp.group is None:
        size = "in this mode the ranks share the model: tensor_parallel(group, …) says how"
    else:
        size = "tensor_parallel(group, …) asks group for its size; TensorParallel(group) by itself is one rank"
    yield "model.tp.size", tp.size, size
    # A model that isn't shared may have any group.
    ranks = dist.get_process_group_ranks(tp.group or r.group) if shared and tp.size > 1 else r.members
    yield "the list of model.tp.group's ranks", ranks, "give group to tensor_parallel"
    yield "model.tp.sequence_parallel", tp.sequence_parallel, "give mode's to tensor_parallel"
    yield "model.tp.keep_gathered_input", tp.keep_gathered_input, "table 2 keeps each rank's own tokens"
    yield "the parameters' dtype", ", ".join(sorted({dtype_name(w) for w in model.parameters()})), "pass **factory on"
    modes = {layer.recompute.name for layer in model.modules() if isinstance(layer, TransformerLayer)}
    yield "the layers' recompute", ", ".join(sorted(modes)), "give mode.recompute to GPT"
    yield "the dropout", round(model.embedding_dropout.dropped_per_65536 / 2**16, 3), "give it to GPT"


_RATE = 0.5
#: Limits of the gradient's norm: one far above any norm, and one far below.
_NO_LIMIT, _LIMIT = 1e9, 1e-3


def gradient_norm(r: CaseRun) -> None:
    """Test the gradient's norm of three models: with sequence parallelism, with tensor parallelism only, unsharded."""
    shape = small_shape(r)
    dense = GPT(shape, p=0.0, dtype=torch.float64, device=r.device)
    gradients = {name: r.same(*parameter.shape) for name, parameter in dense.named_parameters()}
    for tp in (tensor_parallel(r.group, sequence_parallel=True), tensor_parallel(r.group), TensorParallel()):
        model = GPT(shape, tp, p=0.0, dtype=torch.float64, device=r.device)
        load_dense(model, gradients, tp)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
            parameter.data.mul_(2).add_(1)  # so that the parameters' own norm is another
        parallel = ", with sequence parallelism" if tp.sequence_parallel else ""
        case = f"model.tp.size is {tp.size}{parallel}: " if r.t > 1 else ""
        r.see_tensor(f"{case}the norm", torch.tensor(_norm(r, model), dtype=torch.float64))


def _norm(r: CaseRun, model: GPT) -> float:
    before = [grad_of(parameter).clone() for parameter in model.parameters()]
    with r.watching():
        norm = r["gradient_norm"](model)
    if any(p.grad is None or not torch.equal(p.grad, old) for p, old in zip(model.parameters(), before)):
        raise Wrong("a .grad is changed", "only compute the norm; scaling comes later")
    if isinstance(norm, Tensor) and norm.numel() == 1:
        norm = norm.item()
    if not isinstance(norm, float):
        raise another_kind("a float", norm)
    return norm


def training_step(r: CaseRun) -> None:
    # An answer that keeps the gradients of the step before is wrong in the second step, on any group.  Most mistakes
    # are wrong in the first, which is short, because it runs with every stated mistake too.
    _steps(r, "tensor+sequence", _LIMIT, (3,) if r.group_name else (2, 3))
    if not r.group_name:
        _steps(r, "tensor+sequence", _NO_LIMIT)
        for name in ("tensor", "none"):  # an answer that forgets the group is wrong in one of them
            _steps(r, name, _LIMIT)


def _steps(r: CaseRun, name: str, max_norm: float, sizes: Sequence[int] = (3,)) -> None:
    """Note by how much each parameter moves in each step, and what the step returns.

    Moves are in units of the learning rate, times the limit of the norm if that is below 1.

    Args:
        r: the run of the case.
        name: the mode.
        max_norm: the limit of the gradient's norm.
        sizes: how many microbatches each step has.
    """
    mode = next(mode for mode in TABLE2 if mode.name == name)
    model = ours.make_model(small_shape(r), mode, r.group, dtype=torch.float64, device=r.device)
    optimizer, calls = torch.optim.SGD(model.parameters(), lr=_RATE), list[None]()
    optimizer.register_step_pre_hook(lambda *_: calls.append(None))
    unit = _RATE * min(1.0, max_norm)
    for number, size in enumerate(sizes, 1):
        microbatches = random_microbatches(r, number)[:size]
        # Partial gradients first, because most mistakes are wrong there.
        parameters = sorted(model.named_parameters(), key=lambda pair: not getattr(pair[1], "partial_gradient", False))
        before = [parameter.detach().clone() for _, parameter in parameters]
        with r.watching():
            returned = r["training_step"](model, optimizer, microbatches, max_norm)
        if len(calls) != number:
            often = f"{len(calls) - number + 1} times in one step" if len(calls) > number else "never"
            once = "once, when the gradients of all microbatches are scaled"
            raise Wrong(f"optimizer.step() runs {often}", once)
        limited = ", with a norm above max_norm" if max_norm == _LIMIT else ""
        case = f"mode {name!r}, step {number}, microbatches: {size}{limited}: "
        for (parameter_name, parameter), old in zip(parameters, before):
            r.see_tensor(f"{case}the step of {parameter_name}", (old - parameter.detach()) / unit, kind=SingleTensor)
        if not isinstance(returned, float):
            got = clipped(f"got {returned!r}")
            missing = "is a return missing?" if returned is None else ""
            raise Wrong(f"the parameters are right; expected the mean loss as a float, {got}", missing)
        r.see_tensor(f"{case}the result", torch.tensor(returned, dtype=torch.float64))


def random_microbatches(r: CaseRun, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Draw three microbatches, each a pair of token ids and target ids, ``[b, s]`` both, the same on every rank.

    Args:
        r: the run of the case.
        seed: of the random numbers; the same seed gives the same microbatches.
    """
    shape = small_shape(r)
    generator = torch.Generator().manual_seed(70 + seed)
    sizes = (2, 3, shape.micro_batch_size, shape.seq_length)
    tokens, targets = torch.randint(shape.vocab_size, sizes, generator=generator).to(r.device)
    return list(zip(tokens, targets))


_NUM_STEPS = 3


def train(r: CaseRun) -> str:
    """Run ``train``, which the lab gives to the learner, with the learner's functions.

    Returns: a remark on how much the loss has decreased.
    """
    text, first = standard_library(20_000, r.device), torch.empty(0)
    for mode in TABLE2[:3] if r.group_name else TABLE2:  # recomputation doesn't depend on the group
        with r.watching():
            losses = r["train"](small_shape(r), mode, text, _NUM_STEPS, r.group, dtype=torch.float64, device=r.device)
        if not isinstance(losses, list) or len(losses) != _NUM_STEPS:
            raise Wrong(f"expected a list of {_NUM_STEPS} losses", "leave train as it was written for you")
        curve = torch.tensor(losses, dtype=torch.float64)
        first = curve if mode is TABLE2[0] else first
        if not close(curve, first):
            raise Wrong(f"the losses of mode {mode.name!r} differ from those of mode {TABLE2[0].name!r}")
    return f"the loss falls from {first[0]:.2f} to {first[-1]:.2f} in {_NUM_STEPS} steps, alike in {len(TABLE2)} modes"
