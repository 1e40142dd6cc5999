"""The ledger: every tensor that autograd keeps for backward, with who saved it.

Saved-tensor hooks see each tensor when autograd saves it.  The ledger holds storages weakly and
counts at the end of forward, so a tensor that was saved and already freed does not count.  A
storage counts once, in full, however many views of it were saved; the module's parameters and
buffers do not count.  These hooks see what a checkpoint keeps, and never what it drops.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actmem.measure.savers import OperationTracker
from actmem.rows import Row
from actmem.torch_private import is_traceable_wrapper_subclass


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


class Ledger:
    """What ``record`` saw.  Complete once its ``with`` block has ended.

    ``saved`` is what was kept at that moment; ``storages()`` is what is still kept now.
    """

    def __init__(self) -> None:
        self.saved: list[SavedTensor] = []
        #: The storages that autograd took, and the different views of each that were saved.  A storage has
        #: one Python object for as long as it lives, so a weak reference to that follows the storage itself.
        self._storages: WeakKeyDictionary[torch.UntypedStorage, dict[tuple, tuple]] = WeakKeyDictionary()

    def storages(self) -> dict[int, int]:
        """Bytes of each storage that is still alive.

        A storage that was emptied since counts with its present size: between forward and backward
        FSDP leaves its gathered weights empty.
        """
        return {id(storage): storage.nbytes() for storage in self._storages}

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages that autograd keeps, without parameters and buffers."""
        return sum(tensor.bytes for tensor in self.saved)

    def rows(self) -> list[Row]:
        """One row for each tensor, named by module, operation and argument."""
        return [Row(f"{t.module or 'root'}: {t.op} {t.argument}".rstrip(), t.bytes, source=t.line) for t in self.saved]


@contextmanager
def record(module: nn.Module) -> Iterator[Ledger]:
    """Record what autograd keeps while the block runs ``module``'s forward pass.

    Keep the output alive until the block ends: it holds the graph, and the graph holds the
    tensors.  Works on any module, on real and on fake tensors, on any device.
    """
    ledger = Ledger()
    ignored = storages_of(*module.parameters(), *module.buffers())
    storages = ledger._storages

    with OperationTracker(module) as tracker:

        def pack(tensor: Tensor) -> Tensor:
            for part in plain_tensors(tensor):
                storage = part.untyped_storage()
                if storage not in ignored:
                    views = storages.setdefault(storage, {})
                    view = (part.storage_offset(), tuple(sorted(zip(part.stride(), part.shape))))
                    if view not in views:
                        views[view] = (part.shape, part.dtype, tracker.module, *tracker.saver_of(part))
            # An output that is saved itself would hold the graph that holds it: a leak.
            return tensor.detach() if tensor.requires_grad else tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield ledger

    for storage, views in storages.items():
        ledger.saved.extend(_shares(views, storage.nbytes()))


def _shares(views: dict[tuple, tuple], left: int) -> Iterator[SavedTensor]:
    """Divide one storage's bytes, ``left``, among the different views of it that were saved.

    Each view gets the bytes of its elements, as far as the storage reaches.  Bytes that no view
    covers are kept alive too, and get a line of their own.
    """
    for shape, dtype, module, op, argument, line in views.values():
        share = min(left, shape.numel() * dtype.itemsize)
        left -= share
        if share:
            yield SavedTensor(module, op, argument, tuple(shape), dtype, share, line)
    if left:
        shape, dtype, module, op, argument, line = next(iter(views.values()))
        unseen = (left // dtype.itemsize,)
        yield SavedTensor(module, op, f"{argument} (rest of its storage)".strip(), unseen, dtype, left, line)


def storages_of(*tensors: Tensor) -> WeakSet[torch.UntypedStorage]:
    """The storages that hold the data of ``tensors``, held weakly."""
    return WeakSet(part.untyped_storage() for tensor in tensors for part in plain_tensors(tensor))


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
