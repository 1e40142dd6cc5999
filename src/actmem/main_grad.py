"""Gradients and weights in float32 for a model in 16 bits (mixed-precision training).

bfloat16 has 8 significant bits, so a sum over many microbatches loses the small ones and a
weight does not change by a small step.  Megatron's remedy, and ours: each microbatch's gradient is
added to a float32 ``parameter.main_grad``, and the optimizer steps float32 copies of the weights.
With Adam that is 18 bytes a parameter, ``formulas.states.ADAM["float32 gradients"]``.

    weights = MainWeights(model)
    optimizer = torch.optim.AdamW(weights.parameters())
    for x, y in microbatches:
        (model.loss(model(x), y) / len(microbatches)).backward()
    reduce_partial_gradients(model, tp)
    weights.step(optimizer)
"""

from typing import Any

import torch
from torch import Tensor, nn

from actmem.config import ConfigError
from actmem.torch_private import times_written


def use_main_gradients(module: nn.Module) -> None:
    """Make backward add each gradient to a float32 ``parameter.main_grad`` and free ``parameter.grad``, from now on.

    It keeps 4 bytes a parameter (8 in float64), beside the 16-bit gradient of one parameter at a time. Code that needs
    a gradient calls ``gradient_of``. A deep copy of the module has no main gradients.
    """
    parameter: Any  # it gets an attribute
    for parameter in module.parameters():
        if parameter.requires_grad and not hasattr(parameter, "main_grad"):
            parameter.main_grad = torch.zeros_like(parameter, dtype=_main_dtype(parameter), requires_grad=False)
            parameter.register_post_accumulate_grad_hook(_add_to_main_grad)


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Return the tensor in which microbatches add up: ``main_grad`` if the parameter has one, else ``grad``."""
    return getattr(parameter, "main_grad", parameter.grad)


class MainWeights:
    """float32 copies of a module's parameters, whose gradients are the module's main gradients.

    It calls ``use_main_gradients``. The copies take 4 bytes a parameter; their gradients share their storage with the
    module's main gradients. Copies keep the marks ``partition_dim`` and ``partial_gradient``, so a gradient norm can be
    taken of the copies or of the module.
    """

    def __init__(self, module: nn.Module):
        use_main_gradients(module)
        self._module, self._pairs = module, list[tuple[Any, nn.Parameter]]()
        for parameter in module.parameters():
            if parameter.requires_grad:
                main = nn.Parameter(parameter.detach().to(_main_dtype(parameter), copy=True))
                main.__dict__.update({name: mark for name, mark in vars(parameter).items() if name != "main_grad"})
                main.grad = gradient_of(parameter)
                self._pairs.append((parameter, main))
        self._written = [times_written(parameter) for parameter, _ in self._pairs]

    def parameters(self) -> list[nn.Parameter]:
        """Return the copies, for the optimizer, in the order of the module's trainable parameters."""
        return [main for _, main in self._pairs]

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run ``optimizer.step()`` on the copies, give the module their values, and set its main gradients to zero.

        So no ``zero_grad`` is needed; the optimizer's own, which drops the copies' gradients, does no harm. If other
        values were written into the module since the last step, such as a checkpoint's, the step starts from these.
        Under ``fully_shard``, shard the module before making its MainWeights.

        Raises: ConfigError if the module has other parameters by now, as after ``load_state_dict(…, assign=True)``, or
            if a gradient is in ``.grad``: DistributedDataParallel and FullyShardedDataParallel put theirs there,
            reduced, after backward.
        """
        there = set(map(id, self._module.parameters()))
        for (parameter, main), before in zip(self._pairs, self._written):
            if id(parameter) not in there:
                raise ConfigError("module", "has other parameters than when its MainWeights was made: make it again")
            if parameter.grad is not None:
                raise ConfigError("module", "has gradients in .grad, which .main_grad lacks: reduce .main_grad")
            if times_written(parameter) != before and not torch.equal(parameter, main.to(parameter.dtype)):
                main.copy_(parameter)
            main.grad = parameter.main_grad
        optimizer.step()
        for parameter, main in self._pairs:
            parameter.copy_(main)
            parameter.main_grad.zero_()
        self._written = [times_written(parameter) for parameter, _ in self._pairs]


def _main_dtype(parameter: nn.Parameter) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _add_to_main_grad(parameter: Any) -> None:
    parameter.main_grad += parameter.grad
    parameter.grad = None
