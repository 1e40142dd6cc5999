"""Lab 6: on what each answer is judged, and the mistakes that are edits of ours."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import combinations
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
from actmem.ledger.comms import Collective
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import load_dense
from actmem_course.judge.case import CaseRun
from actmem_course.judge.compare import another_kind, grad_of
from actmem_course.judge.kept import Keeping
from actmem_course.judge.solutions import lab6_train as ours
from actmem_course.judge.solutions.lab6_train import LEARNING_RATE, MAX_NORM, NUM_MICROBATCHES
from actmem_course.judge.verdict import Wrong, clipped, refuse
from actmem_course.judge.workbench import Bench
from actmem_course.standard_library import standard_library


def batch(r: CaseRun) -> str | None:
    """Many batches are right, so what counts is how targets lie beside tokens, and which batches are the same."""
    s, size = 9, 8
    # Every token occurs once, so that a piece's place in the text is known, and neighbours are no neighbours as numbers.
    text = torch.stack((torch.arange(200), torch.arange(200) + 1000), 1).flatten().to(r.device)
    place, drawn = {token: i for i, token in enumerate(text.tolist())}, {}
    for name, step in {**{f"step {step}": step for step in range(7)}, "step 0 again": 0}.items():
        rows, following = (part.tolist() for part in _windows(r, text, step, s, size))
        starts = [place.get(row[0], 0) for row in rows]
        for k, (start, row) in enumerate(zip(starts, rows)):
            if row != text[start : start + s].tolist():
                raise Wrong(f"row {k} of tokens is not a piece of text: expected {s} consecutive tokens")
        by_row = [{place.get(t, -1) - start - i for i, t in enumerate(row)} for start, row in zip(starts, following)]
        ahead = set[int]().union(*by_row)
        elsewhere = "the targets come from other places in the text than the tokens: draw the starts once, for both"
        refuse([(len(ahead) > 1 and all(len(one) == 1 for one in by_row), elsewhere)])
        why = "the target of a token is the one that follows it"
        r.see("by how many tokens targets are ahead", sorted(ahead), "equal", why)
        drawn[name] = starts
    r.see("batches", drawn, "pattern", _batches_fault)
    for name, starts in drawn.items():
        if len(set(starts)) == 1:
            raise Wrong(f"all rows of {name} are the same piece: choose another for each")
    for length in (s + size, 2 * s, 2 * s + 1):
        text = torch.arange(length, device=r.device)  # with room for few pieces: whoever runs over its end does so here
        case = f"a text of {length} tokens: "
        over = f"{case}{_OVER_ITS_END}"
        for step in range(20):
            tokens, targets = _windows(r, text, step, s, size, case)
            if not torch.equal(targets, tokens + 1):
                raise Wrong(over)
    torch.manual_seed(r.rank)
    with r.b.watching():
        r["batch"](text, 0, s, size)
    seeds = "right, but it seeds torch's default generator, from which dropout draws: give randint one of its own"
    return seeds if torch.initial_seed() != r.rank else None


_OVER_ITS_END = "a piece runs over the text's end; the last one starts at len(text) - seq_length - 1"


def _batches_fault(one: tuple[str, int], other: tuple[str, int], same: bool) -> tuple[float, str]:
    """What it means that two batches are the same, or are not; the gravest first."""
    (name, rank), (other_name, other_rank) = one, other
    if same:
        both = f"{name.removesuffix(' again')} and {other_name}"
        return 2, f"{both} have the same batch: choose different pieces each step"
    if name == other_name:
        return 0, _OTHER_BATCHES
    return 1 - (rank != other_rank) / 2, (
        "the same step gives another batch the second time: choose the pieces by step alone, or runs cannot be compared"
    )


def _windows(r: CaseRun, text: Tensor, step: int, s: int, size: int, case: str = "") -> tuple[Tensor, Tensor]:
    # Another state of the default generator on every rank and at every call: what draws from it shows.
    r.b.seed(7919 * r.rank + int(torch.randint(10**6, ())))
    try:
        with r.b.watching():
            result = r["batch"](text, step, s, size)
    except (IndexError, RuntimeError) as error:
        if "size" in str(error) or "index" in str(error):
            raise Wrong(f"{case}{_OVER_ITS_END} ({type(error).__name__})") from None
        raise
    pair = isinstance(result, (tuple, list)) and len(result) == 2 and all(isinstance(part, Tensor) for part in result)
    if not pair:
        raise Wrong("expected two tensors, tokens and targets" + (": is a return missing?" if result is None else ""))
    for name, part in zip(("tokens", "targets"), result):
        refuse((
            (part.shape != (size, s), f"{case}{name} has shape {list(part.shape)}; expected {[size, s]}: [batch_size, seq_length]"),
            (part.dtype != text.dtype, f"{name} has dtype {part.dtype}; expected {text.dtype}, as in text"),
        ))  # fmt: skip
    return result[0], result[1]


def small_shape(b: Bench) -> ModelShape:
    """A model that trains in no time; bytes are its tokens."""
    heads = 2 * b.size
    return ModelShape(4 * b.size, 2, 4 * heads, heads, num_layers=1, vocab_size=256)


def make_model(r: CaseRun) -> None:
    """Any weights are right that are the same in every mode, so they are compared with those of the first."""
    shape, first = small_shape(r.b), dict[str, Tensor]()
    for mode, p in [(TABLE2[0], 0.0), *((mode, 0.1) for mode in TABLE2)]:
        r.b.seed(r.rank)  # ranks of a real run do not start alike
        with r.b.watching():
            model = r["make_model"](shape, mode, r.group, dropout=p, dtype=torch.float64, device=r.device)
        if not isinstance(model, GPT):
            raise another_kind("a GPT", model)
        refuse(_faults_of_model(r, model, mode, p))

        def equal(what: str, value: object, why: str) -> None:
            r.see(f"mode {mode.name!r}, dropout={p}: {what}", value, "equal", why)

        own = {name: (x.detach().cpu(), getattr(x, "partition_dim", None)) for name, x in model.named_parameters()}
        everyone = r.b.gather({name: part for name, (part, _) in own.items()})
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
        with r.b.watching(), _keeping(r, model) as keeping:
            loss = model.loss(model(tokens), tokens)
            kept = keeping.kept().bytes if keeping else None
        del loss
        if keeping:
            equal("the number of bytes that the model keeps", kept, "change nothing in GPT")


def _keeping(r: CaseRun, model: GPT) -> AbstractContextManager[Keeping | None]:
    """What a model keeps doesn't depend on the group, and counting takes half the time."""
    return nullcontext() if r.b.group_name else Keeping([*model.parameters(), *model.buffers()])


