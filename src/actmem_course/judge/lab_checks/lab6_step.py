"""Lab 6's training step: the parameters move by what the named steps make of the microbatches' gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actmem.formulas.activations import Configuration
from actmem.layers.gpt import GPT
from actmem_course.judge.compare import close, named_value
from actmem_course.judge.lab_checks.lab6_model import mode_named, small_shape
from actmem_course.judge.lab_checks.lab6_training import (
    RankGradients,
    TrainingStart,
    take_training_steps,
    training_mistakes,
    training_program,
)
from actmem_course.judge.solutions.lab6_train import make_model
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench

_RATE = 0.5
#: Far above any norm, and far below.
_NO_LIMIT, _LIMIT = 1e9, 1e-3


def check_training_step(b: Bench) -> None:
    # Whoever forgets the group shows in one mode.
    for name in ("tensor+sequence", "tensor", "none") if not b.group_name else ("tensor+sequence",):
        for max_norm in (_NO_LIMIT, _LIMIT) if not b.group_name else (_LIMIT,):
            _check_two_steps(b, mode_named(name), max_norm)
        b.progress()


def _check_two_steps(b: Bench, mode: Configuration, max_norm: float) -> None:
    model = make_model(small_shape(b), mode, b.group, dtype=torch.float64, device=b.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    left: list[RankGradients] = []
    for number in (1, 2):
        microbatches = random_microbatches(b, number)
        start, losses = training_start(b, model, microbatches, max_norm, left)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with b.watching():
            returned = b["training_step"](model, optimizer, microbatches, max_norm)
        found = {name: (before[name] - p.detach()).cpu() / _RATE for name, p in model.named_parameters()}
        end = take_training_steps(training_program(len(microbatches)), start)
        scale = min(1.0, max_norm / end.norms[b.rank])
        case = f"mode {mode.name!r}, step {number}{', with a norm above max_norm' * (scale < 1)}: "
        _check_moved(b, case, found, start, end.moved, scale)
        _check_loss(case, returned, losses)
        left = end.gradients


def training_start(
    b: Bench, model: GPT, microbatches: list[tuple[Tensor, Tensor]], max_norm: float, left: list[RankGradients]
) -> tuple[TrainingStart, list[float]]:
    """All ranks before a step, and the microbatches' losses.  left: their gradients of the step before, if any."""
    parameters, own, losses = dict(model.named_parameters()), [], []
    for tokens, targets in microbatches:
        loss = model.loss(model(tokens), targets)
        # Not by .grad, which still has what the learner's last step left there.
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        own.append({name: gradient.cpu() for name, gradient in zip(parameters, gradients)})
        losses.append(loss.item())
    of_loss = [list(ranks) for ranks in zip(*b.gather(own))]
    left = left or [{name: 0 * gradient for name, gradient in rank.items()} for rank in of_loss[0]]
    partial = {name for name, parameter in parameters.items() if getattr(parameter, "partial_gradient", False)}
    cut = {name for name, parameter in parameters.items() if hasattr(parameter, "partition_dim") and model.tp.size > 1}
    return TrainingStart(of_loss, left, partial, cut, max_norm), losses


def _check_moved(
    b: Bench, case: str, found: RankGradients, start: TrainingStart, right: list[RankGradients], scale: float
) -> None:
    # Many clip by max_norm / (norm + 1e-6), and that is no mistake.
    tolerance = 1e-8 if scale == 1 else 1e-5 * scale
    everyone = b.gather(found)

    def unlike(some: list[RankGradients], others: list[RankGradients]) -> str:
        """The first parameter that is another on some rank; "" if all are the same."""
        pairs = ((name, one[name], other[name]) for one, other in zip(some, others) for name in one)
        return next((name for name, a, c in pairs if not close(a, c, tolerance)), "")

    if not (wrong := unlike(everyone, right)):
        return
    said = ""
    if b.rank == 0:  # it knows what every rank found
        programs = training_mistakes(len(start.of_loss), b.size)
        made = ((diagnosis, take_training_steps(program, start).moved) for diagnosis, program in programs)
        fits = (diagnosis for diagnosis, moved in made if not unlike(everyone, moved) and unlike(moved, right))
        said = next(fits, f"parameters take a wrong step, the first is {wrong}")
    raise Wrong(case + b.gather(said)[0])


def _check_loss(case: str, returned: object, losses: list[float]) -> None:
    n, mean = len(losses), sum(losses) / len(losses)
    if not isinstance(returned, float):
        missing = ": is a return missing?" if returned is None else ""
        raise Wrong(f"the parameters are right; expected the mean loss as a float, got {returned!r}"[:160] + missing)
    if math.isclose(returned, mean, rel_tol=1e-9):
        return
    known = {
        f"the sum of the {n} microbatches' losses": n * mean,
        f"1/{n} of the mean": mean / n,
        "the last microbatch's loss": losses[-1],
        f"1/{n} of the last microbatch's loss": losses[-1] / n,
        "the first microbatch's loss": losses[0],
    }
    text = named_value(returned, known) or f"{returned:.6g}"
    raise Wrong(f"{case}the parameters are right, but the result is {text}; the mean loss is {mean:.6g}")


def random_microbatches(b: Bench, seed: int, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    shape = small_shape(b)
    generator = torch.Generator().manual_seed(70 + seed)
    sizes = (2, count, shape.micro_batch_size, shape.seq_length)
    tokens, targets = torch.randint(shape.vocab_size, sizes, generator=generator).to(b.device)
    return list(zip(tokens, targets))
