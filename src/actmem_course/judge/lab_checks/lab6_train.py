"""Lab 6's batch, model and training: one text on all ranks, the same weights and one loss curve in every mode.

No cases: many batches, ways to draw the same weights, and loops are right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from actmem.config import ModelShape
from actmem.formulas.activations import TABLE2, Configuration
from actmem.formulas.first_stage import stage_extra_rows, stage_rows
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem.rows import Row, total
from actmem_course.judge.compare import another_kind
from actmem_course.judge.kept import Keeping
from actmem_course.judge.solutions.lab6_train import LEARNING_RATE, MAX_NORM, NUM_MICROBATCHES
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench
from actmem_course.standard_library import standard_library


def check_batch(b: Bench) -> None:
    s, size = 9, 4
    # Every token occurs once, so that a piece's place in the text is known, and neighbours are no neighbours as numbers.
    text = torch.stack((torch.arange(200), torch.arange(200) + 1000), 1).flatten().to(b.device)
    batches = [_windows(b, text, step, s, size) for step in (0, 1, 0)]
    tokens, targets = batches[0]
    if torch.equal(targets, tokens):
        raise Wrong("targets are the tokens themselves: at each position the target is the next token")
    if torch.equal(targets[:, 1:], tokens[:, :-1]):
        raise Wrong("targets are shifted the wrong way: they are the previous tokens, and must be the next ones")
    _check_pieces(text, tokens, targets)
    # First of all other comparisons: ranks that draw by themselves differ in each of them.
    if not all(torch.equal(tokens.cpu(), other) for other in b.gather(tokens.cpu())):
        raise Wrong(
            "ranks have different batches: a tensor-parallel group shares one model and works on one batch; "
            "different data for each rank is data parallelism"
        )
    if not torch.equal(tokens, batches[2][0]):
        raise Wrong(
            "the same step gives another batch the second time: choose the pieces by step alone, or runs cannot be compared"
        )
    if torch.equal(tokens, batches[1][0]):
        raise Wrong("steps 0 and 1 have the same batch: choose different pieces each step")
    if len({tuple(row.tolist()) for row in tokens}) < size:
        raise Wrong("rows of one batch are equal: choose a different piece for each")
    later = [tokens, *(_windows(b, text, step, s, size)[0] for step in range(1, 7))]
    for i, one in enumerate(later):
        for j in range(i):
            if torch.equal(one, later[j]):
                raise Wrong(f"steps {j} and {i} have the same batch: choose different pieces each step")
    for length in (s + size, 2 * s, 2 * s + 1):
        _check_the_end(b, s, size, length)


def _check_pieces(text: Tensor, tokens: Tensor, targets: Tensor) -> None:
    """Raise Wrong unless each row is a piece of text, and its targets the piece one token further on."""
    size, s = tokens.shape
    for row in range(size):
        start = (text == tokens[row, 0]).nonzero()
        if len(start) != 1 or not torch.equal(text[start[0, 0] : start[0, 0] + s], tokens[row]):
            raise Wrong(f"row {row} of tokens is not a piece of text: expected {s} consecutive tokens")
        end = start[0, 0] + 1
        right, found = text[end : end + s], targets[row]
        if torch.equal(right, found):
            continue
        at = (text == found[0]).nonzero()
        if len(at) and torch.equal(text[at[0, 0] : at[0, 0] + s], found):
            ahead = int(at[0, 0] - start[0, 0])
            raise Wrong(f"row {row} of targets is {ahead} tokens ahead of tokens; the next token is 1 ahead")
        if torch.equal(right[:-1], found[:-1]):
            raise Wrong(
                "only the last target of a row is wrong: it is the token after the piece, so cut seq_length + 1"
            )
        raise Wrong(f"row {row} of targets is not the piece of text one token further on")


def _check_the_end(b: Bench, s: int, size: int, length: int) -> None:
    """A text with room for few pieces: whoever runs over its end does so here."""
    text = torch.arange(length, device=b.device)
    case = f"a text of {len(text)} tokens: "
    over = f"{case}a piece runs over its end; the last one starts at len(text) - seq_length - 1"
    for step in range(20):
        try:
            tokens, targets = _windows(b, text, step, s, size, case)
        except (IndexError, RuntimeError) as error:
            raise Wrong(f"{over} ({type(error).__name__})") from None
        if not torch.equal(targets, tokens + 1):
            raise Wrong(over)


def _windows(b: Bench, text: Tensor, step: int, s: int, size: int, case: str = "") -> tuple[Tensor, Tensor]:
    # Another state of the default generator on every rank and at every call: what draws from it shows.
    torch.manual_seed(7919 * b.rank + int(torch.randint(10**6, ())))
    with b.watching():
        result = b["batch"](text, step, s, size)
    if (
        not isinstance(result, (tuple, list))
        or len(result) != 2
        or not all(isinstance(part, Tensor) for part in result)
    ):
        raise Wrong("expected two tensors, tokens and targets" + (": is a return missing?" if result is None else ""))
    for name, part in zip(("tokens", "targets"), result):
        if part.shape != (size, s):
            raise Wrong(f"{case}{name} has shape {list(part.shape)}; expected {[size, s]}: [batch_size, seq_length]")
        if part.dtype != text.dtype:
            raise Wrong(f"{name} has dtype {part.dtype}; expected {text.dtype}, as in text")
    return result[0], result[1]


_DROPOUT = 0.1


def small_shape(b: Bench) -> ModelShape:
    """A model that trains in no time; bytes are its tokens."""
    heads = 2 * b.size
    return ModelShape(4 * b.size, 2, 4 * heads, heads, num_layers=1, vocab_size=256)


def mode_named(name: str) -> Configuration:
    """The row of table 2 of that name."""
    return next(mode for mode in TABLE2 if mode.name == name)


def mode_rows(b: Bench, shape: ModelShape, mode: Configuration, recompute: str, element_size: int = 2) -> list[Row]:
    """What one microbatch keeps on a rank, by formula, with what the paper leaves out."""
    parallel = mode.parallel(b.size)
    extras = stage_extra_rows(shape, parallel, 0, recompute, element_size=element_size, device_type=b.device)
    return [*stage_rows(shape, parallel, 0, recompute, element_size=element_size), *extras]


def check_make_model(b: Bench) -> None:
    shape, reference = small_shape(b), None
    for mode in TABLE2:
        for dropout in (0.0, _DROPOUT) if mode is TABLE2[0] else (_DROPOUT,):
            torch.manual_seed(b.rank)  # ranks of a real run do not start alike
            with b.watching():
                model = b["make_model"](shape, mode, b.group, dropout=dropout, dtype=torch.float64, device=b.device)
            if not isinstance(model, GPT):
                raise another_kind("a GPT", model)
            _check_cut(b, model, mode)
            whole = _put_together(b, model, mode)
            reference = reference or whole
            _check_same(mode, whole, reference)
            _check_kept(b, model, mode, shape, dropout)
        b.progress()


def _check_cut(b: Bench, model: GPT, mode: Configuration) -> None:
    t, sequence_parallel = b.size if mode.tensor_parallel else 1, mode.parallel(b.size).sequence_parallel
    if model.tp.size != t:
        raise Wrong(
            f"mode {mode.name!r}: the model is shared among {model.tp.size} rank{'s' * (model.tp.size > 1)}, not {t}"
        )
    if sequence_parallel != model.tp.sequence_parallel:
        raise Wrong(
            f"mode {mode.name!r}: sequence_parallel is {model.tp.sequence_parallel}, but the mode says {sequence_parallel}: "
            "pass it to tensor_parallel(group, sequence_parallel=…)"
        )
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    if dtypes != {"float64"}:
        raise Wrong(
            f"parameters are {', '.join(sorted(dtypes))}, although dtype=float64 was given: pass **factory to GPT"
        )


def _check_same(mode: Configuration, whole: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    for name, weight in whole.items():
        if not torch.equal(weight, reference[name]):
            raise Wrong(
                f"mode {mode.name!r}: {name} is not the same as in mode {TABLE2[0].name!r}: pass seed=SEED to GPT in every mode"
            )


def _check_kept(b: Bench, model: GPT, mode: Configuration, shape: ModelShape, dropout: float) -> None:
    """Which recompute and which dropout a model has shows in what it keeps."""
    tokens = torch.zeros(shape.micro_batch_size, shape.seq_length, dtype=torch.int64, device=b.device)
    with b.watching(), Keeping([*model.parameters(), *model.buffers()]) as keeping:
        loss = model.loss(model(tokens), tokens)
        found = keeping.kept().bytes
    del loss
    expected = {
        (r, p): _bytes(b, shape, mode, r, p)
        for p in (dropout, _DROPOUT - dropout)
        for r in ("none", "selective", "full")
    }
    if found == expected[mode.recompute, dropout]:
        return
    has = next((case for case, size in expected.items() if size == found), None)
    case = f"mode {mode.name!r}, dropout={dropout}: the model keeps {found:,} B, and {expected[mode.recompute, dropout]:,} B by formula"
    if has and has[0] == mode.recompute:
        raise Wrong(f"{case}, as if dropout were {has[1]}: pass p=dropout to GPT")
    if has:
        raise Wrong(f"{case}, as with recompute={has[0]!r}: pass recompute=mode.recompute to GPT")
    raise Wrong(case)


def _bytes(b: Bench, shape: ModelShape, mode: Configuration, recompute: str, dropout: float) -> int:
    rows = mode_rows(b, shape, mode, recompute, element_size=8)
    if not dropout:  # no masks, and the softmax's own output goes on
        rows = [row for row in rows if "dropout" not in row.term]
    return total(rows)


def _put_together(b: Bench, model: GPT, mode: Configuration) -> dict[str, Tensor]:
    """The unsharded weights from all ranks' parts.  Raises Wrong if the parts do not belong together."""
    own = {name: (p.detach().cpu(), getattr(p, "partition_dim", None)) for name, p in model.named_parameters()}
    everyone, whole = b.gather(own), {}
    for name, (part, dim) in own.items():
        parts = [weights[name][0] for weights in everyone]
        if not mode.tensor_parallel or dim is None:
            if not all(torch.equal(parts[0], other) for other in parts):
                raise Wrong(
                    f"mode {mode.name!r}: {name} is replicated, but differs between the ranks: "
                    "pass seed=SEED to GPT, the same on all ranks"
                )
            whole[name] = part
            continue
        constant = (part == part.flatten()[0]).all()
        if b.size > 1 and not constant and torch.equal(parts[0], parts[1]):
            raise Wrong(
                f"mode {mode.name!r}: the ranks' parts of {name} are equal, but they are different rows of one weight: "
                "GPT(…, tp, seed=SEED) draws each rank's own"
            )
        whole[name] = torch.cat(parts, dim)
    return whole


