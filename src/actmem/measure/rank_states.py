"""What a stage holds besides activations: weights, gradients and optimizer states, counted after one real step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from actmem.main_grad import MainWeights, gradient_of
from actmem.measure.ledger import storages_of
from actmem.rows import Row


def measure_states(parts: Sequence[nn.Module]) -> list[Row]:
    """Train each part by one step of Adam on float32 copies, and count the storages that stay, one row a kind.

    Gradients are those that the step started from, whatever they hold: only their bytes count.
    """
    groups: dict[str, list[Tensor]] = {}
    for part in parts:
        weights = MainWeights(part)
        optimizer = torch.optim.AdamW(weights.parameters())
        weights.step(optimizer)
        groups.setdefault("parameters", []).extend(part.parameters())
        gradients = [gradient_of(parameter) for parameter in part.parameters()]
        groups.setdefault("gradients", []).extend(grad for grad in gradients if grad is not None)
        groups.setdefault("float32 parameters", []).extend(weights.parameters())
        for name, key in (("Adam first moment", "exp_avg"), ("Adam second moment", "exp_avg_sq")):
            groups.setdefault(name, []).extend(state[key] for state in optimizer.state.values())
    return [
        Row(name, sum(storage.nbytes() for storage in storages_of(*tensors)), source="storages alive after a step")
        for name, tensors in groups.items()
    ]
