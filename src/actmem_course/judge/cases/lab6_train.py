"""Lab 6: on what each answer is judged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from actmem.config import ModelShape
from actmem.formulas.activations import TABLE2, Configuration
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import load_dense
from actmem_course.judge.case import CaseRun
from actmem_course.judge.compare import another_kind, check_tensors, grad_of
from actmem_course.judge.observations import SingleTensor
from actmem_course.judge.saved_bytes import SavingRecorder
from actmem_course.judge.solutions import lab6_train as ours
from actmem_course.judge.solutions.lab6_train import LEARNING_RATE, MAX_NORM, NUM_MICROBATCHES
from actmem_course.judge.verdict import Wrong, clipped, refuse
from actmem_course.standard_library import standard_library


def batch(r: CaseRun) -> None:
    """Many batches are right, so what counts is how targets lie beside tokens, and which batches are the same."""
    s, size = 9, 8
    # Every token occurs once, so that a piece's place in the text is known, and neighbours are no neighbours as
    # numbers.
    text = torch.stack((torch.arange(200), torch.arange(200) + 1000), 1).flatten().to(r.device)
    place = {token: i for i, token in enumerate(text.tolist())}
    drawn: dict[tuple[int, bool], list[int]] = {}
    for step, again in [*((step, False) for step in _STEPS), (0, True)]:
        rows, following = (part.tolist() for part in _windows(r, text, step, s, size))
        starts = [place.get(row[0], 0) for row in rows]
        for k, (start, row) in enumerate(zip(starts, rows)):
            if row != text[start : start + s].tolist():
                raise Wrong(f"row {k} of tokens is not a piece of text: expected {s} consecutive tokens")
        by_row = [{place.get(t, -1) - start - i for i, t in enumerate(row)} for start, row in zip(starts, following)]
        ahead = set[int]().union(*by_row)
        if len(ahead) > 1 and all(len(one) == 1 for one in by_row):
            elsewhere = "the targets come from other places in the text than the tokens"
            raise Wrong(elsewhere, "draw the starts once, for both")
        follows = "the target of a token is the one that follows it"
        r.see_value("by how many tokens targets are ahead", sorted(ahead), follows)
        drawn[step, again] = starts
    refuse(_faults_of_batches(r.gather(drawn)))
    halves: dict[tuple[int, ...], int] = {}
    for (step, _), starts in drawn.items():
        if len(set(starts)) == 1:
            raise Wrong(f"all rows of step {step} are the same piece", "choose another for each")
        for half in (starts[: size // 2], starts[size // 2 :]):
            if (other := halves.setdefault(tuple(sorted(half)), step)) != step:
                common = f"step {other} and step {step} have half a batch in common"
                raise Wrong(common, "choose all pieces of a step by the step")
    for length in (s + size, 2 * s, 2 * s + 1):
        text = torch.arange(length, device=r.device)  # with room for few pieces: whoever runs over its end does so here
        case = f"a text of {length} tokens: "
        for step in range(20):
            tokens, targets = _windows(r, text, step, s, size, case)
            if not torch.equal(targets, tokens + 1):
                raise Wrong(f"{case}{_OVER_ITS_END}", _LAST_START)


#: Whoever repeats the batches of a few steps has one of these in common with the first.
_STEPS = (*range(21), 24, 25, 30, 32, 50, 64, 100, 128, 256, 500, 512, 1000, 1024)
_OVER_ITS_END = "a piece runs over the text's end"
_LAST_START = "the last one starts at len(text) - seq_length - 1"


def _faults_of_batches(everyone: list[dict[tuple[int, bool], list[int]]]) -> Iterator[tuple]:
    """What is wrong with the batches of all ranks, by step and whether it is the second time; the gravest first."""
    first = everyone[0]
    shared = "a tensor-parallel group shares one model, so it works on one batch. Data parallelism has others"
    by_step = "choose the pieces by step alone, with generator=torch.Generator().manual_seed(SEED + step)"
    yield any(own != first for own in everyone), "ranks have different batches", by_step, shared
    another = "the same step gives another batch the second time"
    yield first[0, False] != first[0, True], another, "choose the pieces by step alone", "runs could not be compared"
    for step in _STEPS[1:]:
        for before in (one for one in _STEPS if one < step):
            both = f"step {before} and step {step} have the same batch"
            yield first[before, False] == first[step, False], both, "choose different pieces each step"


def _windows(r: CaseRun, text: Tensor, step: int, s: int, size: int, case: str = "") -> tuple[Tensor, Tensor]:
    # Another state of the default generator on every rank and at every call: what draws from it shows.
    r.seed(7919 * r.rank + int(torch.randint(10**6, ())))
    try:
        with r.watching():
            result = r["batch"](text, step, s, size)
    except (IndexError, RuntimeError) as error:
        if "size" in str(error) or "index" in str(error):
            raise Wrong(f"{case}{_OVER_ITS_END} ({type(error).__name__})", _LAST_START) from None
        raise
    tokens, targets = check_tensors(result, "tokens and targets")
    for name, part in (("tokens", tokens), ("targets", targets)):
        shape = f"{case}{name} has shape {list(part.shape)}; expected {[size, s]}"
        dtype = f"{name} has dtype {part.dtype}; expected {text.dtype}"
        refuse([(part.shape != (size, s), shape, "[batch_size, seq_length]")])
        refuse([(part.dtype != text.dtype, dtype, "as in text")])
    return tokens, targets


def small_shape(r: CaseRun) -> ModelShape:
    """A model that trains in no time; bytes are its tokens."""
    heads = 2 * r.t
    return ModelShape(4 * r.t, 2, 4 * heads, heads, num_layers=1, vocab_size=256)


def make_model(r: CaseRun) -> None:
    """Any weights are right that are the same in every mode, so they are compared with those of the first."""
    shape, first = small_shape(r), dict[str, Tensor]()
    for mode, p in [(TABLE2[0], 0.0), *((mode, 0.1) for mode in TABLE2)]:
        r.seed(r.rank)  # ranks of a real run do not start alike
        with r.watching():
            model = r["make_model"](shape, mode, r.group, dropout=p, dtype=torch.float64, device=r.device)
        if not isinstance(model, GPT):
            raise another_kind("a GPT", model)
        refuse(_faults_of_model(r, model, mode, p))

        def equal(what: str, value: object, repair: str) -> None:
            r.see_value(f"mode {mode.name!r}, dropout={p}: {what}", value, repair)

        own = {name: (x.detach().cpu(), getattr(x, "partition_dim", None)) for name, x in model.named_parameters()}
        everyone = r.gather({name: part for name, (part, _) in own.items()})
        for name, (part, dim) in own.items():
            parts = [weights[name] for weights in everyone]
            if not mode.tensor_parallel or dim is None:
                whole, fault = part, any(not torch.equal(part, other) for other in parts)
                on_all = "pass seed=SEED to GPT, the same on all ranks"
                equal(f"whether {name} differs between the ranks", fault, on_all)
            else:
                whole = torch.cat(parts, dim)
                fault = len(parts) > 1 and torch.equal(*parts[:2]) and bool((part != part.flatten()[0]).any())
                own_part = "each rank draws its own: GPT(…, tp, seed=SEED)"
                equal(f"whether the ranks' parts of {name} are equal", fault, own_part)
            what = f"whether {name} is another than in mode {TABLE2[0].name!r}"
            unlike = not torch.equal(whole, first.setdefault(name, whole))
            equal(what, unlike, "pass seed=SEED to GPT in every mode")
        tokens = torch.zeros(shape.micro_batch_size, shape.seq_length, dtype=torch.int64, device=r.device)
        if not r.group_name:  # what it saves doesn't depend on the group, and counting takes half the time
            with r.watching(), SavingRecorder([*model.parameters(), *model.buffers()]) as recorder:
                loss = model.loss(model(tokens), tokens)
                equal("the number of bytes that the model saves", recorder.alive().bytes, "change nothing in GPT")
            del loss


_RATE = 0.5
#: Norms of the gradient: far above any, and far below.
_NO_LIMIT, _LIMIT = 1e9, 1e-3


def gradient_norm(r: CaseRun) -> None:
    """Of models that are shared in one way or the other."""
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
        found = r["gradient_norm"](model)
    if any(p.grad is None or not torch.equal(p.grad, old) for p, old in zip(model.parameters(), before)):
        raise Wrong("a .grad is changed", "only compute the norm; scaling comes later")
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if not isinstance(found, float):
        raise another_kind("a float", found)
    return found


def training_step(r: CaseRun) -> None:
    # Whose gradients are those of the step before shows in the second, on any group.
    _steps(r, "tensor+sequence", _LIMIT, 1 if r.group_name else 2)
    if not r.group_name:
        _steps(r, "tensor+sequence", _NO_LIMIT)
        for name in ("tensor", "none"):  # whoever forgets the group shows in one of them
            _steps(r, name, _LIMIT)


def _steps(r: CaseRun, name: str, max_norm: float, count: int = 1) -> None:
    """By how much the parameters move in each step, in units of the rate and of a small limit, and the result."""
    mode = next(mode for mode in TABLE2 if mode.name == name)
    model = ours.make_model(small_shape(r), mode, r.group, dtype=torch.float64, device=r.device)
    optimizer, calls = torch.optim.SGD(model.parameters(), lr=_RATE), list[None]()
    optimizer.register_step_pre_hook(lambda *_: calls.append(None))
    unit = _RATE * min(1.0, max_norm)
    for number in range(1, count + 1):
        microbatches = random_microbatches(r, number)
        # Partial ones first: most mistakes show there.
        parameters = sorted(model.named_parameters(), key=lambda pair: not getattr(pair[1], "partial_gradient", False))
        before = [parameter.detach().clone() for _, parameter in parameters]
        with r.watching():
            returned = r["training_step"](model, optimizer, microbatches, max_norm)
        if len(calls) != number:
            often = f"{len(calls) - number + 1} times in one step" if len(calls) > number else "never"
            once = "once, when the gradients of all microbatches are scaled"
            raise Wrong(f"optimizer.step() runs {often}", once)
        limited = ", with a norm above max_norm" if max_norm == _LIMIT else ""
        case = f"mode {name!r}, step {number}{limited}: "
        for (own, parameter), old in zip(parameters, before):
            r.see_tensor(f"{case}the step of {own}", (old - parameter.detach()) / unit, kind=SingleTensor)
        if not isinstance(returned, float):
            got = clipped(f"got {returned!r}")
            missing = "is a return missing?" if returned is None else ""
            raise Wrong(f"the parameters are right; expected the mean loss as a float, {got}", missing)
        r.see_tensor(f"{case}the result", torch.tensor(returned, dtype=torch.float64))


def random_microbatches(r: CaseRun, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of three."""
    shape = small_shape(r)
    generator = torch.Generator().manual_seed(70 + seed)
    sizes = (2, 3, shape.micro_batch_size, shape.seq_length)
    tokens, targets = torch.randint(shape.vocab_size, sizes, generator=generator).to(r.device)
    return list(zip(tokens, targets))


