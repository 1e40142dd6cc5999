"""The ledger: every tensor that autograd keeps for backward, with who saved it.

Saved-tensor hooks see each tensor when autograd saves it.  The ledger holds storages weakly and
counts at the end of forward, so a tensor that was saved and already freed does not count.  A
storage counts once, in full, however many views of it were saved; weights and buffers do not count,
whichever module of the process they belong to.  These hooks see what a checkpoint keeps, and never
what it drops.

Hooks can't see everything: an attribute of ctx, a closure, a cache and a user's own packing hooks
hold tensors too.  So the ledger notes the results of all operations as well, and lists those that
are alive at the end without autograd having saved them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actmem.measure import holders
from actmem.measure.kinds import STORAGE_KINDS, UNSAVED, Classifier
from actmem.measure.leaves import plain_tensors, shape_of, storage_of, storages_of, tensors_in
from actmem.measure.origins import Origins
from actmem.measure.replace import replaced
from actmem.measure.savers import UNKNOWN, OperationTracker
from actmem.rows import Row
from actmem.torch_private import top_saved_tensors_hooks


@dataclass(frozen=True)
class SavedTensor:
    """One stored tensor: what it is and who saved it first.

    module: name of the innermost module that was running; "" for the root.
    op: the torch function, or the autograd Function, that saved it.
    argument: which input of ``op`` the tensor is ("0", "1", …, or a keyword); "" for a tensor
    that ``op`` made itself.
    bytes: this tensor's share of its storage; the shares of one storage add up to its size.
    line: file and line of the call.
    kind: one of ``kinds.STORAGE_KINDS``.
    held_by: what keeps it, if autograd doesn't and it could be found out.
    made_by: the operation below autograd that made it; "" if it was there before.
    """

    module: str
    op: str
    argument: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    line: str
    kind: str = "activation"
    held_by: str = ""
    made_by: str = ""


class Ledger:
    """What ``record`` saw.  Complete once its ``with`` block has ended.

    saved: what autograd kept at that moment, without weights.  unsaved: what else was made inside
    modules and still alive, without what outermost modules returned.  weights: weights, and gathered
    weights, that autograd refers to; they exist anyway and count nowhere.  ``storages()`` is what
    autograd still keeps now.
    """

    def __init__(self) -> None:
        self.saved: list[SavedTensor] = []
        self.unsaved: list[SavedTensor] = []
        self.weights: list[SavedTensor] = []
        #: The storages that autograd took, and the different views of each that were saved.  A storage has
        #: one Python object for as long as it lives, so a weak reference to that follows the storage itself.
        self._storages: WeakKeyDictionary[torch.UntypedStorage, dict[tuple, tuple]] = WeakKeyDictionary()

    def storages(self) -> dict[int, int]:
        """Bytes of each storage that autograd keeps and that is still alive.

        A storage that was emptied since counts with its present size: between forward and backward
        FSDP leaves its gathered weights empty.
        """
        return {id(storage): storage.nbytes() for storage in self._storages}

    def names_of(self, storage: torch.UntypedStorage) -> list[str]:
        """Who saved each view of a storage, as ``rows`` has it; none if autograd didn't take it."""
        views = self._storages.get(storage, {}).values()
        return [f"{module or 'root'}: {op} {argument}".rstrip() for _, _, module, op, argument, _ in views]

    @property
    def saved_bytes(self) -> int:
        """Bytes of all storages that autograd keeps, without weights and buffers."""
        return sum(tensor.bytes for tensor in self.saved)

    @property
    def total_bytes(self) -> int:
        """``saved_bytes`` and what else stays alive until backward."""
        return self.saved_bytes + sum(tensor.bytes for tensor in self.unsaved)

    @property
    def tensors(self) -> list[SavedTensor]:
        """``saved`` and ``unsaved``; their bytes add up to ``total_bytes``."""
        return self.saved + self.unsaved

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind, in the order of ``kinds.STORAGE_KINDS``."""
        sums = {kind: sum(tensor.bytes for tensor in self.tensors if tensor.kind == kind) for kind in STORAGE_KINDS}
        return {kind: size for kind, size in sums.items() if size}

    def rows(self) -> list[Row]:
        """One row for each tensor, named by module, operation and argument."""
        return [
            Row(f"{t.module or 'root'}: {t.op} {t.argument}".rstrip(), t.bytes, source=t.line) for t in self.tensors
        ]

    def __repr__(self) -> str:
        from actmem.measure.ledger_tables import ledger_text

        return ledger_text(self)

    def _repr_html_(self) -> str:
        from actmem.measure.ledger_tables import ledger_html

        return ledger_html(self)


class _Recording:
    """One ``record`` block: what it notes while it runs, and how it adds up."""

    def __init__(self, module: nn.Module, ledger: Ledger, tracker: OperationTracker, origins: Origins):
        self.ledger, self.tracker, self.origins = ledger, tracker, origins
        self.own_weights = storages_of(*module.parameters(), *module.buffers())
        #: Weights that were seen as such when they were saved: they may be in no module when the block ends.
        self.seen_weights: WeakSet[torch.UntypedStorage] = WeakSet()
        self.hooks_were_off = False

    def note(self, tensor: Tensor, saver: tuple[str, str, str] | None = None) -> None:
        self.origins.paused = True
        try:
            parts = list(plain_tensors(tensor))
        except (RuntimeError, NotImplementedError, TypeError, AttributeError):
            parts = []
        finally:
            self.origins.paused = False
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(getattr(tensor, "_base", None), nn.Parameter)
        for part in parts:
            storage = storage_of(part)
            if storage is None or storage in self.own_weights:
                continue
            if is_weight:
                self.seen_weights.add(storage)
            views = self.ledger._storages.setdefault(storage, {})
            try:
                view = (part.storage_offset(), tuple(sorted(zip(part.stride(), part.shape))))
            except RuntimeError:  # a strided nested tensor
                view = (0, ())
            if view not in views:
                saver = saver or self.tracker.saver_of(part)
                views[view] = (torch.Size(shape_of(part)), part.dtype, self.tracker.module, *saver)

    def note_graph(self) -> None:
        """Note what the nodes of the outputs' graphs saved while hooks were off."""
        for node in holders.graph_nodes(self.tracker):
            for name in dir(node):
                if name.startswith("_saved_"):
                    try:
                        tensors = list(tensors_in(getattr(node, name), 1))
                    except RuntimeError:  # freed by a backward pass
                        continue
                    for tensor in tensors:
                        self.note(tensor, (node.name().rstrip("0").removesuffix("Backward"), name[7:], ""))

    def finish(self, locals_of_caller: Iterable[object]) -> None:
        classifier = Classifier(self.tracker, self.origins, self.own_weights, self.seen_weights)
        ledger = self.ledger
        for storage, views in ledger._storages.items():
            _, dtype, _, op, *_ = next(iter(views.values()))
            kind = classifier.kind_of(storage, dtype, op)
            rows = ledger.weights if kind in ("weight", "gathered weight") else ledger.saved
            rows.extend(_shares(views, storage.nbytes(), kind, classifier.made_by(storage)))
        for storage, origin, held_by in holders.unsaved(self.tracker, self.origins, ledger._storages, locals_of_caller):
            kind = classifier.kind_of_unsaved(storage, origin)
            if kind not in ("weight", "gathered weight"):
                self._add_unsaved(origin.module, origin.operation, origin.shape, origin.dtype, storage, kind, held_by)
        for tensor, held_by in holders.held_anyway(self.tracker, ledger._storages):
            for part in plain_tensors(tensor):
                if (own := storage_of(part)) is not None and own not in self.own_weights:
                    op = "input" if own in self.tracker.inputs else "output"
                    self._add_unsaved("", op, shape_of(part), part.dtype, own, UNSAVED, held_by)

    def _add_unsaved(self, module, op, shape, dtype, storage, kind, held_by) -> None:
        size, held_by = storage.nbytes(), held_by or UNKNOWN
        self.ledger.unsaved.append(SavedTensor(module, op, "", shape, dtype, size, "", kind, held_by))