_RATE = 0.5
#: Norms of the gradient: far above any, and far below.
_NO_LIMIT, _LIMIT = 1e9, 1e-3


def gradient_norm(r: CaseRun) -> str | None:
    """Of models that are shared in one way or the other.  A remark for whoever gathers all gradients: no error."""
    shape = small_shape(r.b)
    dense = GPT(shape, p=0.0, dtype=torch.float64, device=r.device)
    gradients = {name: r.same(*parameter.shape) for name, parameter in dense.named_parameters()}
    sent, often = 0, 0
    for tp in (tensor_parallel(r.group, sequence_parallel=True), tensor_parallel(r.group), TensorParallel()):
        model = GPT(shape, tp, p=0.0, dtype=torch.float64, device=r.device)
        load_dense(model, gradients, tp)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
            parameter.data.mul_(2).add_(1)  # so that the parameters' own norm is another
        case = f"model.tp.size is {tp.size}{', with sequence parallelism' * tp.sequence_parallel}: " if r.t > 1 else ""
        found, exchanges = _norm(r, model)
        r.see_tensor(f"{case}the norm", torch.tensor(found, dtype=torch.float64))
        sent, often = max(sent, sum(c.payload_bytes for c in exchanges)), max(often, len(exchanges))
    if sent > 64:
        return f"right, but it exchanges {sent:,} B; a single number would do"
    return f"right, but it exchanges {often} times; once would do" if often > 1 else None


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


def training_step(r: CaseRun) -> None:
    # Whose gradients are those of the step before shows in the second, on any group.
    _steps(r, "tensor+sequence", _LIMIT, 1 if r.b.group_name else 2)
    if not r.b.group_name:
        _steps(r, "tensor+sequence", _NO_LIMIT)
        for name in ("tensor", "none"):  # whoever forgets the group shows in one of them
            _steps(r, name, _LIMIT)