#: Steps in the first mode, and in each other, whose losses must be the same: what train itself does wrong shows in
#: the first.
_NUM_STEPS, _NUM_COMPARED = 12, 3
#: The order of sums differs between modes, in float64.
_TOLERANCE = 1e-9


@dataclass
class Seen:
    """What torch ran while a learner trained: the tokens of each forward pass, by step, and the optimizers.

    norms: of the gradients on this rank, as each optimizer.step() found them.
    """

    models: set[GPT] = field(default_factory=set)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    tokens: list[list[Tensor]] = field(default_factory=lambda: [[]])
    norms: list[float] = field(default_factory=list)


@contextmanager
def _looking() -> Iterator[Seen]:
    """Look on through torch's own hooks, so that it does not matter which function does what.

    The hooks are the process's, and each rank looks at what its own thread runs.
    """
    seen, thread = Seen(), get_ident()

    def forward(module, inputs):
        if get_ident() == thread and isinstance(module, GPT) and inputs:
            seen.models.add(module)
            seen.tokens[-1].append(inputs[0].detach().clone())

    def step(optimizer, args, kwargs):
        if get_ident() != thread:
            return
        seen.optimizers.append(optimizer)
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        seen.norms.append(math.sqrt(sum(gradient.square().sum().item() for gradient in gradients)))
        seen.tokens.append([])

    hooks = register_module_forward_pre_hook(forward), register_optimizer_step_pre_hook(step)
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def train(r: CaseRun) -> None:
    """Many loops are right, so each is judged by itself, and the modes by each other."""
    shape, text, curves = small_shape(r), standard_library(20_000, r.device), dict[str, list[float]]()
    for mode in TABLE2:
        steps = _NUM_COMPARED if curves else _NUM_STEPS
        r.progress(f"mode {mode.name}")
        with r.watching(), _looking() as seen:
            losses = r["train"](shape, mode, text, steps, r.group, dtype=torch.float64, device=r.device)
        if not isinstance(losses, list) or not all(isinstance(loss, float) for loss in losses):
            raise another_kind("a list of floats", losses)
        if len(losses) != steps:
            raise Wrong(f"expected {steps} losses, one per step, got {len(losses)}")
        if any(other != losses for other in r.gather(losses)):
            same = "all ranks of a tensor-parallel group train on the same batches"
            raise Wrong(f"mode {mode.name!r}: ranks have different losses", cause=same)
        for model in seen.models:
            refuse(_faults_of_model(r, model, mode, 0.0))
        refuse(_faults_of_steps(seen, shape.micro_batch_size, steps))
        if not any(model.tp.size > 1 for model in seen.models):
            refuse(_faults_of_norms(seen.norms))
        curves[mode.name] = losses
    first = curves[TABLE2[0].name]
    for name, losses in curves.items():
        for step, pair in enumerate(zip(first, losses)):
            if not math.isclose(*pair, rel_tol=_TOLERANCE):
                differ = (
                    f"the losses of mode {name!r} differ from those of mode {TABLE2[0].name!r} from step {step + 1} on"
                )
                raise Wrong(differ, cause="the updates differ" if step else "the models or the batches differ")
    if not first[-1] < first[0]:
        raise Wrong(f"the loss does not fall: {first[0]:.4f} at first, {first[-1]:.4f} after {_NUM_STEPS} steps")


