"""A second opinion on the ledger: count the storages that live between forward and backward.

The census does not look at saved-tensor hooks.  It notes every storage that comes up during
forward, from the input on, lets go of everything but the graph, and adds up what is
still there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def census(module: nn.Module, make_input: Callable[[], Tensor]) -> int:
    """Bytes of storages that outlive ``module(make_input())`` because the graph holds them.

    make_input: makes a tensor for the module's input.  The module gets a copy of it, as it would
    get the output of the layer before, so that the input counts if and only if the graph
    keeps it.  The output is let go and only its ``grad_fn`` held, so that it counts on the
    same terms.  Parameters and buffers do not count.
    """
    storages = _WeakStorages(ignored=(*module.parameters(), *module.buffers()))
    leaf = make_input()
    with _note_handed_over(storages), _NoteResults(storages):
        graph = module(leaf.clone()).grad_fn
    alive = _settled(storages.alive_bytes)
    del graph
    return alive


def _settled(count: Callable[[], int]) -> int:
    """``count()``, once it has stood still.

    gloo exchanges tensors in threads of its own, and such a thread lets go of a tensor a moment
    after the exchange is over, so a count taken at once can see the last one too many.
    """
    number = count()
    if dist.is_initialized() and dist.get_backend() == "gloo":
        still_since = time.monotonic()
        while time.monotonic() - still_since < 0.1:
            time.sleep(0.005)
            if (now := count()) != number:
                number, still_since = now, time.monotonic()
    return number


class _WeakStorages:
    """Storages by identity, held weakly."""

    def __init__(self, ignored: tuple[Tensor, ...]):
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ignored:
            self._seen.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))

    def alive_bytes(self) -> int:
        return sum(size for ref, size in self._seen.values() if not ref.expired())


class _NoteResults(TorchDispatchMode):
    """Notes the tensors that come out of every operation."""

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
def _note_handed_over(storages: _WeakStorages) -> Iterator[None]:
    """Notes the tensors that autograd Functions hand over for backward.

    Most came out of an operation; a random-number state did not: the generator makes it.
    """
    original = FunctionCtx.save_for_backward

    def save_for_backward(ctx, *tensors):
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storages.note(tensor)
        return original(ctx, *tensors)

    FunctionCtx.save_for_backward = save_for_backward
    try:
        yield
    finally:
        FunctionCtx.save_for_backward = original