_NUM_STEPS = 5
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


def check_train(b: Bench) -> str:
    shape = small_shape(b)
    text = standard_library(20_000, b.device)
    curves = {}
    for mode in TABLE2:
        b.progress(f"mode {mode.name}")
        with b.watching(), _looking() as seen:
            losses = b["train"](shape, mode, text, _NUM_STEPS, b.group, dtype=torch.float64, device=b.device)
        _check_losses(b, mode, losses)
        _check_mode(b, mode, seen)
        _check_steps(shape, seen)
        _check_norms(seen)
        curves[mode.name] = losses
    first = curves[TABLE2[0].name]
    for name, losses in curves.items():
        apart = next(
            (i for i, (a, c) in enumerate(zip(first, losses)) if not math.isclose(a, c, rel_tol=_TOLERANCE)), None
        )
        if apart is not None:
            why = "the updates differ" if apart else "the models or the batches differ"
            raise Wrong(
                f"the losses of mode {name!r} differ from those of mode {TABLE2[0].name!r} from step {apart + 1} on, so {why}"
            )
    if not first[-1] < first[0]:
        raise Wrong(f"the loss does not fall: {first[0]:.4f} at first, {first[-1]:.4f} after {_NUM_STEPS} steps")
    return f"loss {first[0]:.4f} → {first[-1]:.4f} in {_NUM_STEPS} steps, the same in all {len(curves)} modes"


