"""The ledger: every tensor that autograd saves for backward, with the module and the operation that saved it.

Saved-tensor hooks see each tensor when autograd saves it.  The ledger holds storages by weak references and
counts at the end of forward, so a tensor that was saved and already freed does not count.  A
storage counts once, in full, however many views of it were saved.  Weights and buffers of any module
in the process do not count.  The hooks see what a checkpoint saves, and not what it drops.

Hooks can't see everything: an attribute of ctx, a closure and a cache hold tensors too.  So the ledger notes
the results of all operations as well, and lists those that are alive at the end without autograd having saved them.
"""

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from actmem.drop import NAME_READERS
from actmem.ledger.ledger_tables import STORAGE_KINDS, UNSAVED, SavedTensor, ledger_text
from actmem.ledger.provenance import Provenance, ProvenanceTracker, graph_nodes
from actmem.ledger.save_sites import UNKNOWN, OperationTracker
from actmem.ledger.storages import settled, shape_of, storage_of, storages_in, storages_of, stored_parts

_WEIGHTS = ("weight", "gathered weight")


class Ledger:
    """The tensors that stay alive for backward, as ``record`` found them. The lists are filled when its block ends.

    Args:
        provenance: the tracker that noted what autograd saved, and where each storage comes from.
        device: the type of the device that has the weights, such as "cuda".

    Attributes:
        saved: the tensors, without weights, that autograd or a saved-tensor hook held at the block's end.
        unsaved: other tensors that were made inside modules and were alive at the block's end, without the outputs of
            outermost modules.
        weights: weights and gathered weights that autograd saved. They exist anyway, so no total counts them.
        device: the type of the device that has the weights, such as "cuda".
    """

    def __init__(self, provenance: ProvenanceTracker, device: str) -> None:
        self._provenance, self.device = provenance, device
        self.saved: list[SavedTensor] = []
        self.unsaved: list[SavedTensor] = []
        self.weights: list[SavedTensor] = []

    def storages(self) -> dict[int, int]:
        """Return the storages that autograd saved and that are alive now: a dict from the storage's id to its bytes.

        The bytes are the storage's present size: between forward and backward FSDP empties its gathered weights.
        """
        return {id(storage): storage.nbytes() for storage in self._provenance.saved}

    def names_of(self, storage: torch.UntypedStorage) -> list[str]:
        """Return a string for each saved view of a storage: the module, operation and argument that saved the view.

        The list is empty if autograd didn't save the storage.
        """
        return [row.name for row in self._provenance.saved.get(storage, {}).values()]

    @property
    def total_bytes(self) -> int:
        """Bytes of ``saved`` and ``unsaved`` on the weights' device, without weights and buffers."""
        return sum(row.bytes for row in self.tensors) - self.host_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of ``saved`` and ``unsaved`` in the host's memory, if the weights are on another device.

        Random-number generators' states are not counted here.
        """
        return sum(row.bytes for row in self.tensors if self._on_host(row))

    def _on_host(self, row: SavedTensor) -> bool:
        return self.device != "cpu" and row.device == "cpu" and row.kind != "generator state"

    @property
    def tensors(self) -> list[SavedTensor]:
        """All rows of ``saved`` and ``unsaved``; their bytes add up to ``total_bytes`` + ``host_bytes``."""
        return self.saved + self.unsaved

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind, in the order of ``STORAGE_KINDS``; they add up to ``total_bytes``."""
        return sums_of((row for row in self.tensors if not self._on_host(row)), STORAGE_KINDS)

    __repr__ = ledger_text

    def add_up(self, variables: Iterable[object]) -> None:
        """Fill the lists ``saved``, ``unsaved`` and ``weights``; ``record`` calls this when its block ends.

        Args:
            variables: the local variables of all functions that are running. Their tensors are the caller's, so they
                are not listed as ``unsaved``.
        """
        provenance = self._provenance
        for storage, views in provenance.saved.items():
            first = next(iter(views.values()))
            kind, made_by = provenance.kind_of(storage, first.dtype, first.op), provenance.made_by(storage)
            role, repeats = provenance.role(storage), provenance.origins[storage].repeats
            rows = self.weights if kind in _WEIGHTS else self.saved
            for row, offset in _shares(views, storage.nbytes()):
                term = provenance.term(storage, offset)
                rows.append(replace(row, kind=kind, made_by=made_by, role=role, repeats=repeats, term=term))
        for storage, origin, held_by in _unsaved(provenance, variables):
            kind = provenance.kind_of_unsaved(storage, origin)
            if kind not in _WEIGHTS:
                self._add_unsaved(origin, storage.nbytes(), kind, held_by or UNKNOWN)
        for storage, part, held_by in _held_anyway(provenance):
            op = "input" if storage in provenance.tracker.inputs else "output"
            origin = Provenance(True, op, shape=shape_of(part), dtype=part.dtype, device=part.device.type)
            self._add_unsaved(origin, storage.nbytes(), UNSAVED, held_by)

    def _add_unsaved(self, origin: Provenance, size: int, kind: str, held_by: str) -> None:
        module, op, shape, dtype = origin.module, origin.operation, origin.shape, origin.dtype
        self.unsaved.append(SavedTensor(module, op, "", shape, dtype, size, "", kind, held_by, device=origin.device))


