"""A second opinion on the ledger: count the storages that live between forward and backward.

The census does not use saved-tensor hooks.  It notes every storage that appears during forward,
starting with the inputs, drops everything but the graph, and adds up what is still alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from actmem.measure.leaves import storages_in, storages_of, tensors_in
from actmem.measure.replace import replaced
from actmem.torch_private import TorchDispatchMode


def census(module: nn.Module, make_input: Callable[[], Any]) -> int:
    """Bytes of storages that outlive ``module``'s forward pass because the graph holds them.

    make_input: makes the module's input: one tensor or any other value, a tuple of positional
    arguments, or a dict of keyword arguments.  The module gets copies of the tensors, as it would get
    the output of the layer before, so each counts if and only if the graph keeps it.  The
    outputs, in whatever structure, are dropped and only their ``grad_fn`` held, so the same holds for
    them.  Parameters and buffers do not count.
    """
    storages = _WeakStorages(storages_of(*module.parameters(), *module.buffers()))
    args, kwargs = arguments_of(make_input())
    with _note_saved(storages), _NoteResults(storages):
        graph = _graph_of(module, args, kwargs)
    alive = _settled(storages.alive_bytes)
    del graph
    return alive


def arguments_of(inputs: Any) -> tuple[tuple, dict]:
    """Positional and keyword arguments: a tuple and a dict are these, anything else is one argument."""
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs,), {}


def _graph_of(module: nn.Module, args: tuple, kwargs: dict) -> list:
    copied = [_copied(value) for value in args]
    output = module(*copied, **{name: _copied(value) for name, value in kwargs.items()})
    return [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]


def _copied(value: Any) -> Any:
    """``value`` with copies of the tensors in it: lists, tuples and dicts are followed, the rest is left as it is."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {name: _copied(inner) for name, inner in value.items()}
    return value


def _settled(count: Callable[[], int]) -> int:
    """``count()``, once it no longer changes.

    gloo's threads release a tensor a moment after its exchange ends, so an immediate count can
    include the last one.  It never misses one: a count of zero is right at once.
    """
    number = count()
    if number and dist.is_initialized() and dist.get_backend() == "gloo":
        unchanged_since = time.monotonic()
        while time.monotonic() - unchanged_since < 0.1:
            time.sleep(0.005)
            if (now := count()) != number:
                number, unchanged_since = now, time.monotonic()
    return number


class _WeakStorages:
    """Storages, held weakly."""

    def __init__(self, ignored: WeakSet[torch.UntypedStorage]):
        self._ignored = ignored
        self._seen: WeakSet[torch.UntypedStorage] = WeakSet()

    def note(self, value: Any) -> None:
        for storage in storages_in(value):
            if storage not in self._ignored:
                self._seen.add(storage)

    def alive_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._seen)


class _NoteResults(TorchDispatchMode):
    """Notes the results of every operation."""

    supports_higher_order_operators = True

    def __init__(self, storages: _WeakStorages):
        super().__init__()
        self._storages = storages

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._storages.note(result)
        return result


@contextmanager
def _note_saved(storages: _WeakStorages) -> Iterator[None]:
    """Notes the tensors that autograd Functions save for backward, and the states of generators.

    Most are results of an operation; a random-number state is not: the generator makes it.
    """

    def noting(original):
        def save_for_backward(ctx, *tensors):
            storages.note(tensors)
            return original(ctx, *tensors)

        return save_for_backward

    def noting_state(original):
        def get_rng_state(*args, **kwargs):
            state = original(*args, **kwargs)
            storages.note(state)
            return state

        return get_rng_state

    with replaced(FunctionCtx, "save_for_backward", noting), replaced(torch, "get_rng_state", noting_state):
        yield