def _check_losses(b: Bench, mode: Configuration, losses: object) -> None:
    if losses is None:
        raise Wrong("the result is None: is a return missing?")
    if not isinstance(losses, list):
        raise Wrong(f"expected a list of floats, got {type(losses).__name__}")
    if not all(isinstance(loss, float) for loss in losses):
        raise Wrong(
            f"expected a list of floats, got one with {', '.join(sorted({type(loss).__name__ for loss in losses}))}"
        )
    if len(losses) != _NUM_STEPS:
        raise Wrong(f"expected {_NUM_STEPS} losses, one per step, got {len(losses)}")
    if any(other != losses for other in b.gather(losses)):
        raise Wrong(f"mode {mode.name!r}: ranks have different losses")


def _check_mode(b: Bench, mode: Configuration, seen: Seen) -> None:
    """Curves are equal, of course, if every mode trains the same model."""
    for model in seen.models:
        dtypes = {parameter.dtype for parameter in model.parameters()}
        if dtypes != {torch.float64}:
            found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise Wrong(
                f"the trained model is in {found}, although dtype=float64 was given: pass **factory to make_model"
            )
        if model.embedding_dropout.num_dropped:
            raise Wrong(
                "the model trains with dropout, which differs from mode to mode: leave make_model's dropout at 0"
            )
        cut, mode_cuts = model.tp.size > 1, mode.tensor_parallel and b.size > 1
        recompute = {layer.recompute.name for layer in model.modules() if isinstance(layer, TransformerLayer)}
        if cut != mode_cuts or recompute != {mode.recompute} or model.tp.sequence_parallel != mode.sequence_parallel:
            raise Wrong(f"mode {mode.name!r}: the trained model is in another mode: pass mode to make_model")