def _faults_of_model(r: CaseRun, model: GPT, mode: Configuration, p: float) -> Iterator[tuple]:
    """What a model is, and isn't in this mode.  Curves are equal, of course, if every mode trains the same model."""
    tp, shared = model.tp, mode.tensor_parallel and r.t > 1
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    modes = {layer.recompute.name for layer in model.modules() if isinstance(layer, TransformerLayer)}
    # A model that nobody shares is right on any group.
    ranks = dist.get_process_group_ranks(tp.group or r.group) if shared and tp.size > 1 else r.members
    if not shared:
        size = "only modes with tensor parallelism share the model"
    elif tp.group is None:
        size = "in this mode the ranks share the model: tensor_parallel(group, …) says how"
    else:
        size = "tensor_parallel(group, …) asks group for its size; TensorParallel(group) by itself is one rank"
    for what, found, right, why in (
        ("model.tp.size", tp.size, r.t if shared else 1, size),
        ("the list of model.tp.group's ranks", ranks, r.members, "give group to tensor_parallel"),
        ("model.tp.sequence_parallel", tp.sequence_parallel, mode.sequence_parallel, "give mode's to tensor_parallel"),
        ("model.tp.keep_gathered_input", tp.keep_gathered_input, False, "table 2 keeps each rank's own tokens"),
        ("the parameters' dtype", ", ".join(sorted(dtypes)), "float64", "pass **factory on"),
        ("the layers' recompute", ", ".join(sorted(modes)), mode.recompute, "give mode.recompute to GPT"),
        ("the dropout", round(model.embedding_dropout.num_dropped / 2**16, 3), p, "give it to GPT; train has none"),
    ):  # fmt: skip
        yield found != right, f"mode {mode.name!r}, dropout={p}: {what} is {found}; expected {right}", why