def _steps(r: CaseRun, name: str, max_norm: float, count: int = 1) -> None:
    """By how much the parameters move in each step, in units of the rate and of a small limit, and the result."""
    mode = next(mode for mode in TABLE2 if mode.name == name)
    model = ours.make_model(small_shape(r.b), mode, r.group, dtype=torch.float64, device=r.device)
    optimizer, calls = torch.optim.SGD(model.parameters(), lr=_RATE), list[None]()
    optimizer.register_step_pre_hook(lambda *_: calls.append(None))
    unit = _RATE * min(1.0, max_norm)
    for number in range(1, count + 1):
        microbatches = random_microbatches(r.b, number)
        # Partial ones first: most mistakes show there.
        parameters = sorted(model.named_parameters(), key=lambda pair: not getattr(pair[1], "partial_gradient", False))
        before = [parameter.detach().clone() for _, parameter in parameters]
        with r.b.watching():
            returned = r["training_step"](model, optimizer, microbatches, max_norm)
        if len(calls) != number:
            often = f"{len(calls) - number + 1} times in one step" if len(calls) > number else "never"
            raise Wrong(f"optimizer.step() runs {often}: once, when the gradients of all microbatches are scaled")
        limited = ", with a norm above max_norm" * (max_norm == _LIMIT)
        case = f"mode {name!r}, step {number}{limited}: "
        for (own, parameter), old in zip(parameters, before):
            r.see_tensor(f"{case}the step of {own}", (old - parameter.detach()) / unit, "near")
        if not isinstance(returned, float):
            missing = ": is a return missing?" if returned is None else ""
            got = clipped(f"got {returned!r}")
            raise Wrong(f"the parameters are right; expected the mean loss as a float, {got}{missing}")
        r.see_tensor(f"{case}the result", torch.tensor(returned, dtype=torch.float64))


