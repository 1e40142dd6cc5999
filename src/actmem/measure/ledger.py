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

import gc
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actmem import recompute
from actmem.drop import NAME_READERS
from actmem.measure.ledger_tables import ledger_html, ledger_text
from actmem.measure.origins import STORAGE_KINDS, UNSAVED, Classifier, Origin, Origins
from actmem.measure.savers import UNKNOWN, OperationTracker, kept_as
from actmem.measure.tools import (
    inner_tensors,
    noting_states,
    plain_tensors,
    replaced,
    settled,
    shape_of,
    storage_of,
    storages_in,
    tensors_in,
)  # fmt: skip
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
    kind: one of ``origins.STORAGE_KINDS``.
    held_by: what keeps it, if autograd doesn't and it could be found out.
    made_by: the operation below autograd that made it; "" if it was there before.
    term: the name that one of this library's layers gave it (``drop.Terms``); "" for others.
    device: the type of the device that holds it.
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
    term: str = ""
    device: str = "cpu"


class Ledger:
    """What ``record`` saw.  Complete once its ``with`` block has ended.

    saved: what autograd kept at that moment, without weights.  unsaved: what else was made inside
    modules and still alive, without what outermost modules returned.  weights: weights, and gathered
    weights, that autograd refers to; they exist anyway and count nowhere.  ``storages()`` is what
    autograd still keeps now.  device: the type of the weights' device.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
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
        return [f"{module or 'root'}: {op} {argument}".rstrip() for _, _, _, module, op, argument, _ in views]

    @property
    def total_bytes(self) -> int:
        """Bytes of ``saved`` and ``unsaved``, without weights, buffers and ``host_bytes``."""
        return sum(tensor.bytes for tensor in self.tensors) - self.host_bytes

    @property
    def host_bytes(self) -> int:
        """What of ``tensors`` a model on another device keeps in the host's memory, without states of generators."""
        return sum(tensor.bytes for tensor in self.tensors if self._on_host(tensor))

    def _on_host(self, row: SavedTensor) -> bool:
        return self.device != "cpu" and row.device == "cpu" and row.kind != "generator state"

    @property
    def tensors(self) -> list[SavedTensor]:
        """``saved`` and ``unsaved``; their bytes add up to ``total_bytes`` and ``host_bytes``."""
        return self.saved + self.unsaved

    def by_kind(self) -> dict[str, int]:
        """Of ``total_bytes``, those of each kind, in the order of ``origins.STORAGE_KINDS``."""
        rows = [tensor for tensor in self.tensors if not self._on_host(tensor)]
        sums = {kind: sum(tensor.bytes for tensor in rows if tensor.kind == kind) for kind in STORAGE_KINDS}
        return {kind: size for kind, size in sums.items() if size}

    def rows(self) -> list[Row]:
        """One row for each tensor, named by module, operation and argument."""
        return [
            Row(f"{t.module or 'root'}: {t.op} {t.argument}".rstrip(), t.bytes, source=t.line) for t in self.tensors
        ]

    __repr__, _repr_html_ = ledger_text, ledger_html