def _check_norms(seen: Seen) -> None:
    """AdamW takes nearly the same steps from gradients of any length, so that a limit left out hardly shows in the losses."""
    longest = max(seen.norms)
    clipped = sum(math.isclose(norm, longest, rel_tol=1e-5) for norm in seen.norms) > 1
    if any(model.tp.size == 1 for model in seen.models) and clipped and longest < MAX_NORM * (1 - 1e-3):
        raise Wrong(
            f"gradients are scaled down to a norm of {longest:.3g}: pass MAX_NORM ({MAX_NORM}) to training_step as it is"
        )
    if any(model.tp.size == 1 for model in seen.models) and longest > MAX_NORM * (1 + 1e-5):
        raise Wrong(
            f"gradients with a norm of {longest:.3g} reach the optimizer: pass MAX_NORM ({MAX_NORM}) to training_step"
        )


def _check_steps(shape: ModelShape, seen: Seen) -> None:
    if len(seen.models) > 1:
        raise Wrong(f"{len(seen.models)} models are made in one training: make it once, before the first step")
    if len(seen.optimizers) != _NUM_STEPS:
        raise Wrong(f"optimizer.step() is called {len(seen.optimizers)} times in {_NUM_STEPS} steps")
    if len(set(map(id, seen.optimizers))) > 1:
        raise Wrong("a new optimizer in every step forgets AdamW's averages: make it once, before the first step")
    optimizer = seen.optimizers[0]
    if not isinstance(optimizer, torch.optim.AdamW):
        raise Wrong(f"the optimizer is {type(optimizer).__name__}; expected torch.optim.AdamW")
    rates = {group["lr"] for group in optimizer.param_groups}
    if rates != {LEARNING_RATE}:
        raise Wrong(
            f"the learning rate is {', '.join(map(str, sorted(rates)))}; expected lr=LEARNING_RATE ({LEARNING_RATE})"
        )
    usual = torch.optim.AdamW([torch.zeros(1)]).defaults
    for name in ("weight_decay", "betas", "eps", "amsgrad", "maximize"):
        if any(group[name] != usual[name] for group in optimizer.param_groups):
            raise Wrong(
                f"{name} is {optimizer.param_groups[0][name]}; expected AdamW's own, {usual[name]}: give it the learning rate only"
            )
    size = shape.micro_batch_size
    for microbatches in seen.tokens[:_NUM_STEPS]:
        found = [len(tokens) for tokens in microbatches]
        if found != [size] * NUM_MICROBATCHES:
            raise Wrong(
                f"a step runs microbatches of {', '.join(map(str, found))} sequences; expected NUM_MICROBATCHES ({NUM_MICROBATCHES}) "
                f"of shape.micro_batch_size ({size})"
            )
    steps = [torch.cat(microbatches) for microbatches in seen.tokens[:_NUM_STEPS]]
    if any(torch.equal(steps[0], other) for other in steps[1:]):
        raise Wrong("two steps train on the same batch: pass the number of the step to batch")
    if all(len(torch.cat(tokens).unique(dim=0)) < size * NUM_MICROBATCHES for tokens in seen.tokens[:_NUM_STEPS]):
        raise Wrong(
            "the microbatches of a step share sequences: cut one batch of NUM_MICROBATCHES * micro_batch_size into them"
        )
