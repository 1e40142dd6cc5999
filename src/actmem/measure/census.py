"""A second opinion on the ledger: count the storages that live between forward and backward.

The census does not use saved-tensor hooks.  It notes every storage that appears during forward,
starting with the input, drops everything but the graph, and adds up what is still alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from actmem.measure.ledger import storages_of
from actmem.measure.replace import replaced
from actmem.torch_private import TorchDispatchMode, tree_leaves


def census(module: nn.Module, make_input: Callable[[], Tensor]) -> int:
    """Bytes of storages that outlive ``module(make_input())`` because the graph holds them.

    make_input: makes the module's input.  The module gets a copy, as it would get the output of the
    layer before, so the input counts if and only if the graph keeps it.  The output is dropped and
    only its ``grad_fn`` held, so the same holds for it.  Parameters and buffers do not count.
    """
    storages = _WeakStorages(storages_of(*module.parameters(), *module.buffers()))
    leaf = make_input()
    with _note_saved(storages), _NoteResults(storages):
        graph = module(leaf.clone()).grad_fn
    alive = _settled(storages.alive_bytes)
    del graph
    return alive


def _settled(count: Callable[[], int]) -> int:
    """``count()``, once it no longer changes.

    gloo's threads release a tensor a moment after its exchange ends, so an immediate count can
    include the last one.
    """
    number = count()
    if dist.is_initialized() and dist.get_backend() == "gloo":
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

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._ignored:
            self._seen.add(storage)

    def alive_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._seen)


class _NoteResults(TorchDispatchMode):
    """Notes the results of every operation."""

    def __init__(self, storages: _WeakStorages):
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._storages.note(tensor)
        return result


@contextmanager
def _note_saved(storages: _WeakStorages) -> Iterator[None]:
    """Notes the tensors that autograd Functions save for backward.

    Most are results of an operation; a random-number state is not: the generator makes it.
    """

    def noting(original):
        def save_for_backward(ctx, *tensors):
            for tensor in tensors:
                if isinstance(tensor, Tensor):
                    storages.note(tensor)
            return original(ctx, *tensors)

        return save_for_backward

    with replaced(FunctionCtx, "save_for_backward", noting):
        yield
