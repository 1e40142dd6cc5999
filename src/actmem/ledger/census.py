"""A check of the ledger: count the storages that are alive between forward and backward, without saved-tensor hooks.

The census notes every storage that appears during forward, the inputs too.  Then it drops everything but the autograd
graph, and adds up the storages that are still alive.
"""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from actmem.ledger.modes import QuietDispatchMode
from actmem.ledger.storages import StorageLifetimes, noting_states, replaced, settled, storages_in, tensors_in
from actmem.torch_private import tree_map_only


class LiveStorages(QuietDispatchMode):
    """A dispatch mode that counts the live bytes of all storages that operations make while it is on.

    It holds the storages by weak references, so it keeps none alive.

    Args:
        ignored: tensors, in lists, dicts or objects, whose storages don't count.

    Attributes:
        peak_bytes: the most bytes alive after any operation since you set it to 0; None, its first value: no peak is
            kept.
    """

    def __init__(self, ignored: object = ()) -> None:
        super().__init__()
        self._ignored: WeakSet[torch.UntypedStorage] = WeakSet(storages_in(ignored))
        self._lifetimes = StorageLifetimes()
        self.peak_bytes: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the counted storages that are alive now, at their present sizes."""
        for storage in list(self._lifetimes.numbers):  # FSDP and pipelines resize them below all operations
            self._lifetimes.resized(storage)
        return self._lifetimes.bytes

    def ignore(self, value: object) -> None:
        """Stop counting the storages of the tensors in ``value``, which may be in lists, dicts or objects."""
        for storage in storages_in(value):
            self._ignored.add(storage)
            self._lifetimes.forget(storage)

    def note(self, value: object) -> None:
        """Count the storages of the tensors in ``value`` from now on, except ignored ones; each counts once.

        The results of operations are counted without a call.  Call this for a tensor that existed before the mode was
        on, or that no operation returns.

        Args:
            value: a tensor, or tensors in lists, dicts or objects.
        """
        for storage in storages_in(value):
            if storage not in self._ignored and storage not in self._lifetimes.numbers:
                self._lifetimes.begin(storage)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = self.real_operation(func, args)(*args, **(kwargs or {}))
        self.note(result)
        if self.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        return result


def census(module: nn.Module, make_input: Callable[[], Any]) -> int:
    """Return the bytes of the storages that stay alive after ``module``'s forward pass because the graph holds them.

    An input or output counts only if the graph saved it. So that nothing else holds one, the module gets copies of the
    input's tensors, and only the ``grad_fn`` of its outputs are kept. Parameters and buffers do not count.

    Args:
        module: the model or layer to run.
        make_input: returns the module's input: a tuple of positional arguments, a dict of keyword arguments, or any
            other value as the only argument.
    """
    alive = LiveStorages([*module.parameters(), *module.buffers()])
    inputs = make_input()

    def noting_saved(original):
        def save_for_backward(ctx, *tensors):
            alive.note(tensors)
            return original(ctx, *tensors)

        return save_for_backward

    with replaced(FunctionCtx, "save_for_backward", noting_saved), noting_states(alive.note):
        with alive:
            graph = _graph_of(module, inputs)
    alive.ignore([*module.parameters(), *module.buffers()])  # those that forward made
    kept_bytes = settled(lambda: alive.bytes)
    del graph
    return kept_bytes


def arguments_of(inputs: Any) -> tuple[tuple, dict]:
    """Return a module's input as a pair (positional arguments, keyword arguments).

    A tuple becomes the positional arguments, a dict the keyword arguments, any other value the only argument.
    """
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs,), {}


def _graph_of(module: nn.Module, inputs: Any) -> list:
    args, kwargs = arguments_of(tree_map_only(Tensor, Tensor.clone, inputs))
    return [tensor.grad_fn for tensor in tensors_in(module(*args, **kwargs)) if tensor.grad_fn is not None]