@contextmanager
def record(module: nn.Module) -> Iterator[Ledger]:
    """Record what stays alive for backward while the block runs ``module``'s forward pass.

    Keep the output alive until the block ends: it holds the graph, and the graph holds the
    tensors.  Works on any module, on real and on fake tensors, on any device, inside another
    ``record`` too.  Hooks that are active outside the block pack as before.
    """
    ledger = Ledger()
    tracker = OperationTracker(module)
    origins = Origins(tracker)
    recording = _Recording(module, ledger, tracker, origins)
    outer_pack, outer_unpack = top_saved_tensors_hooks() or (None, None)

    def pack(tensor: Tensor) -> object:
        recording.note(tensor)
        if outer_pack is not None:
            return outer_pack(tensor)
        # An output that is saved itself would hold the graph that holds it: a leak.
        return tensor.detach() if tensor.requires_grad else tensor

    hooks = saved_tensors_hooks(pack, outer_unpack or (lambda tensor: tensor))
    with ExitStack() as stack:
        for owner in (torch, torch.random):
            stack.enter_context(replaced(owner, "get_rng_state", _noting(origins)))
        stack.enter_context(tracker)
        stack.enter_context(origins)
        stack.enter_context(
            replaced(torch.autograd.graph, "disable_saved_tensors_hooks", _without(hooks, pack, recording))
        )
        stack.enter_context(hooks)
        yield ledger
        if recording.hooks_were_off:
            recording.note_graph()
    recording.finish(_locals_above())


