"""One step of training, as the unsharded model would take it and as it was taken."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from actmem.model.gpt import GPT
from actmem.parallel.linear import shard
from actmem_course.judge.compare import close, grad_of, summed

Microbatches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TakenStep:
    """One step of plain gradient descent as it should be and as it was, by parameter, on this rank.

    found and right: what was taken from each parameter, over the learning rate.  gradients: of the mean
    loss, unsharded; earlier: those of the step before.  scale: what max_norm leaves of them.
    """

    model: GPT
    dense: GPT
    microbatches: Microbatches
    max_norm: float
    found: dict[str, Tensor]
    gradients: dict[str, Tensor]
    earlier: dict[str, Tensor] | None

    @property
    def norm(self) -> float:
        return math.sqrt(sum(gradient.square().sum().item() for gradient in self.gradients.values()))

    @property
    def scale(self) -> float:
        return min(1.0, self.max_norm / self.norm)

    def part(self, gradients: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
        """This rank's parts of unsharded gradients."""
        parameters = dict(self.model.named_parameters())
        dims = {name: getattr(parameter, "partition_dim", None) for name, parameter in parameters.items()}
        return {name: shard(scale * gradient, dims[name], self.model.tp) for name, gradient in gradients.items()}

    def wrong(self) -> list[str]:
        """Parameters whose step is another.  Many clip by max_norm / (norm + 1e-6), and that is no mistake."""
        right = self.part(self.gradients, self.scale)
        tolerance = 1e-8 if self.scale == 1 else 1e-5 * self.scale
        return [name for name in right if not close(self.found[name], right[name], tolerance)]


def gradients_of(dense: GPT, microbatches: Microbatches) -> tuple[dict[str, Tensor], list[float]]:
    """Gradients of the mean loss of all microbatches, and the loss of each."""
    dense.zero_grad()
    losses = [dense.loss(dense(tokens), targets) for tokens, targets in microbatches]
    (summed(losses) / len(losses)).backward()
    gradients = {name: grad_of(parameter).clone() for name, parameter in dense.named_parameters()}
    return gradients, [loss.item() for loss in losses]
