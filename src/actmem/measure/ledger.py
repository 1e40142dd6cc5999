"""The ledger: every tensor that autograd keeps for backward, with who saved it.

Saved-tensor hooks see each tensor as autograd takes it.  The ledger holds storages weakly and
counts at the end of forward, so that a tensor saved and let go again in between is not counted.
A storage counts once, whole, however many views of it were saved; the parameters and buffers
of the module do not count.  What a checkpoint drops is never packed by these hooks, and
what it keeps is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from actmem.measure.savers import OperationTracker, saver_of
from actmem.rows import Row


@dataclass(frozen=True)
class SavedTensor:
    """One stored tensor: what it is and who saved it first.

    module: name of the innermost module that was running; "" for the root.
    op: the torch function, or the autograd Function, that saved it.
    argument: which input of ``op`` the tensor is ("0", "1", …, or a keyword); "" for a tensor
    that ``op`` made itself.
    bytes: this tensor's share of its storage; the shares of one storage add up to its size.
    line: file and line of the call.
    """

    module: str
    op: str
    argument: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    line: str


@dataclass
class _Storage:
    """A storage that autograd took, and the different views of it that were saved."""

    ref: StorageWeakRef
    views: dict[tuple, tuple] = field(default_factory=dict)


class Ledger:
    """What ``record`` saw.  Complete once its ``with`` block has ended.

    ``saved`` is what was kept at that moment; ``storages()`` is what is still kept now.
    """

    def __init__(self) -> None:
        self.saved: list[SavedTensor] = []
        self._storages: dict[int, _Storage] = {}

    def storages(self) -> dict[int, int]:
        """Bytes of each storage that is still alive, by the storage's identity.

        A storage that was emptied since counts with what it has now: FSDP leaves its gathered
        weights so between forward and backward.
        """
        return {key: bytes_now(entry.ref) for key, entry in self._storages.items() if not entry.ref.expired()}

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages that autograd keeps, parameters and buffers left out."""
        return sum(tensor.bytes for tensor in self.saved)

    def rows(self) -> list[Row]:
        """One row for each tensor, its term being the module, the operation and the argument."""
        return [
            Row(f"{t.module or 'root'}: {t.op} {t.argument}".rstrip(), t.bytes, source=t.line) for t in self.saved
        ]


@contextmanager
def record(module: nn.Module) -> Iterator[Ledger]:
    """Record what autograd keeps while the block runs ``module``'s forward pass.

    Keep the output alive until the block ends: it holds the graph, and the graph holds the
    tensors.  Works on any module, on real and on fake tensors, on any device.
    """
    ledger = Ledger()
    ignored = {
        part.untyped_storage()._cdata
        for tensor in (*module.parameters(), *module.buffers())
        for part in plain_tensors(tensor)
    }
    storages = ledger._storages

    with OperationTracker(module) as tracker:

        def pack(tensor: Tensor) -> Tensor:
            for part in plain_tensors(tensor):
                storage = part.untyped_storage()
                if storage._cdata not in ignored:
                    # The weak reference keeps the address from being given to another storage.
                    entry = storages.setdefault(storage._cdata, _Storage(StorageWeakRef(storage)))
                    view = (part.storage_offset(), tuple(sorted(zip(part.stride(), part.shape))))
                    if view not in entry.views:
                        entry.views[view] = (part.shape, part.dtype, tracker.module, *saver_of(part))
            # An output that packed itself would hold the graph that holds it, for ever.
            return tensor.detach() if tensor.requires_grad else tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield ledger

    alive = ledger.storages()
    for key, entry in storages.items():
        if alive.get(key):
            ledger.saved.extend(_shares(entry, alive[key]))


def _shares(entry: _Storage, left: int) -> Iterator[SavedTensor]:
    """Divide one storage's bytes, ``left``, among the different views of it that were saved.

    Each view gets its own elements' bytes, as far as the storage reaches; what no view shows
    is kept alive all the same, and is a line of its own.
    """
    for shape, dtype, module, op, argument, line in entry.views.values():
        share = min(left, shape.numel() * dtype.itemsize)
        left -= share
        if share:
            yield SavedTensor(module, op, argument, tuple(shape), dtype, share, line)
    if left:
        shape, dtype, module, op, argument, line = next(iter(entry.views.values()))
        unseen = (left // dtype.itemsize,)
        yield SavedTensor(module, op, f"{argument} (rest of its storage)".strip(), unseen, dtype, left, line)


def bytes_now(ref: StorageWeakRef) -> int:
    """Bytes that a storage has now: 0 once it is gone, or has been emptied."""
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return 0 if storage is None else storage.nbytes()


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the data: ``tensor`` itself, or what a wrapper such as DTensor wraps."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # DTensor lists its device mesh as well
                yield from plain_tensors(inner)
    else:
        yield tensor