def random_microbatches(b: Bench, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of three."""
    shape = small_shape(b)
    generator = torch.Generator().manual_seed(70 + seed)
    sizes = (2, 3, shape.micro_batch_size, shape.seq_length)
    tokens, targets = torch.randint(shape.vocab_size, sizes, generator=generator).to(b.device)
    return list(zip(tokens, targets))


#: Steps in the first mode, and in each other, whose losses must be the same: what train itself does wrong shows in the first.
_NUM_STEPS, _NUM_COMPARED = 5, 3
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


def train(r: CaseRun) -> str:
    """Many loops are right, so each is judged by itself, and the modes by each other; a remark has the losses."""
    shape, text, curves = small_shape(r.b), standard_library(20_000, r.device), dict[str, list[float]]()
    for mode in TABLE2:
        steps = _NUM_COMPARED if curves else _NUM_STEPS
        r.b.progress(f"mode {mode.name}")
        with r.b.watching(), _looking() as seen:
            losses = r["train"](shape, mode, text, steps, r.group, dtype=torch.float64, device=r.device)
        if not isinstance(losses, list):
            raise another_kind("a list of floats", losses)
        refuse(
            (not isinstance(loss, float), f"expected a list of floats, got one with {type(loss).__name__}")
            for loss in losses
        )
        refuse((
            (len(losses) != steps, f"expected {steps} losses, one per step, got {len(losses)}"),
            (any(other != losses for other in r.b.gather(losses)), f"mode {mode.name!r}: ranks have different losses: all ranks of a tensor-parallel group train on the same batches"),
        ))  # fmt: skip
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
                why = "the updates differ" if step else "the models or the batches differ"
                raise Wrong(
                    f"the losses of mode {name!r} differ from those of mode {TABLE2[0].name!r} from step {step + 1} on, so {why}"
                )
    if not first[-1] < first[0]:
        raise Wrong(f"the loss does not fall: {first[0]:.4f} at first, {first[-1]:.4f} after {_NUM_STEPS} steps")
    same = f"the first {_NUM_COMPARED} losses are the same in all {len(curves)} modes"
    return f"loss {first[0]:.4f} → {first[-1]:.4f} in {_NUM_STEPS} steps; {same}"


def _faults_of_model(r: CaseRun, model: GPT, mode: Configuration, p: float) -> Iterator[tuple[object, str]]:
    """What a model is, and isn't in this mode.  Curves are equal, of course, if every mode trains the same model."""
    tp, shared = model.tp, mode.tensor_parallel and r.t > 1
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    modes = {layer.recompute.name for layer in model.modules() if isinstance(layer, TransformerLayer)}
    # A model that nobody shares is right on any group.
    ranks = dist.get_process_group_ranks(tp.group or r.group) if shared and tp.size > 1 else r.b.members
    if not shared:
        size = "only modes with tensor parallelism share the model"
    elif tp.group is None:
        size = "in this mode the ranks share the model: tensor_parallel(group, …) says how"
    else:
        size = "TensorParallel(group) by itself is one rank: tensor_parallel(group, …) asks group for its size"
    for what, found, right, why in (
        ("model.tp.size", tp.size, r.t if shared else 1, size),
        ("the list of model.tp.group's ranks", ranks, r.b.members, "give group to tensor_parallel"),
        ("model.tp.sequence_parallel", tp.sequence_parallel, mode.sequence_parallel, "give mode's to tensor_parallel"),
        ("model.tp.keep_gathered_input", tp.keep_gathered_input, False, "table 2 keeps each rank's own tokens"),
        ("the parameters' dtype", ", ".join(sorted(dtypes)), "float64", "pass **factory on"),
        ("the layers' recompute", ", ".join(sorted(modes)), mode.recompute, "give mode.recompute to GPT"),
        ("the dropout", round(model.embedding_dropout.num_dropped / 2**16, 3), p, "give dropout to GPT, as p; train has none"),
    ):  # fmt: skip
        yield found != right, f"mode {mode.name!r}, dropout={p}: {what} is {found}; expected {right}: {why}"


def _faults_of_steps(seen: Seen, size: int, steps: int) -> Iterator[tuple[object, str]]:
    many = f"{len(seen.models)} models are made in one training: make it once, before the first step"
    yield len(seen.models) > 1, many
    count = len(seen.optimizers)
    yield count != steps, f"optimizer.step() is called {count} times in {steps} steps"
    forgets = "a new optimizer in every step forgets AdamW's averages: make it once, before the first step"
    yield len(set(map(id, seen.optimizers))) > 1, forgets
    optimizer = seen.optimizers[0]
    kind = type(optimizer).__name__
    yield not isinstance(optimizer, torch.optim.AdamW), f"the optimizer is {kind}; expected torch.optim.AdamW"
    usual = {**torch.optim.AdamW([torch.zeros(1)]).defaults, "lr": LEARNING_RATE}
    for group in optimizer.param_groups:
        lr = group["lr"]
        yield lr != LEARNING_RATE, f"the learning rate is {lr}; expected lr=LEARNING_RATE ({LEARNING_RATE})"
        for name in ("weight_decay", "betas", "eps", "amsgrad", "maximize"):
            words = f"{name} is {group[name]}; expected AdamW's own, {usual[name]}: give it the learning rate only"
            yield group[name] != usual[name], words
    tokens_of = seen.tokens[:steps]
    for microbatches in tokens_of:
        found = [len(tokens) for tokens in microbatches]
        words = f"expected NUM_MICROBATCHES ({NUM_MICROBATCHES}) of shape.micro_batch_size ({size})"
        ran = f"{len(found)} microbatch{'es' * (len(found) != 1)} of {', '.join(map(str, dict.fromkeys(found)))} sequences"
        yield found != [size] * NUM_MICROBATCHES, f"a step runs {ran}; {words}"
        twice = "the microbatches of a step are the same: each has sequences of its own"
        yield any(torch.equal(one, other) for one, other in combinations(microbatches, 2)), twice
    batches = [torch.cat(microbatches) for microbatches in tokens_of]
    same = any(torch.equal(batches[0], other) for other in batches[1:])
    yield same, "two steps train on the same batch: pass the number of the step to batch"
    every = [microbatch for microbatches in tokens_of for microbatch in microbatches]
    again = any(torch.equal(one, other) for one, other in combinations(every, 2))
    yield again, "a microbatch comes twice in the training: no step may use what another one has, as step + i does"
    shared = all(len(tokens.unique(dim=0)) < len(tokens) for tokens in batches)
    words = "the microbatches of a step share sequences: cut one batch of NUM_MICROBATCHES * micro_batch_size into them"
    yield shared, words


def _faults_of_norms(norms: list[float]) -> Iterator[tuple[object, str]]:
    """AdamW takes nearly the same steps from gradients of any length, so that a limit left out hardly shows in the losses."""
    longest = max(norms)
    clipped = sum(math.isclose(norm, longest, rel_tol=1e-5) for norm in norms) > 1
    words = (
        f"gradients are scaled down to a norm of {longest:.3g}: pass MAX_NORM ({MAX_NORM}) to training_step as it is"
    )
    yield clipped and longest < MAX_NORM * (1 - 1e-3), words
    words = f"gradients with a norm of {longest:.3g} reach the optimizer: pass MAX_NORM ({MAX_NORM}) to training_step"
    yield longest > MAX_NORM * (1 + 1e-5), words


_EXCHANGED = (
    "    if model.tp.size > 1:\\n        dist.all_reduce(cut, group=model.tp.group)\\n    return math.sqrt(cut + whole)"
)
_OF_NORMS = "    norm = (cut + whole).sqrt()\\n    if model.tp.size > 1:\\n        dist.all_reduce(norm, {}group=model.tp.group)\\n    return norm.item()"
_REDUCE, _NORM = "    reduce_partial_gradients(model, model.tp)", "    norm = gradient_norm(model)"
_BACKWARD, _STEP = "        loss.backward()", r"    optimizer.step()\n"
_REDUCED = f"{_REDUCE.lstrip()}"
_SUMMED = "[dist.all_reduce(p.grad{}, group=model.tp.group) for p in model.parameters() if model.tp.size > 1]"
_CLIPPED = "norm = gradient_norm(model); [p.grad.mul_(min(1.0, max_norm / norm)) for p in model.parameters()]"
_CALL_IT = "Call it once: after the last backward, before gradient_norm"
_BY_THE_WHOLE = "by max_norm / norm, with the norm of the whole, complete gradient (gradient_norm)"
_ONCE = f"reduce_partial_gradients runs after each backward, so that sums are summed again. {_CALL_IT}"
_LATE = f"reduce_partial_gradients runs after gradient_norm, so the norm is that of incomplete gradients. {_CALL_IT}"
_TOO_LONG = "the gradient is too large by the number of microbatches: divide each loss by their number before backward"
_AS_DATA = (
    "gradients of cut parameters are summed over the ranks, but each rank has its own part, with its whole gradient: call "
    "reduce_partial_gradients instead (this is not a data-parallel group)"
)
_OWN_NORM = f"each parameter's gradient is scaled by its own norm: scale all of them {_BY_THE_WHOLE}"
_EACH_CLIPPED = "the gradient is clipped after each microbatch: clip the sum, once, after the last"
_LAST = "only the last microbatch counts: call zero_grad once, before the first, so that gradients add up"
#: Where the statements of a training step belong.
PLACES = {
    "optimizer.zero_grad()": "before the first backward",
    "reduce_partial_gradients": "after the last backward, before gradient_norm",
    "gradient_norm": "after reduce_partial_gradients",
    "“if norm > max_norm”": "between gradient_norm and optimizer.step()",
    "optimizer.step()": "at the end",
}
_OTHER_BATCHES = (
    "ranks have different batches: a tensor-parallel group shares one model and works on one batch; different data for each rank "
    "is data parallelism"
)
_DIFFERS = "a weight that every rank has differs between the ranks: pass seed=SEED to GPT, the same on all ranks"
_PIECES = "windows[:, :-1], windows[:, 1:]"
MISTAKES = {
    "6.1": rf"""
        {_PIECES} -> windows[:, :-1], windows[:, :-1] | targets are the tokens themselves: at each position the target is the next token
        {_PIECES} -> windows[:, 1:], windows[:, :-1] | targets are the previous tokens: they must be the next ones
        seq_length + 1, -> seq_length + 2, ;; {_PIECES} -> windows[:, :-2], windows[:, 2:] | targets are 2 tokens ahead of tokens; the next token is 1 ahead
        windows[:, 1:] -> windows[:, :-1].roll(-1, 1) | only the last target of a row is wrong: it is the token after the piece, so cut seq_length + 1
        SEED + step) -> 1000 * dist.get_rank() + step) | {_OTHER_BATCHES}
        (batch_size,), generator -> (batch_size // dist.get_world_size(),), generator | each rank has its share of the sequences: that is data parallelism. The ranks of a tensor-parallel group work on the same, whole batch
        , generator=torch.Generator().manual_seed(SEED + step) ->  | ranks have different batches, and one step has another each time: pass generator=torch.Generator().manual_seed(SEED + step) to torch.randint
        SEED + step) -> SEED) | every step has the same batch: choose different pieces each step
    """,
    "6.2": rf"""
        seed=SEED -> seed=torch.initial_seed() | {_DIFFERS}
        seed=SEED -> seed=SEED + dist.get_rank(group) | {_DIFFERS}
        p=dropout -> p=1.0 - dropout | GPT's p is the probability to drop, as dropout is: pass dropout itself, not 1 − dropout
        seed=SEED -> seed=SEED + len(mode.name) | the weights are not the same as in mode 'none': pass seed=SEED to GPT in every mode
    """,
    "6.3": rf"""
        dist.all_reduce(cut, group=model.tp.group) -> pass | only this rank's parameters are counted: the squares of those that are cut must be summed over the ranks
        hasattr(parameter, "partition_dim") -> True | parameters that are replicated are counted t times: sum the squares of the cut ones over the ranks, and add the others once
        `{_EXCHANGED}` -> {_OF_NORMS.format("")} | the ranks' norms are added up: add squares, and take the root of the sum
        `{_EXCHANGED}` -> {_OF_NORMS.format("dist.ReduceOp.MAX, ")} | this is the largest of the ranks' norms: the squares must be summed over the ranks
        square = parameter.grad.double().square().sum()\n -> square = parameter.grad.double().square().sum()\n        if model.tp.size > 1 and hasattr(parameter, "partition_dim"):\n            dist.all_reduce(square, group=model.tp.group)\n        square = square.sqrt()\n ;; `        dist.all_reduce(cut, group=model.tp.group)` ->         pass ;; return math.sqrt(cut + whole) -> return float(cut + whole) | the parameters' norms are added up: add squares, and take the root of the sum
        hasattr(parameter, "partition_dim") -> getattr(parameter, "partition_dim", None) | parameters that are cut along dimension 0 are treated as replicated: partition_dim is 0 there, so ask hasattr
        hasattr(parameter, "partition_dim") -> parameter.dim() > 1 | parameters are treated as cut by their shape, but biases can be cut as well: whatever has a partition_dim is cut
        return math.sqrt(cut + whole) -> return math.sqrt(cut**2 + whole) ;; `        dist.all_reduce(cut, group=model.tp.group)` ->         cut.sqrt_()\n        dist.all_reduce(cut, group=model.tp.group) | the ranks' norms are added up: add squares, and take the root of the sum
        parameter.grad.double().square().sum() -> parameter.grad.double().norm() | the parameters' norms are added up: add squares, and take the root of the sum
        parameter.grad.double().square().sum() -> parameter.grad.double().abs().sum() | absolute values are added up: the 2-norm adds squares
        return math.sqrt(cut + whole) -> return float(cut + whole) | the root is missing: this is the sum of the squares
        return math.sqrt(cut + whole) -> return math.sqrt(cut) | parameters that are replicated are left out
        return math.sqrt(cut + whole) -> return math.sqrt(cut / model.tp.size + whole) | the squares are averaged over the ranks, not summed
        if model.tp.size > 1:\n        dist.all_reduce(cut, group=model.tp.group) -> dist.all_reduce(cut) | a model that is not shared (model.tp.size is 1) is summed over all ranks: exchange nothing in that case
        dist.all_reduce(cut, -> dist.reduce(cut, dist.get_global_rank(model.tp.group, 0), | the norm is right on rank 0 only: every rank needs it, so all-reduce
        parameter.grad.double() -> parameter.detach().double() | this is the norm of the parameters; expected that of their .grad
        parameter.grad.double().square().sum() -> parameter.grad.double().norm() ;; return math.sqrt(cut + whole) -> return float(cut + whole) | the parameters' norms are added up: add squares, and take the root of the sum
        if hasattr(parameter, "partition_dim") -> if not hasattr(parameter, "partition_dim") | the squares of the replicated parameters are summed over the ranks, not those of the cut ones: whatever has a partition_dim is cut
        parameter.grad.double().square().sum() -> parameter.grad.double().abs().max() ** 2 | the largest element of each gradient is taken: the 2-norm adds up the squares of all
        hasattr(parameter, "partition_dim") -> getattr(parameter, "partition_dim", None) != 0 | replicated parameters are treated as cut, and those cut along dimension 0 as replicated: whatever has a partition_dim is cut
        hasattr(parameter, "partition_dim") -> getattr(parameter, "partition_dim", None) == 0 | parameters that are cut along dimension 1 are treated as replicated: whatever has a partition_dim is cut
    """,
    "6.4": rf"""
        optimizer.zero_grad() -> pass | the gradients of the step before are still there: call optimizer.zero_grad() before the first backward
        `{_REDUCE}` ->     pass | reduce_partial_gradients is missing: under sequence parallelism some parameters saw only this rank's tokens. {_CALL_IT}
        `{_REDUCE}` ->     pass ;; `{_NORM}` -> {_NORM}; {_REDUCED} | {_LATE}
        `{_REDUCE}` ->     pass ;; `{_STEP}` ->     {_REDUCED}\n{_STEP} | {_LATE}
        if norm > max_norm -> if False | the gradients are not scaled down where their norm is larger than max_norm
        parameter.grad *= max_norm / norm -> parameter.grad *= norm / max_norm | the gradients are scaled up, by norm / max_norm: scale them by max_norm / norm
        parameter.grad *= max_norm / norm -> parameter.grad *= (max_norm / norm) ** 2 | the gradients are scaled by max_norm / norm twice: scale them once
        ` / len(microbatches)\n` -> \n | {_TOO_LONG}
        ` / len(microbatches)\n` -> \n ;; return total -> return total / len(microbatches) | {_TOO_LONG}
        loss.backward() -> (loss / len(microbatches)).backward() | steps are too short: the losses are divided by the number of microbatches twice
        `{_BACKWARD}` ->         optimizer.zero_grad(); loss.backward() | {_LAST}
        `{_BACKWARD}` ->         optimizer.zero_grad(); (loss * len(microbatches)).backward() | {_LAST}
        in microbatches: -> in microbatches[-1:]: | only the last microbatch counts
        in microbatches: -> in microbatches[:1]: | only the first microbatch counts
        `{_BACKWARD}` -> {_BACKWARD}; {_REDUCED} | {_ONCE}
        `{_REDUCE}` ->     pass ;; `{_BACKWARD}` -> {_BACKWARD}; {_REDUCED} | {_ONCE}
        `{_REDUCE}` -> {_REDUCE}; [p.grad.div_(model.tp.size) for p in model.parameters() if getattr(p, "partial_gradient", False)] | the partial gradients are averaged over the ranks: each rank's part comes from other tokens, so add the parts up, and do not divide by t
        `{_REDUCE}` ->     {_SUMMED.format("")} | {_AS_DATA}
        `{_REDUCE}` ->     {_SUMMED.format(", dist.ReduceOp.AVG")} | {_AS_DATA}
        `{_REDUCE}` -> {_REDUCE}; {_SUMMED.format("")} | {_AS_DATA}
        `{_REDUCE}` -> {_REDUCE}; {_SUMMED.format(", dist.ReduceOp.AVG")} | {_AS_DATA}
        if norm > max_norm: -> if True: | gradients are scaled up to max_norm; scale them only if the norm is larger than max_norm
        `{_NORM}` ->     norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters())) | gradients are scaled by the norm of this rank's parameters, so ranks scale differently; scale each {_BY_THE_WHOLE}
        parameter.grad *= max_norm / norm -> parameter.grad.clamp_(-max_norm, max_norm) | each element of a gradient is clipped to max_norm by itself; scale the gradients down {_BY_THE_WHOLE}
        parameter.grad *= max_norm / norm -> parameter.grad *= min(1.0, max_norm / (parameter.grad.norm().item() + 1e-30)) | {_OWN_NORM}
        parameter.grad *= max_norm / norm -> torch.nn.utils.clip_grad_norm_([parameter], max_norm) | {_OWN_NORM}
        `{_BACKWARD}` -> {_BACKWARD}; {_CLIPPED} | {_EACH_CLIPPED}
        `{_BACKWARD}` -> {_BACKWARD}; {_CLIPPED} ;; if norm > max_norm: -> if False: | {_EACH_CLIPPED}
        return total -> return total * len(microbatches) | the parameters are right, but the result is the sum of the microbatches' losses; return their mean
        return total -> return total / len(microbatches) | the parameters are right, but the result is the mean of the losses, divided by the number of microbatches once more
        return total -> return loss.item() * len(microbatches) | the parameters are right, but the result is the last microbatch's loss; return the mean of all
        return total -> return loss.item() | the parameters are right, but the result is the last microbatch's loss, divided by the number of microbatches; return the mean of all
        total += loss.item() -> total = total or loss.item() * len(microbatches) | the parameters are right, but the result is the first microbatch's loss; return the mean of all
    """,
}
