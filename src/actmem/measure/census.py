"""A second opinion on the ledger: count the storages that live between forward and backward.

The census does not look at saved-tensor hooks.  It notes every storage that comes up during
forward, from the input on, lets go of everything but the graph, and adds up what is
still there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def census(module: nn.Module, make_input: Callable[[], Tensor]) -> int:
    """Bytes of storages that outlive ``module(make_input())`` because the graph holds them.

    make_input: makes the input inside the census, so that it counts if and only if the graph
    keeps it.  The output is let go and only its ``grad_fn`` held, so that it counts on the
    same terms.  Parameters and buffers do not count.
    """
    storages = _WeakStorages(ignored=(*module.parameters(), *module.buffers()))
    with _note_handed_over(storages), _NoteResults(storages):
        graph = module(make_input()).grad_fn
    alive = storages.alive_bytes()
    del graph
    return alive


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
