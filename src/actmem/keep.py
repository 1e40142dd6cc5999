"""Helpers of our autograd Functions: save tensors where hooks see them; refuse torch.compile and second derivatives."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from actmem.torch_private import backward_pass, never_compiled


def stays_eager(function: Callable) -> Callable:
    """Decorate a function so that torch.compile leaves it, and all that it calls, eager.

    Without torch.compile the decorated function behaves as the original does.
    """
    eager = never_compiled(function)

    @functools.wraps(function)
    def run(*args, **kwargs):
        # The compiler takes the first branch, cuts its graph there and comes back after the call.
        return eager(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return run


def differentiates_once(backward: Callable) -> Callable:
    """Decorate a Function's ``backward`` so that it raises RuntimeError under ``create_graph=True``.

    The collectives in our backward passes are not differentiable, so a second derivative would be wrong. torch's
    ``once_differentiable`` is not enough: with ``torch.autograd.grad`` and chosen inputs it gives wrong second
    derivatives without an error.
    """

    @functools.wraps(backward)
    def run(ctx, *grads):
        if torch.is_grad_enabled():
            raise RuntimeError(f"{type(ctx).__name__} has no second derivative (create_graph=True)")
        return backward(ctx, *grads)

    return run


class Kept:
    """Tensors that ``keep`` saved for a later backward, which reads them by ``tensors()``.

    Args:
        anchor: the output, without elements, of the autograd node that saved the tensors. An operation that takes the
            anchor as a further input lets autograd free the tensors after the operation's backward. Without such an
            operation the tensors live as long as this object.
    """

    def __init__(self, anchor: Tensor):
        # The tensor, not its grad_fn: before torch 2.13 a node dies with its last output tensor.
        self.anchor = anchor
        self._read: tuple[Tensor, ...] = ()
        self._read_in = -1  # the backward pass

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the saved tensors, for a backward that reads them once.

        Each call unpacks the tensors again, which in a checkpoint means to recompute them. Our checkpoint doesn't hold
        the recomputed tensors after that, so they are freed as soon as the caller drops them.
        """
        before = released_by_reader()
        _reading.releases = True
        try:
            node: Any = self.anchor.grad_fn
            return node.saved_tensors
        finally:
            _reading.releases = before

    def read_once(self) -> tuple[Tensor, ...]:
        """Return the saved tensors, for a backward that reads them several times.

        The tensors are unpacked once in each backward pass, because torch's checkpoint allows no second time. After
        that this object holds them until it is freed or read in the next backward pass.
        """
        if self._read_in != (now := backward_pass()) or now < 0:
            self._read, self._read_in = self.tensors(), now
        return self._read


_reading = threading.local()  # backward may run in a thread of its own


def released_by_reader() -> bool:
    """Return True while ``Kept.tensors`` runs in this thread.

    Our checkpoint calls this function when backward reads a recomputed tensor, to know how long to hold the tensor:

    - False: a node of the graph reads a tensor that it saved itself. The checkpoint holds the tensor until that node
      has run in backward.
    - True: an operation reads a tensor that a ``Kept`` saved for it, in a node of its own. That node may be freed long
      after the operation's backward, so the checkpoint gives up the tensor at once and only the operation holds it.
    """
    return getattr(_reading, "releases", False)


def keep(*tensors: Tensor, name: str = "") -> Kept:
    """Save ``tensors`` with ``save_for_backward``, before the operation that needs them in backward runs.

    An attribute on ``ctx`` could hold them too. But saved-tensor hooks don't see attributes, so a ledger couldn't count
    the tensors and a checkpoint couldn't drop them.

    Args:
        tensors: the tensors to save.
        name: the name under which a ledger lists them; "": none.

    Returns: a Kept; its ``tensors()`` returns the tensors in backward.
    Saves: each tensor's storage.
    """
    with torch.enable_grad():
        # The node exists only if some input needs a gradient; the anchor has no elements.
        anchor = torch.empty(0, device=tensors[0].device if tensors else "cpu", requires_grad=True)
        return Kept(_Keep.apply(anchor, *tensors, name))


class _Keep(Function):
    @staticmethod
    def forward(ctx, anchor: Tensor, *tensors_and_name) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors_and_name[:-1])
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad: None):
        # Does nothing itself; running it lets autograd free the saved tensors.
        return (None,) * len(ctx.needs_input_grad)


#: The autograd Function behind ``keep``, for tools that name it.
FUNCTIONS = {"keep": _Keep}