def _faults_of_steps(seen: Seen, size: int, steps: int) -> Iterator[tuple]:
    once = "make it once, before the first step"
    yield len(seen.models) > 1, f"{len(seen.models)} models are made in one training", once
    count = len(seen.optimizers)
    yield count != steps, f"optimizer.step() is called {count} times in {steps} steps"
    yield len(set(map(id, seen.optimizers))) > 1, "a new optimizer in every step forgets AdamW's averages", once
    yield from _faults_of_optimizer(seen.optimizers[0])
    tokens_of = seen.tokens[:steps]
    for microbatches in tokens_of:
        found = [len(tokens) for tokens in microbatches]
        expected = f"expected NUM_MICROBATCHES ({NUM_MICROBATCHES}) of shape.micro_batch_size ({size})"
        noun = "microbatch" if len(found) == 1 else "microbatches"
        ran = f"{len(found)} {noun} of {', '.join(map(str, dict.fromkeys(found)))} sequences"
        yield found != [size] * NUM_MICROBATCHES, f"a step runs {ran}; {expected}"
        yield _repeats(microbatches), "the microbatches of a step are the same", "each has sequences of its own"
    batches = [torch.cat(microbatches) for microbatches in tokens_of]
    yield _repeats(batches), "two steps train on the same batch", "pass the number of the step to batch"
    again = "no step may use what another one has, as step + i does"
    every = [microbatch for microbatches in tokens_of for microbatch in microbatches]
    yield _repeats(every), "a microbatch comes twice in the training", again
    shared = all(len(tokens.unique(dim=0)) < len(tokens) for tokens in batches)
    split = "split one batch of NUM_MICROBATCHES * micro_batch_size into them"
    yield shared, "the microbatches of a step share sequences", split


