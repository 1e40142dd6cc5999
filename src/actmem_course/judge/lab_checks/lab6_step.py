"""Lab 6's training step: the parameters move as the unsharded model's do."""

from __future__ import annotations

import math

import torch

from actmem.formulas.table2 import Configuration
from actmem_course.judge.lab_checks.lab6_mistakes import explain
from actmem_course.judge.lab_checks.lab6_model import mode_named, small_shape
from actmem_course.judge.lab_checks.lab6_taken import Microbatches, TakenStep, gradients_of
from actmem_course.judge.solutions.lab6_train import make_model
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench

_RATE = 0.5
#: Far above any norm, and far below.
_NO_LIMIT, _LIMIT = 1e9, 1e-3


def check_training_step(b: Bench) -> None:
    for name in ("tensor+sequence", "tensor", "none"):
        for max_norm in (_NO_LIMIT, _LIMIT):
            _check_steps(b, mode_named(name), max_norm)
        b.progress()


def _check_steps(b: Bench, mode: Configuration, max_norm: float) -> None:
    """Two steps, of which every number is known from an unsharded model that takes the same."""
    model = make_model(small_shape(b), mode, b.group, dtype=torch.float64, device=b.device)
    dense = make_model(small_shape(b), mode_named("none"), b.group, dtype=torch.float64, device=b.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    earlier = None
    for number in (1, 2):
        microbatches = _microbatches(b, number)
        gradients, losses = gradients_of(dense, microbatches)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with b.watching():
            returned = b["training_step"](model, optimizer, microbatches, max_norm)
        found = {name: (before[name] - p.detach()) / _RATE for name, p in model.named_parameters()}
        step = TakenStep(model, dense, microbatches, max_norm, found, gradients, earlier)
        clipped = ", with a norm above max_norm" if step.scale < 1 else ""
        case = f"mode {mode.name!r}, step {number}{clipped}: "
        if step.wrong():
            raise Wrong(case + explain(step))
        _check_loss(case, returned, losses)
        earlier = gradients
        with torch.no_grad():
            for parameter, gradient in zip(dense.parameters(), gradients.values()):
                parameter.sub_(_RATE * step.scale * gradient)


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
    text = next(
        (words for words, value in known.items() if math.isclose(returned, value, rel_tol=1e-9)), f"{returned:.6g}"
    )
    raise Wrong(f"{case}the parameters are right, but the result is {text}; the mean loss is {mean:.6g}")


def _microbatches(b: Bench, seed: int, count: int = 3) -> Microbatches:
    shape = small_shape(b)
    generator = torch.Generator().manual_seed(70 + seed)
    sizes = (2, count, shape.micro_batch_size, shape.seq_length)
    tokens, targets = torch.randint(shape.vocab_size, sizes, generator=generator).to(b.device)
    return list(zip(tokens, targets))
