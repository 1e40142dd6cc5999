"""A second opinion on the ledger: count the storages that live between forward and backward.

The census does not use saved-tensor hooks.  It notes every storage that appears during forward,
starting with the inputs, drops everything but the graph, and adds up what is still alive.
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
    """A dispatch mode that follows, by weak references, the storages that operations made and that are still alive.

    Args:
        ignored: a value whose tensors don't count.

    Attributes:
        peak_bytes: the most bytes alive after any operation since it was set to 0; None: not followed.
    """

    def __init__(self, ignored: object = ()) -> None:
        super().__init__()
        self._ignored: WeakSet[torch.UntypedStorage] = WeakSet(storages_in(ignored))
        self._lifetimes = StorageLifetimes()
        self.peak_bytes: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the storages that are alive now."""
        for storage in list(self._lifetimes.numbers):  # FSDP and pipelines resize them below all operations
            self._lifetimes.resized(storage)
        return self._lifetimes.bytes

    def ignore(self, value: object) -> None:
        """Stop counting the storages in ``value``."""
        for storage in storages_in(value):
            self._ignored.add(storage)
            self._lifetimes.forget(storage)

    def note(self, value: object) -> None:
        """Count the storages in ``value`` too."""
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
    """Return the bytes of the storages that outlive ``module``'s forward pass because the graph holds them.

    The module gets copies of the input's tensors, as it would get the output of the layer before, so each of them
    counts if and only if the graph keeps it. The outputs, in whatever structure, are dropped and only their ``grad_fn``
    is held, so the same is true of them. Parameters and buffers do not count.

    Args:
        make_input: makes the module's input: a tuple of positional arguments, a dict of keyword arguments, or any other
            value as the only argument.
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
    """Return the positional and the keyword arguments that ``inputs`` stands for.

    A tuple has positional arguments, a dict keyword arguments; any other value is one argument.
    """
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs,), {}


def _graph_of(module: nn.Module, inputs: Any) -> list:
    args, kwargs = arguments_of(tree_map_only(Tensor, Tensor.clone, inputs))
    return [tensor.grad_fn for tensor in tensors_in(module(*args, **kwargs)) if tensor.grad_fn is not None]
