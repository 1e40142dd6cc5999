"""Gradients and weights in float32 for a model in 16 bits (mixed-precision training).

bfloat16 has 8 significant bits.  So a sum over many microbatches loses small gradients, and a small step does not
change a weight.  We do what Megatron does: add each microbatch's gradient to a float32 ``parameter.main_grad``,
and let the optimizer update float32 copies of the weights.  With Adam that takes 18 bytes a parameter
(``formulas.states.ADAM["float32 gradients"]``).

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

    Main gradients take 4 bytes a parameter (8 in float64). Besides, backward holds the 16-bit gradient of one parameter
    at a time. Read a gradient with ``gradient_of``. A deep copy of the module has no main gradients.

    Args:
        module: the model; each of its parameters that requires a gradient gets a ``main_grad`` of zeros.
    """
    parameter: Any  # it gets an attribute
    for parameter in module.parameters():
        if parameter.requires_grad and not hasattr(parameter, "main_grad"):
            parameter.main_grad = torch.zeros_like(parameter, dtype=_main_dtype(parameter), requires_grad=False)
            parameter.register_post_accumulate_grad_hook(_add_to_main_grad)


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient summed over microbatches: ``main_grad`` if the parameter has one, else ``grad``."""
    return getattr(parameter, "main_grad", parameter.grad)


class MainWeights:
    """float32 copies of a module's parameters, for the optimizer to update.

    Making one calls ``use_main_gradients(module)``. The ``.grad`` of a copy is the parameter's ``main_grad``, the same
    tensor. The copies take 4 bytes a parameter. They have the parameters' attributes ``partition_dim`` and
    ``partial_gradient``, so a gradient norm can be computed from the copies or from the module.

    Args:
        module: the model to train; parameters that require no gradient get no copy.
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
        """Run ``optimizer.step()`` on the copies, copy their values to the module, and set main gradients to zero.

        You need no ``zero_grad`` between steps. If values were loaded into the module since the last step, from a saved
        state for instance, the step starts from the loaded values. Under ``fully_shard``, shard the module before you
        make its MainWeights.

        Args:
            optimizer: an optimizer of the copies, made with ``parameters()`` of this object.

        Raises: ConfigError if the module's parameters were replaced, as by ``load_state_dict(…, assign=True)``, or if a
            parameter has a gradient in ``.grad``, where DistributedDataParallel and FullyShardedDataParallel put the
            reduced gradients.
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
        self.zero_grad()
        self._written = [times_written(parameter) for parameter, _ in self._pairs]

    def zero_grad(self) -> None:
        """Set main gradients to zero, to discard microbatches before a step.

        The optimizer's ``zero_grad()`` only takes the gradients away from the copies, and ``step`` puts them back.
        """
        for parameter, _ in self._pairs:
            parameter.main_grad.zero_()


def _main_dtype(parameter: nn.Parameter) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _add_to_main_grad(parameter: Any) -> None:
    parameter.main_grad += parameter.grad
    parameter.grad = None