class _Recording:
    """One ``record`` block: what it notes while it runs, and how it adds up."""

    def __init__(self, ledger: Ledger, tracker: OperationTracker, origins: Origins):
        self.ledger, self.tracker, self.origins = ledger, tracker, origins
        self.own_weights = tracker.weights
        #: Weights that were seen as such when they were saved: they may be in no module when the block ends.
        self.seen_weights: WeakSet[torch.UntypedStorage] = WeakSet()
        self.hooks_were_off = False
        #: What packing hooks inside the block hold, and whose they are.
        self.packed: WeakKeyDictionary[torch.UntypedStorage, tuple[str, Origin]] = WeakKeyDictionary()
        #: Names that layers gave, by storage and offset: Q, K and V are views of one tensor.
        self.terms: WeakKeyDictionary[torch.UntypedStorage, dict[int, str]] = WeakKeyDictionary()
        self.saved_since: WeakSet[torch.UntypedStorage] = WeakSet()

    def name(self, names: tuple[str, ...], tensors: tuple[Tensor, ...], also: str) -> None:
        """What a layer tells ``drop.NAME_READERS``."""
        for name, tensor in zip(names, tensors):
            if (storage := storage_of(tensor)) is not None:
                self.terms.setdefault(storage, {})[int(tensor.storage_offset())] = name
        for storage in self.saved_since if also else ():
            self.terms.setdefault(storage, {0: also})
        self.saved_since.clear()

    def term(self, storage: torch.UntypedStorage, offset: int) -> str:
        """The name of a tensor that begins there, or of all that the storage holds."""
        names = self.terms.get(storage, {})
        return names.get(offset, "") or (next(iter(names.values())) if len(names) == 1 else "")

    def note(self, tensor: Tensor, saver: tuple[str, str, str] | None = None) -> None:
        self.origins.paused = True
        parts = inner_tensors(tensor)
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
                if not kept_as(*saver[:2]):  # it has its name
                    self.saved_since.add(storage)
                views[view] = (torch.Size(shape_of(part)), part.dtype, part.device.type, self.tracker.module, *saver)

    def note_hooks_off(self) -> None:
        """Note that some operations ran without hooks."""
        self.hooks_were_off = True

    def note_graph(self) -> None:
        """Note what the nodes of the outputs' graphs saved while hooks were off."""
        for node in graph_nodes(self.tracker):
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
            _, dtype, _, _, op, *_ = next(iter(views.values()))
            kind = classifier.kind_of(storage, dtype, op)
            rows = ledger.weights if kind in ("weight", "gathered weight") else ledger.saved
            shares = _shares(views, storage.nbytes(), kind, classifier.made_by(storage))
            rows.extend(replace(row, term=self.term(storage, view[0])) for row, view in shares)
        for storage, origin, held_by in unsaved(self.tracker, self.origins, ledger._storages, locals_of_caller):
            packed_by, _ = self.packed.pop(storage, ("", None))
            kind = classifier.kind_of_unsaved(storage, origin)
            if kind not in ("weight", "gathered weight"):
                self._add_unsaved(origin, storage, kind, held_by or packed_by)
        for storage, (packed_by, origin) in self.packed.items():  # as they are: from before the block, or an output
            kind = classifier.kind_of(storage, origin.dtype, "")
            if storage not in ledger._storages and kind not in ("weight", "gathered weight"):
                self._add_unsaved(origin, storage, kind, packed_by)
        for tensor, held_by in held_anyway(self.tracker, ledger._storages):
            for part in plain_tensors(tensor):
                if (own := storage_of(part)) is not None and own not in self.own_weights:
                    op = "input" if own in self.tracker.inputs else "output"
                    origin = Origin(True, op, "", shape_of(part), part.dtype, device=part.device.type)
                    self._add_unsaved(origin, own, UNSAVED, held_by)

    def _add_unsaved(self, origin: Origin, storage: torch.UntypedStorage, kind: str, held_by: str) -> None:
        module, op, shape, dtype = origin.module, origin.operation, origin.shape, origin.dtype
        size, held_by = storage.nbytes(), held_by or UNKNOWN
        row = SavedTensor(module, op, "", shape, dtype, size, "", kind, held_by, device=origin.device)
        self.ledger.unsaved.append(row)


@contextmanager
def record(module: nn.Module, adds_up: bool = True) -> Iterator[Ledger]:
    """Record what stays alive for backward while the block runs ``module``'s forward pass.

    Keep the output alive until the block ends: it holds the graph, and the graph holds the
    tensors.  Works on any module, on real and on fake tensors, on any device, inside another
    ``record`` too.  Hooks that are active outside the block pack as before.  adds_up: False where only names are
    asked for, inside the block.
    """
    ledger = Ledger(next((p.device.type for p in module.parameters()), "cpu"))
    tracker = OperationTracker(module)
    origins = Origins(tracker)
    recording = _Recording(ledger, tracker, origins)
    with ExitStack() as stack:
        stack.enter_context(noting_states(origins.note_state, (recompute, "generator_states")))
        NAME_READERS.append(recording.name)
        stack.callback(NAME_READERS.remove, recording.name)
        stack.enter_context(tracker)
        stack.enter_context(origins)
        stack.enter_context(noting_saved(recording.note, recording.note_hooks_off))
        stack.enter_context(replaced(saved_tensors_hooks, "__enter__", _noting_packed(recording)))
        yield ledger
        if recording.hooks_were_off:
            recording.note_graph()
    if adds_up:
        recording.finish(_locals_above())