def _without(hooks: saved_tensors_hooks, pack: Callable, recording: _Recording) -> Callable[[Callable], Callable]:
    """Take ``hooks`` off while ``torch.func.grad`` and its like run, which refuse all hooks."""

    def make(disable):
        @contextmanager
        def disabled(message):
            top = top_saved_tensors_hooks()
            if top is None or top[0] is not pack:
                with disable(message):
                    yield
                return
            recording.hooks_were_off = True
            hooks.__exit__()
            try:
                with disable(message):  # that of a record around this one takes off its own
                    yield
            finally:
                hooks.__enter__()

        return disabled

    return make


def _noting(origins: Origins):
    def make(get_rng_state):
        def noting(*args, **kwargs):
            state = get_rng_state(*args, **kwargs)
            origins.note_state(state)
            return state

        return noting

    return make


def _locals_above() -> Iterator[object]:
    """The variables of all functions that are running."""
    frame = sys._getframe(1)
    while frame is not None:
        yield from list(frame.f_locals.values())
        frame = frame.f_back  # type: ignore[assignment]


def _shares(views: dict[tuple, tuple], left: int, kind: str, made_by: str) -> Iterator[SavedTensor]:
    """Divide one storage's bytes, ``left``, among the different views of it that were saved.

    Each view gets the bytes of its elements, as far as the storage reaches.  Bytes that no view
    covers are kept alive too, and get a line of their own.
    """
    for shape, dtype, module, op, argument, line in views.values():
        share = min(left, shape.numel() * dtype.itemsize)
        left -= share
        if share:
            yield SavedTensor(module, op, argument, tuple(shape), dtype, share, line, kind, made_by=made_by)
    if left:
        shape, dtype, module, op, argument, line = next(iter(views.values()))
        unseen = (left // dtype.itemsize,)
        argument = f"{argument} (rest of its storage)".strip()
        yield SavedTensor(module, op, argument, unseen, dtype, left, line, kind, made_by=made_by)
