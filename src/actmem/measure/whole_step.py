"""One training step: the curve of live bytes, and the bill at its highest point, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actmem import recompute
from actmem.checks import shown
from actmem.config import ConfigError
from actmem.measure.census import arguments_of
from actmem.measure.kinds import Classifier
from actmem.measure.leaves import storages_of, tensors_in
from actmem.measure.lives import Lives
from actmem.measure.replace import replaced
from actmem.measure.savers import OperationTracker
from actmem.measure.step_bill import StepBill, bill_lines
from actmem.torch_private import top_saved_tensors_hooks


def step(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> StepBill:
    """Run one training step and find its peak: forward, backward, and the optimizer's step if there is one.

    batch: as for ``census``: one argument, a tuple of positional or a dict of keyword ones.  loss: of the
    model's output, a scalar; by default the output's ``loss`` if it has one, else the sum of its
    first tensor.  Gradients stay.  Run a step before if optimizer states are to be there from the start.
    Raises ConfigError if the loss is not one number that needs a gradient.
    """
    args, kwargs = arguments_of(batch)
    with watch_step(model, optimizer, batch) as bill:
        # The output isn't held any longer than the graph holds it.
        _scalar((loss or loss_of)(model(*args, **kwargs))).backward()
        if optimizer is not None:
            optimizer.step()
    return bill


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) and loss.numel() != 1 else shown(loss)
        raise ConfigError("loss", f"must be one number that needs a gradient, got {got}")
    return loss


def loss_of(output: Any) -> Tensor:
    """The loss that an output carries, or else the sum of its first floating-point tensor."""
    carried = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(carried, Tensor):
        return carried
    return next(tensor for tensor in tensors_in(output) if tensor.is_floating_point()).sum()


@contextmanager
def watch_step(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, batch: Any = None
) -> Iterator[StepBill]:
    """Watch whatever the block does, pipelines and several microbatches too; the bill is complete when it ends."""
    bill, tracker = StepBill(), OperationTracker(model)
    lives = Lives(tracker)
    outer_pack, outer_unpack = top_saved_tensors_hooks() or (None, None)

    def pack(tensor: Tensor) -> object:
        lives.paused = True
        lives.saved(tensor)
        lives.paused = False
        if outer_pack is not None:
            return outer_pack(tensor)
        return tensor.detach() if tensor.requires_grad else tensor

    _note_what_exists(lives, model, optimizer, batch)
    with ExitStack() as stack:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                # A hook that sees the gradient earlier would make autograd copy it.
                hook = parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: lives.known(p.grad, "gradient", name, "gradient")
                )
                stack.callback(hook.remove)
        if optimizer is not None:
            stack.callback(optimizer.register_step_pre_hook(lambda *_: lives.enter("optimizer")).remove)
        for function in ("backward", "grad"):
            stack.enter_context(replaced(torch.autograd, function, _in_backward(lives)))
        for owner in (torch, torch.random):
            stack.enter_context(replaced(owner, "get_rng_state", _state_noted(lives)))
        stack.enter_context(replaced(recompute, "generator_states", _state_noted(lives)))
        stack.enter_context(_resizes_noted(lives))
        stack.enter_context(tracker)
        stack.enter_context(lives)
        stack.enter_context(saved_tensors_hooks(pack, outer_unpack or (lambda tensor: tensor)))
        lives.enter("forward")
        lives.count()
        yield bill
    _note_what_exists(lives, model, optimizer, None)
    classifier = Classifier(tracker, lives, storages_of(*model.parameters(), *model.buffers()), storages_of())
    lives.classify(classifier)
    bill.curve = lives.curve
    bill.phases = [(name, start) for name, start in lives.phases if start < len(lives.curve)]
    bill.peak_bytes = max(lives.curve)
    bill.peak_at = lives.curve.index(bill.peak_bytes)
    bill.peak = bill_lines(lives, tracker, bill.peak_at)


def _note_what_exists(lives: Lives, model: nn.Module, optimizer: Any, batch: Any) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        lives.known(parameter, "weight", name, "parameter")
        lives.known(parameter.grad, "gradient", name, "gradient")
        lives.known(getattr(parameter, "main_grad", None), "main gradient", name, "main gradient")
    for name, buffer in model.named_buffers():
        lives.known(buffer, "buffer", name, "buffer")
    if optimizer is not None:
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            name = names.get(id(parameter), f"parameter {number} of the optimizer")
            lives.known(parameter, "optimizer state", name, "copy of the weight")
            for key, state in optimizer.state.get(parameter, {}).items():
                lives.known(state, "optimizer state", name, str(key))
    lives.known(batch, "input", "", "input")


def _in_backward(lives: Lives) -> Callable[[Callable], Callable]:
    def make(original):
        def run(*args, **kwargs):
            before = lives.phase
            lives.enter("backward")
            try:
                return original(*args, **kwargs)
            finally:
                lives.enter(before)

        return run

    return make


def _state_noted(lives: Lives) -> Callable[[Callable], Callable]:
    def make(get_rng_state):
        def run(*args, **kwargs):
            state = get_rng_state(*args, **kwargs)
            for one in tensors_in(state):
                lives.note_state(one)
            return state

        return run

    return make


@contextmanager
def _resizes_noted(lives: Lives) -> Iterator[None]:
    """Storages that are resized below all operations, as FSDP and pipeline stages do."""
    original = torch.UntypedStorage.resize_

    def resize(storage, size):
        result = original(storage, size)
        lives.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    try:
        yield
    finally:
        del torch.UntypedStorage.resize_