def _repeats(tensors: Sequence[Tensor]) -> bool:
    """Whether two have the same sequences, in any order."""
    return len({tuple(sorted(map(tuple, tensor.tolist()))) for tensor in tensors}) < len(tensors)


def _faults_of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[tuple]:
    kind, usual = type(optimizer).__name__, torch.optim.AdamW([torch.zeros(1)], lr=LEARNING_RATE).defaults
    yield not isinstance(optimizer, torch.optim.AdamW), f"the optimizer is {kind}; expected torch.optim.AdamW"
    for group in optimizer.param_groups:
        for name in ("lr", "weight_decay", "betas", "eps", "amsgrad", "maximize"):
            give = "give AdamW lr=LEARNING_RATE, and nothing else"
            yield group[name] != usual[name], f"{name} is {group[name]}; expected {usual[name]}", give


def _faults_of_norms(norms: list[float]) -> Iterator[tuple]:
    """AdamW takes nearly the same steps from gradients of any length, so that a limit left out hardly shows in the
    losses."""
    longest, give = max(norms), f"pass MAX_NORM ({MAX_NORM}) to training_step as it is"
    clipped = sum(math.isclose(norm, longest, rel_tol=1e-5) for norm in norms) > 1
    short = clipped and longest < MAX_NORM * (1 - 1e-3)
    yield short, f"gradients are scaled down to a norm of {longest:.3g}", give
    yield longest > MAX_NORM * (1 + 1e-5), f"gradients with a norm of {longest:.3g} reach the optimizer", give
