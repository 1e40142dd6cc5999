"""Which mistake in a training step moves the parameters like this?"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from actmem_course.judge.compare import close, factor, summed
from actmem_course.judge.lab_checks.lab6_taken import TakenStep, gradients_of


def explain(step: TakenStep) -> str:
    """The mistake in words, by the first hypothesis that makes the same numbers."""
    if not any(moved.any() for moved in step.found.values()):
        return "no parameter has changed: is optimizer.step() missing?"
    diagnosis = _by_sharing(step) or (_by_scale(step) if step.scale < 1 else _by_sum(step))
    if diagnosis:
        return diagnosis
    wrong = step.wrong()
    return f"{len(wrong)} of {len(step.found)} parameters take a wrong step, the first is {wrong[0]}"


def _by_sharing(step: TakenStep) -> str | None:
    """Mistakes in what the ranks owe each other."""
    wrong, parameters, tp = step.wrong(), dict(step.model.named_parameters()), step.model.tp
    partial = [name for name, parameter in parameters.items() if getattr(parameter, "partial_gradient", False)]
    if wrong and set(wrong) <= set(partial):
        return (
            f"{len(wrong)} parameters take a wrong step ({wrong[0]}, …), and exactly those saw only this rank's tokens: "
            "reduce_partial_gradients sums their gradients over the ranks, once, after the last backward and before "
            "gradient_norm and optimizer.step()"
        )
    if tp.size == 1:
        return None
    sums = {}
    for name, gradient in step.gradients.items():
        dim = getattr(parameters[name], "partition_dim", None)
        if dim is not None:
            sums[name] = summed(gradient.chunk(tp.size, dim)) * step.scale
    if all(
        any(close(step.found[name], value / n, 1e-7 * step.scale) for n in (1, tp.size)) for name, value in sums.items()
    ):
        return (
            "gradients of parameters that are cut are added up over the ranks: each rank has another part of the weight, "
            "and its gradient is complete; only reduce_partial_gradients remains to be called (this is not a data-parallel group)"
        )
    return None


def _by_sum(step: TakenStep) -> str | None:
    """Mistakes in how the microbatches' gradients become one."""
    n = len(step.microbatches)
    ratio = _common_factor(step)
    if ratio is not None:
        known = {
            n: f"steps are {n} times too long: the loss is the mean over the {n} microbatches, so divide each by their number",
            1
            / n: f"steps are 1/{n} of what they should be: the losses are divided by the number of microbatches twice",
            step.max_norm
            / step.norm: "gradients are scaled up to max_norm; scale them only if the norm is larger than max_norm",
            -1: "steps go the wrong way",
        }
        return next((words for value, words in known.items() if math.isclose(ratio, value, rel_tol=1e-4)), None)
    if step.earlier and _moved(step, _sum(step.gradients, step.earlier)):
        return "the gradients of the step before are still there: optimizer.zero_grad() is missing"
    for which, some in (("last", step.microbatches[-1:]), ("first", step.microbatches[:1])):
        gradients, _ = gradients_of(step.dense, some)
        if any(_moved(step, gradients, scale) for scale in (1, 1 / n)):
            why = ": zero_grad belongs before the first, so that gradients add up" if which == "last" else ""
            return f"only the {which} microbatch counts{why}"
    return None


def _by_scale(step: TakenStep) -> str | None:
    """Mistakes in the cut at max_norm; without a limit the same step was right."""
    right = step.part(step.gradients)
    ratio = _common_factor(step)
    if ratio is not None and math.isclose(ratio * step.scale, 1, rel_tol=1e-4):
        return "gradients are not scaled down to max_norm before optimizer.step()"
    whole = "each by max_norm / norm, with the norm of the whole, complete gradient (gradient_norm)"
    if all(close(step.found[name], g.clamp(-step.max_norm, step.max_norm), 1e-8) for name, g in right.items()):
        return f"each element of a gradient is clipped to max_norm by itself; scale the gradients down {whole}"
    alone = {name: g * min(1.0, step.max_norm / g.norm().item()) for name, g in right.items()}
    if all((step.found[name] - g).norm() <= 0.01 * g.norm() for name, g in alone.items()):
        return f"each parameter's gradient is scaled by its own norm; scale all of them down {whole}"
    if not _along(step, step.gradients) and _along(step, _clipped_one_by_one(step)):
        return "the gradient is clipped after each microbatch; clip once, after the last, what they add up to"
    own = math.sqrt(sum(gradient.square().sum().item() for gradient in right.values()))
    if step.model.tp.size > 1 and _moved(step, step.gradients, step.max_norm / own):
        return f"gradients are scaled by the norm of this rank's parameters, so ranks scale differently; scale {whole}"
    if ratio is not None:
        return f"steps are {ratio:.4g} times what they should be; scale gradients {whole}"
    return None


def _along(step: TakenStep, gradients: dict[str, Tensor]) -> bool:
    """Whether the complete parameters moved in the direction of these gradients, however far."""
    parts = step.part(gradients)
    return all(
        torch.cosine_similarity(step.found[name].flatten(), parts[name].flatten(), 0) > 0.9999
        for name in _complete(step)
        if parts[name].any()
    )


def _clipped_one_by_one(step: TakenStep) -> dict[str, Tensor]:
    """What remains if the gradient so far is clipped after every microbatch."""
    so_far = {name: torch.zeros_like(gradient) for name, gradient in step.gradients.items()}
    for microbatch in step.microbatches:
        one, _ = gradients_of(step.dense, [microbatch])
        so_far = {name: so_far[name] + gradient / len(step.microbatches) for name, gradient in one.items()}
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in so_far.values()))
        so_far = {name: gradient * min(1.0, step.max_norm / norm) for name, gradient in so_far.items()}
    return so_far


def _common_factor(step: TakenStep) -> float | None:
    """The factor by which all steps are too long, if it is one for all.

    Partial gradients stay out: those may be incomplete as well.
    """
    right = step.part(step.gradients, step.scale)
    ratios = [factor(step.found[name], right[name]) for name in _complete(step) if right[name].any()]
    if not ratios or ratios[0] is None:
        return None
    first = ratios[0]
    same = all(ratio is not None and math.isclose(ratio, first, rel_tol=1e-4) for ratio in ratios)
    return first if same else None


def _moved(step: TakenStep, gradients: dict[str, Tensor], scale: float = 1.0) -> bool:
    """Whether the complete parameters moved by these gradients."""
    parts = step.part(gradients, scale)
    return all(close(step.found[name], parts[name], 1e-6 * step.scale) for name in _complete(step))


def _complete(step: TakenStep) -> Iterator[str]:
    """Parameters whose gradients need no other rank's."""
    for name, parameter in step.model.named_parameters():
        if not getattr(parameter, "partial_gradient", False):
            yield name


def _sum(a: dict[str, Tensor], c: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: a[name] + c[name] for name in a}