@contextmanager
def noting_saved(
    note: Callable[[Tensor], object], note_hooks_off: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """In the block, ``note`` gets each tensor that autograd saves; hooks of outside the block pack as before.

    ``torch.func.grad`` and its like refuse all hooks: they run without, after ``note_hooks_off()``.
    """
    outer_pack, outer_unpack = top_saved_tensors_hooks() or (None, None)

    def pack(tensor: Tensor) -> object:
        note(tensor)
        if outer_pack is not None:
            return outer_pack(tensor)
        # An output that is saved itself would hold the graph that holds it: a leak.
        return tensor.detach() if tensor.requires_grad else tensor

    hooks = saved_tensors_hooks(pack, outer_unpack or (lambda tensor: tensor))

    def make(disable):
        @contextmanager
        def disabled(message):
            top = top_saved_tensors_hooks()
            if top is None or top[0] is not pack:
                with disable(message):
                    yield
                return
            note_hooks_off()
            hooks.__exit__()
            try:
                with disable(message):  # that of a record around this one takes off its own
                    yield
            finally:
                hooks.__enter__()

        return disabled

    with replaced(torch.autograd.graph, "disable_saved_tensors_hooks", make), hooks:
        yield


def _noting_packed(recording: _Recording) -> Callable[[Callable], Callable]:
    """Note what hooks that begin in the block pack: nothing in Python refers to it."""

    def make(enter):
        def noting(hooks):
            pack = hooks.pack_hook

            def packed(tensor):
                held = pack(tensor)
                text = f"the hooks of {getattr(pack, '__qualname__', type(pack).__name__).partition('.')[0]}"
                for part in (part for one in tensors_in(held) for part in inner_tensors(one)):
                    if (storage := storage_of(part)) is not None:
                        op, module = recording.tracker.saver_of(tensor)[0], recording.tracker.module
                        origin = Origin(True, op, module, shape_of(part), part.dtype, device=part.device.type)
                        recording.packed[storage] = text, origin
                return held

            hooks.pack_hook = packed
            try:
                return enter(hooks)
            finally:
                hooks.pack_hook = pack

        return noting

    return make


def _locals_above() -> Iterator[object]:
    """The variables of all functions that are running."""
    frame = sys._getframe(1)
    while frame is not None:
        yield from list(frame.f_locals.values())
        frame = frame.f_back  # type: ignore[assignment]


def _shares(views: dict[tuple, tuple], left: int, kind: str, made_by: str) -> Iterator[tuple[SavedTensor, tuple]]:
    """Divide one storage's bytes, ``left``, among the different views of it that were saved; each with its view.

    Each view gets the bytes of its elements, as far as the storage reaches.  Bytes that no view
    covers are kept alive too, and get a line of their own.
    """
    for view, (shape, dtype, device, module, op, argument, line) in views.items():
        share = min(left, shape.numel() * dtype.itemsize)
        left -= share
        row = SavedTensor(module, op, argument, tuple(shape), dtype, share, line, kind, made_by=made_by, device=device)
        if share:
            yield row, view
    if left:
        view, (_, dtype, device, module, op, argument, line) = next(iter(views.items()))
        argument = f"{argument} (rest of its storage)".strip()
        shape = (left // dtype.itemsize,)
        yield SavedTensor(module, op, argument, shape, dtype, left, line, kind, made_by=made_by, device=device), view


#: How far from a tensor its holder is looked for: a list in a dict in a cache is three steps.
_STEPS = 6


def unsaved(
    tracker: OperationTracker, origins: Origins, saved: Container[torch.UntypedStorage], variables: Iterable[object]
) -> Iterator[tuple[torch.UntypedStorage, Origin, str]]:
    """Storages made in the block, alive and not ``saved``, with their origin and their holder ("" if unknown).

    Left out: what outermost modules returned, and what was made outside of modules and is in one of
    ``variables``; both are the caller's.
    """

    def left() -> list[tuple[torch.UntypedStorage, Origin]]:
        return [
            (storage, origin)
            for storage, origin in origins.found.items()
            if origin.made and storage not in saved and storage not in tracker.outputs and storage.nbytes()
        ]

    settled(lambda: len(left()))
    found = left()
    if not all(origin.inside for _, origin in found):
        mine = {id(storage) for storage in storages_in([v for v in variables if not isinstance(v, _OURS)])}
        found = [(storage, origin) for storage, origin in found if origin.inside or id(storage) not in mine]
    found = [(storage, origin) for storage, origin in found if storage not in tracker.inputs]
    tensors = [origin.tensor() if origin.tensor is not None else None for _, origin in found]
    lost = {id(storage) for (storage, _), tensor in zip(found, tensors) if tensor is None}
    # Where the result is gone, another tensor, as a detached one, has its storage.
    others = {id(storage_of(tensor)): tensor for tensor in _tensors_of(lost)}
    tensors = [tensor if tensor is not None else others.get(id(s)) for (s, _), tensor in zip(found, tensors)]
    texts = _holders([tensor for tensor in tensors if tensor is not None], _text) if found else {}
    for (storage, origin), tensor in zip(found, tensors):
        yield storage, origin, texts.get(id(tensor), "")


def _tensors_of(storages: Collection[int]) -> list[Tensor]:
    """All tensors with one of these storages, by id; it takes a look at every object of the process, if there are any."""
    every = gc.get_objects() if storages else []
    return [one for one in every if issubclass(type(one), Tensor) and id(storage_of(one)) in storages]


def held_anyway(tracker: OperationTracker, saved: Container[torch.UntypedStorage]) -> Iterator[tuple[Tensor, str]]:
    """Inputs and outputs of outermost modules that a ctx or a checkpoint holds although autograd did not save them."""
    theirs = [reference() for reference in tracker.input_tensors + tracker.output_tensors]
    wanted = {id(s): s for s in storages_in([t for t in theirs if t is not None]) if s not in saved}
    if wanted and tracker.functions_ran:
        for node in graph_nodes(tracker):
            if isinstance(node, torch.autograd.function.FunctionCtx):
                for tensor in tensors_in(vars(node)):
                    if wanted.pop(id(storage_of(tensor)), None) is not None:
                        yield tensor, _text(node)
    if wanted and tracker.checkpoint_ran:
        found = _tensors_of(wanted)
        texts = _holders(found, _text_of_checkpoint)
        for tensor in found:
            if id(tensor) in texts and wanted.pop(id(storage_of(tensor)), None) is not None:
                yield tensor, texts[id(tensor)]


def graph_nodes(tracker: OperationTracker) -> Iterator[Any]:
    """Every node of the graphs behind what outermost modules returned."""
    nodes = [tensor.grad_fn for reference in tracker.output_tensors if (tensor := reference()) is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is not None:
            yield node
            following = {following for following, _ in node.next_functions} - seen
            seen |= following
            nodes.extend(following)


_OURS = (OperationTracker, Origins)


def _holders(tensors: list[Tensor], text_of: Callable[[Any], str]) -> dict[int, str]:
    """What keeps each tensor, by its id: the nearest object that ``text_of`` has words for, found by the garbage collector."""
    found: dict[int, str] = {}
    #: Objects of this step, and the tensors that each leads to.
    here: list[Any] = list(tensors)
    leads_to = {id(tensor): {id(tensor)} for tensor in tensors}
    passed = {id(here), id(tensors), id(leads_to)}
    for _ in range(_STEPS):
        above: list[Any] = []
        for holder in gc.get_referrers(*here) if here else ():
            if id(holder) in passed or isinstance(holder, (FrameType, type)):
                continue
            reached = {tensor for held in gc.get_referents(holder) for tensor in leads_to.get(id(held), ())} - set(
                found
            )
            if text := text_of(holder):
                found.update(dict.fromkeys(reached, text))
            elif reached:
                above.append(holder)
                leads_to.setdefault(id(holder), set()).update(reached)
        passed.update(map(id, here), (id(above),))
        here = above
    return found


def _text(holder: Any) -> str:
    kind = type(holder)
    if issubclass(kind, nn.Module):
        return f"an attribute of {kind.__name__}"
    if kind.__module__ == torch.utils.checkpoint.__name__ and kind.__name__ == "_VersionWrapper":
        return "the cache of selective checkpointing"
    if issubclass(kind, torch.autograd.function.FunctionCtx):
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
    if isinstance(holder, torch.autograd.function.FunctionCtx):
        return _text(holder)
    owner = holder if type(holder) is FunctionType else type(holder)
    is_checkpoint = getattr(owner, "__module__", "") == torch.utils.checkpoint.__name__
    return "an argument of a checkpoint" if is_checkpoint else ""
