"""What our own operators need of autograd: save tensors in a node of their own, stay eager, differentiate once."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from actmem.torch_private import backward_pass, never_compiled


def stays_eager(function: Callable) -> Callable:
    """Keep torch.compile out of ``function`` and of what it calls. It costs nothing until something is compiled."""
    eager = never_compiled(function)

    @functools.wraps(function)
    def run(*args, **kwargs):
        # The compiler takes the first branch, cuts its graph there and comes back after the call.
        return eager(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return run


def differentiates_once(backward: Callable) -> Callable:
    """Make a ``backward`` refuse second derivatives.

    A ``backward`` of plain operations would leave its collectives out of them. torch's ``once_differentiable`` gives
    wrong second derivatives without an error where ``torch.autograd.grad`` is asked for the gradients of particular
    inputs.
    """

    @functools.wraps(backward)
    def run(ctx, *grads):
        if torch.is_grad_enabled():
            raise RuntimeError(f"{type(ctx).__name__} has no second derivative (create_graph=True)")
        return backward(ctx, *grads)

    return run


class Kept:
    """Tensors that autograd holds: saved-tensor hooks see them, and backward can read them.

    Args:
        anchor: a tensor without elements, whose node saved the tensors. If an operation takes the anchor as an input,
            autograd frees the tensors after that operation's backward; otherwise they live as long as this object.
    """

    def __init__(self, anchor: Tensor):
        # The tensor, not its grad_fn: before torch 2.13 a node dies with its last output tensor.
        self.anchor = anchor
        self._read: tuple[Tensor, ...] = ()
        self._read_in = -1  # the backward pass

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors, as autograd unpacks them.

        If they had to be recomputed, only the caller holds them now.
        """
        before = released_by_reader()
        _reading.releases = True
        try:
            node: Any = self.anchor.grad_fn
            return node.saved_tensors
        finally:
            _reading.releases = before

    def read_once(self) -> tuple[Tensor, ...]:
        """Return the tensors, which are unpacked once in a backward pass and then held here.

        torch's checkpoint allows no more than one unpacking.
        """
        if self._read_in != (now := backward_pass()) or now < 0:
            self._read, self._read_in = self.tensors(), now
        return self._read


_reading = threading.local()  # backward may run in a thread of its own


def released_by_reader() -> bool:
    """Return True while ``Kept.tensors`` reads.

    The node that saved the tensors may run long after the operation that reads them, so a checkpoint around both must
    not hold them until that node is done.
    """
    return getattr(_reading, "releases", False)


def keep(*tensors: Tensor, name: str = "") -> Kept:
    """Save ``tensors`` through ``save_for_backward`` now, to be read in backward later.

    An attribute on ``ctx`` would hold them too, but no hook sees it, so a ledger couldn't count them and a checkpoint
    couldn't drop them.

    Args:
        name: what a ledger calls them.

    Returns: a Kept, whose ``tensors()`` gives them back.
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