def sums_of(rows: Iterable[SavedTensor], kinds: Iterable[str]) -> dict[str, int]:
    """Return a dict from kinds to their rows' bytes, in the order of ``kinds``, without kinds of 0 bytes."""
    sums = dict.fromkeys(kinds, 0)
    for row in rows:
        sums[row.kind] += row.bytes
    return {kind: size for kind, size in sums.items() if size}


@contextmanager
def record(module: nn.Module, adds_up: bool = True) -> Iterator[Ledger]:
    """Record which tensors stay alive for backward while the block runs ``module``'s forward pass.

    Keep the output alive until the block ends: it holds the graph, and the graph holds the tensors. Works on any
    module, on real and on fake tensors, on any device, and inside another ``record``. Saved-tensor hooks from outside
    the block still work.

    Args:
        module: the model or layer that the block runs; its submodules' names appear in the ledger.
        adds_up: False leaves the ledger's lists empty, for callers that only use ``storages`` or ``names_of``.

    Yields: the ledger, which is complete when the block ends.
    """
    provenance = ProvenanceTracker(OperationTracker(module))
    ledger = Ledger(provenance, next((p.device.type for p in module.parameters()), "cpu"))
    with ExitStack() as stack:
        NAME_READERS.append(provenance.note_names)
        stack.callback(NAME_READERS.remove, provenance.note_names)
        stack.enter_context(provenance.watching())
        yield ledger
    provenance.tracker.weights |= storages_of(*module.parameters(), *module.buffers())  # lazy modules have made theirs
    if adds_up:
        ledger.add_up(_locals_above())


def _locals_above() -> Iterator[object]:
    """Yield the variables of all functions that are running."""
    frame = sys._getframe(1)
    while frame is not None:
        yield from list(frame.f_locals.values())
        frame = frame.f_back  # type: ignore[assignment]


