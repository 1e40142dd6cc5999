"""Lab 6's training: the loss curve is one and the same in every mode."""

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
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem_course.judge.solutions.lab6_train import LEARNING_RATE, MAX_NORM, NUM_MICROBATCHES
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench
from actmem_course.standard_library import standard_library

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
    heads = 2 * b.size
    shape = ModelShape(4 * b.size, 2, 4 * heads, heads, num_layers=1, vocab_size=256)
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