def _shares(views: dict[tuple, SavedTensor], left: int) -> Iterator[tuple[SavedTensor, int]]:
    """Divide the bytes of one storage among the views of it that were saved.

    Each view gets the bytes of its elements, as far as the storage reaches. Bytes that no view covers are kept alive
    too, and get a row of their own.

    Args:
        views: the saved views, by keys from ``view_of``.
        left: the storage's bytes.

    Yields: each row, with its part of the bytes, and its offset in the storage.
    """
    for (offset, *_), row in views.items():
        share = min(left, row.bytes)
        left -= share
        if share:
            yield replace(row, bytes=share), offset
    if left:
        (offset, *_), row = next(iter(views.items()))
        argument, shape = f"{row.argument} (rest of its storage)".strip(), (left // row.dtype.itemsize,)
        yield replace(row, argument=argument, shape=shape, bytes=left), offset


def _unsaved(
    provenance: ProvenanceTracker, variables: Iterable[object]
) -> Iterator[tuple[torch.UntypedStorage, Provenance, str]]:
    """Yield the storages that were made in the block and are alive, but that autograd did not save.

    Inputs and outputs of outermost modules are left out, and so are tensors that were made outside of modules and are
    in one of ``variables``: all these are the caller's.

    Yields: the storage, its provenance, and who holds it ("" if unknown).
    """
    tracker = provenance.tracker

    def unsaved() -> list[tuple[torch.UntypedStorage, Provenance]]:
        return [
            (storage, origin)
            for storage, origin in provenance.origins.items()
            if origin.made and not origin.saved and storage not in tracker.outputs and storage.nbytes()
        ]

    settled(lambda: len(unsaved()))
    leftovers = [(storage, origin) for storage, origin in unsaved() if storage not in tracker.inputs]
    if not all(origin.inside for _, origin in leftovers):
        ours = (OperationTracker, ProvenanceTracker)
        callers = {id(storage) for storage in storages_in([v for v in variables if not isinstance(v, ours)])}
        leftovers = [(storage, origin) for storage, origin in leftovers if origin.inside or id(storage) not in callers]
    texts = _holders([id(storage) for storage, _ in leftovers], _text)
    for storage, origin in leftovers:
        yield storage, origin, texts.get(id(storage), "")


def _held_anyway(provenance: ProvenanceTracker) -> Iterator[tuple[torch.UntypedStorage, Tensor, str]]:
    """Yield inputs and outputs of outermost modules that are held although autograd did not save them.

    Yields: the storage, the tensor, and a text that names the holder, such as "an attribute of ctx of Square".
    """
    tracker = provenance.tracker
    theirs = [reference() for reference in tracker.input_tensors + tracker.output_tensors]
    wanted = {
        id(storage): (storage, part)
        for storage, part in stored_parts(theirs)
        if storage not in provenance.saved and storage not in tracker.weights
    }
    if wanted:
        for node in graph_nodes(tracker):
            for storage in storages_in(vars(node)) if isinstance(node, FunctionCtx) else ():
                if id(storage) in wanted:
                    yield *wanted.pop(id(storage)), _text(node)
    if tracker.checkpoint_ran:
        for key, text in _holders(wanted, _text_of_checkpoint).items():
            yield *wanted[key], text


#: How many references from a tensor its holder may be: a list in a dict in a cache is three steps.
_STEPS = 6


def _holders(storages: Collection[int], text_of: Callable[[Any], str]) -> dict[int, str]:
    """Find what keeps each storage alive: the nearest object among its referrers that ``text_of`` can describe.

    It looks at every object of the process, unless ``storages`` is empty.

    Args:
        storages: the storages' ids.
        text_of: returns a text that describes an object; "" if the search shall go on to what holds that object.

    Returns: by a storage's id, the text of its holder.
    """
    texts: dict[int, str] = {}
    #: Objects of this step, and the storages that each leads to.
    objects: list[Any] = [
        obj
        for obj in (gc.get_objects() if storages else ())
        if issubclass(type(obj), Tensor) and id(storage_of(obj)) in storages
    ]
    leads_to = {id(tensor): {id(storage_of(tensor))} for tensor in objects}
    ours = {id(objects), id(leads_to)}
    for _ in range(_STEPS):
        holders: list[Any] = []
        for holder in gc.get_referrers(*objects) if objects else ():
            if id(holder) in ours or isinstance(holder, (FrameType, type)):
                continue
            before = leads_to.setdefault(id(holder), set())
            reached = {key for held in gc.get_referents(holder) for key in leads_to.get(id(held), ())}
            reached -= texts.keys() | before
            if text := text_of(holder):
                texts.update(dict.fromkeys(reached, text))
            elif reached:
                holders.append(holder)
                before |= reached
        ours.add(id(holders))
        objects = holders
    return texts


def _text(holder: Any) -> str:
    kind = type(holder)
    if issubclass(kind, nn.Module):
        return f"an attribute of {kind.__name__}"
    if kind.__module__ == torch.utils.checkpoint.__name__ and kind.__name__ == "_VersionWrapper":
        return "the cache of selective checkpointing"
    if issubclass(kind, FunctionCtx):
        return f"an attribute of ctx of {kind.__name__.removesuffix('Backward')}"
    if issubclass(kind, FunctionType):
        return f"the closure of {holder.__qualname__}"
    if issubclass(kind, ModuleType):
        return f"a global of {holder.__name__}"
    plain = (dict, list, tuple, set, CellType, MethodType, Tensor)
    if issubclass(kind, plain) or kind.__module__ in ("builtins", "_weakref", "weakref"):
        return ""
    return f"an object of {kind.__module__}.{kind.__qualname__}"


def _text_of_checkpoint(holder: Any) -> str:
    if isinstance(holder, FunctionCtx):
        return _text(holder)
    owner = holder if type(holder) is FunctionType else type(holder)
    is_checkpoint = getattr(owner, "__module__", "") == torch.utils.checkpoint.__name__
    return "an argument of a checkpoint" if is_checkpoint else ""
