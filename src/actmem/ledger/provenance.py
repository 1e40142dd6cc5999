"""For each storage: which operation made it, in which module, from what, who saved it, and which kind of memory it is.

A TorchDispatchMode sees the results of every operation. So it also finds tensors that saved-tensor hooks don't see,
those that an attribute, a closure or a cache keeps alive. And it can tell a copy of a weight from an activation.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from math import prod
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actmem.ledger.comms import KIND_OF_NAME, kind_of
from actmem.ledger.ledger_tables import UNSAVED, SavedTensor
from actmem.ledger.modes import QuietDispatchMode, nodes_from
from actmem.ledger.save_sites import OperationTracker, in_checkpoint, kept_as, view_of
from actmem.ledger.storages import (
    noting_states,
    replaced,
    shape_of,
    storage_of,
    storages_in,
    stored_parts,
    tensors_in,
)
from actmem.torch_private import never_compiled, top_saved_tensors_hooks

#: Operations whose result holds the same numbers as their first tensor, perhaps in another dtype or layout.
_COPIES = {
    "_to_copy", "clone", "copy_", "contiguous", "chunk_cat", "_chunk_cat", "split_with_sizes_copy",
    "all_gather_copy_in", "cat", "_foreach_copy_", "wait_tensor", "detach_copy",
}  # fmt: skip
#: Operations that multiply matrices, each with the place of the left matrix among its arguments.
_MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_grouped_mm": 0}
#: What a GELU computes on the way.
_BENT = ("tanh", "erf")
#: Operations that select some of a tensor's rows or matrices.
_PICKS = ("index", "index_select", "gather")
#: How the names of attention's fused operations begin.
_FUSED_ATTENTION = "_scaled_dot_product_"
#: The widest head of a fused attention kernel.
WIDEST_HEAD = 256
#: Bytes of the state of a CPU's generator and of a GPU's.
_STATE_BYTES = (5056, 16)


@dataclass
class Scores:
    """A candidate for attention's scores QKᵀ in a model that doesn't say where its attention is.

    One such object stands for the result of a matmul of two activations and for all tensors of the same size that are
    computed from that result. If they prove to be attention's scores, the ledger lists them as "attention scores": a
    fused kernel would not save them.

    Attributes:
        normalized: whether a softmax was applied to these tensors.
        attended: whether a matmul read them after the softmax, so that they really are attention's scores.
    """

    normalized: bool = False
    attended: bool = False


@dataclass
class Provenance:
    """Where one storage comes from: the operation that made it, in which module, and from which other storages.

    Attributes:
        made: whether an operation made the storage while the tracker was on; False if the storage existed before.
        operation: the operation that made the storage, such as "mm", or "generator state"; "" if the storage existed
            before.
        module: the name of the innermost module that was running when the storage was first seen; "" for the root.
        shape: the shape of the first tensor that had this storage.
        dtype: the dtype of that tensor.
        device: the type of that tensor's device, such as "cuda".
        inside: whether a module or an autograd Function was running when the storage was made.
        constant: whether the storage was made without random numbers, and from no tensor or from constants alone.
        of_weights: whether the storage is a weight, or was computed from weights and constants alone, without a matmul.
        copied_from: the storages from before the tracking of which this storage is a copy, or a copy of a copy; empty
            if it is no such copy.
        gathered: whether a collective made this copy.
        repeats: how many times a copy of an expanded tensor holds each element; 1 for any other storage.
        one_plus: whether the storage is a number plus the result of tanh or erf, as in a GELU.
        picked_from: the storage from before the tracking of which this one has some of the matrices, such as one
            expert's weights out of all experts'; else None.
        scores: the attention scores of which the storage is a part, or from which only elementwise operations and a
            softmax computed it; else None.
        masks: the attention scores that the storage masks; else None.
        multiplied: the Scores of the last matmul that read the storage; None if no matmul did.
        saved: the views of the storage that autograd saved, each once.
    """

    made: bool
    operation: str = ""
    inside: bool = False
    module: str = ""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    device: str = "cpu"
    constant: bool = False
    of_weights: bool = False
    copied_from: tuple[weakref.ref, ...] = ()
    gathered: bool = False
    repeats: int = 1
    one_plus: bool = False
    picked_from: weakref.ref | None = None
    scores: Scores | None = None
    masks: Scores | None = None
    multiplied: Scores | None = None
    saved: dict[tuple, SavedTensor] = field(default_factory=dict)


class ProvenanceTracker(QuietDispatchMode):
    """Notes the Provenance of every storage that an operation reads or returns, and every tensor that autograd saves.

    torch.compile compiles as it would without this mode. The tracker doesn't see what compiled code makes.

    Args:
        tracker: tells which modules and operations run.
        on_found: called with each storage that is seen for the first time, and its Provenance.
        after: called after each operation with all storages that it read or returned; None: no call.
    """

    def __init__(
        self,
        tracker: OperationTracker,
        on_found: Callable[[torch.UntypedStorage, Provenance], object] = lambda storage, origin: None,
        after: Callable[[list[torch.UntypedStorage]], object] | None = None,
    ):
        super().__init__()
        self.tracker, self._on_found, self._after = tracker, on_found, after
        # A storage has one Python object for as long as it lives, so a weak reference to that follows the storage
        # itself.
        self.origins: WeakKeyDictionary[torch.UntypedStorage, Provenance] = WeakKeyDictionary()
        #: The storages that autograd took, in order, and the views of each that were saved.
        self.saved: WeakKeyDictionary[torch.UntypedStorage, dict[tuple, SavedTensor]] = WeakKeyDictionary()
        #: Weights that were seen as such: at the end they may be in no module, or frozen (``gc.freeze``).
        self._seen_weights: WeakSet[torch.UntypedStorage] = WeakSet()
        #: Names that layers gave, by storage and offset: Q, K and V are views of one tensor.
        self._terms: WeakKeyDictionary[torch.UntypedStorage, dict[int, str]] = WeakKeyDictionary()
        self._without_name: WeakSet[torch.UntypedStorage] = WeakSet()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the block runs, note the storages that operations make, and the tensors that autograd saves.

        Also noted are the objects that saved-tensor hooks of the user or of a library put in place of a saved tensor.
        """
        with noting_states(self._note_state), self.tracker, self, self._noting_saved() as hooks_off:
            with replaced(saved_tensors_hooks, "__enter__", self._noting_packed):
                yield
                if hooks_off:
                    self._note_graph()

    # What operations make.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, func = kwargs or {}, self.real_operation(func, args)
        result = func(*args, **kwargs)
        # Some operations write into their argument and return nothing.
        results = stored_parts(kwargs.get("out") if result is None else result, 1)
        if self._after is None and not _writes(func) and all(storage in self.origins for storage, _ in results):
            return result  # views, quickly
        sources = []
        for storage, part in stored_parts((args, kwargs)):
            sources.append(storage)
            if storage not in self.origins:
                self._add(storage, part, Provenance(made=False))
        for storage, part in results:
            self._note(storage, part, func, args, kwargs, sources)
        if self._after is not None:
            self._after([*sources, *(storage for storage, _ in results)])
        return result

    def _note_state(self, state: Tensor) -> None:
        """Note the state of a generator, which no operation returns."""
        if (storage := storage_of(state)) is not None:
            self.tracker.checkpoint_ran |= in_checkpoint(sys._getframe(1))  # not ours: it hands all to autograd
            self._add(storage, state, Provenance(True, "generator state", self.tracker.inside))

    def _add(self, storage: torch.UntypedStorage, tensor: Tensor, origin: Provenance) -> Provenance:
        origin.module, origin.shape = self.tracker.module, shape_of(tensor)
        origin.dtype, origin.device = tensor.dtype, tensor.device.type
        origin.of_weights |= storage in self.tracker.weights
        if isinstance(tensor, nn.Parameter):
            self._seen_weights.add(storage)
        self.origins[storage] = origin
        self._on_found(storage, origin)
        return origin

    def _note(self, storage: torch.UntypedStorage, result: Tensor, func: Any, args: tuple, kwargs: dict, sources: list):
        origin = self.origins.get(storage)
        if origin is not None and not _writes(func):  # a view
            return
        other_sources = [source for source in sources if source is not storage]
        inputs = [self.origins[source] for source in other_sources]
        of_weights = any(each.of_weights for each in inputs) and _name_of(func) not in _MATMULS
        of_weights = of_weights and all(each.of_weights or each.constant for each in inputs)
        if origin is None:
            origin = Provenance(True, _name_of(func), self.tracker.inside, of_weights=of_weights)
            origin.constant = not _by_chance(func) and all(each.constant for each in inputs)
            self._trace_copy(origin, func, other_sources)
            if origin.operation in _COPIES and args and isinstance(args[0], Tensor):
                origin.repeats = _repeats(args[0])
            elif origin.operation == "add" and len(inputs) == 1 and inputs[0].operation in _BENT:
                origin.one_plus = True
            elif origin.operation in _PICKS and inputs and not inputs[0].made and args[0].dim() > 2:
                origin.picked_from = weakref.ref(other_sources[0])
            self._trace_scores(origin, result.numel(), other_sources, args)
            self._add(storage, result, origin)
        elif origin.made and (origin.constant or origin.of_weights or origin.copied_from):  # until now
            alone = of_weights or all(each.constant for each in inputs)
            origin.of_weights = alone and (origin.of_weights or origin.constant and of_weights)
            if _by_chance(func) or not all(each.constant for each in inputs):
                origin.constant, origin.copied_from = False, ()
                self._trace_copy(origin, func, other_sources)
            elif origin.copied_from and kind_of(func) == "all-gather":  # of a part of the same storage
                origin.gathered = True
        if not origin.made and "out" in kwargs:  # FSDP gathers into the buffers of the step before
            self._trace_copy(origin, func, [source for source in storages_in(args) if source is not storage])

    def _trace_scores(self, origin: Provenance, size: int, sources: list[torch.UntypedStorage], args: tuple) -> None:
        """Note which Scores an operation's result belongs to, and which of its operands are multiplied, or mask scores.

        Args:
            origin: the Provenance of the result.
            size: elements of the result.
            sources: the storages that the operation reads.
            args: the operation's positional arguments.
        """
        operands, operation = [self.origins[source] for source in sources], origin.operation
        scored = [each.scores for each in operands if each.scores is not None]
        if operation in _MATMULS:
            scores = next((scores for scores in scored if scores.normalized), None) or Scores()
            scores.attended = scores.normalized
            for each in operands:
                each.multiplied = scores
            width = args[_MATMULS[operation]].shape[-1]  # that of a head, if these are scores
            if not (scores.attended or width > WIDEST_HEAD or any(each.of_weights for each in operands)):
                origin.scores = scores
        elif operation.startswith(_FUSED_ATTENTION):
            multiplied = storages_in(args[:3])
            for source, each in zip(sources, operands):
                if any(source is q for q in multiplied):
                    each.multiplied = Scores(attended=True)
                else:
                    each.masks = Scores(attended=True)
        else:
            if scored and operation.startswith(("masked_fill", "where")):
                for each in operands:
                    each.masks = scored[0] if each.scores is None else each.masks
            same_size = (each.scores for each in operands if each.scores is not None and prod(each.shape) == size)
            origin.scores = next(same_size, None)
            if origin.scores is not None and "softmax" in operation:
                origin.scores.normalized = True

    def _trace_copy(self, origin: Provenance, func: Any, sources: list[torch.UntypedStorage]) -> None:
        gathers = kind_of(func) in ("all-gather", "broadcast")
        if not gathers and _name_of(func) not in _COPIES:
            return
        roots: list[weakref.ref] = []
        for source in sources:
            before = self.origins[source]
            if before.made and not before.copied_from:
                return
            roots.extend(before.copied_from if before.made else [weakref.ref(source)])
            gathers = gathers or before.made and before.gathered
        origin.copied_from, origin.gathered = tuple(roots), gathers

    # What autograd saves.

    @contextmanager
    def _noting_saved(self) -> Iterator[list[str]]:
        """In the block, note each tensor that autograd saves; hooks from outside the block still work.

        Yields: a list of the messages with which ``torch.func.grad`` and its like refused hooks: they ran without ours.
        """
        outer_pack, outer_unpack = top_saved_tensors_hooks() or (None, None)
        off: list[str] = []

        pack = partial(_eager(_pack), self, outer_pack)
        hooks = saved_tensors_hooks(pack, outer_unpack or (lambda tensor: tensor))

        def make(disable):
            @contextmanager
            def disabled(message):
                top = top_saved_tensors_hooks()
                with ExitStack() as stack:
                    if top is not None and top[0] is pack:
                        off.append(message)
                        hooks.__exit__()
                        stack.callback(hooks.__enter__)
                    stack.enter_context(disable(message))  # that of a record around this one takes off its own
                    yield

            return disabled

        with replaced(torch.autograd.graph, "disable_saved_tensors_hooks", make), hooks:
            yield off

    def _noting_packed(self, enter: Callable) -> Callable:
        """Wrap ``enter`` so that each saved-tensor hook that begins in the block also notes the tensors that it packs.

        Nothing else in Python refers to these tensors. Our own hooks call ``keep``, so they need no note.
        """

        def noting(hooks):
            pack = hooks.pack_hook
            whose = getattr(pack, "__qualname__", type(pack).__name__).partition(".")[0]

            is_ours = str(getattr(getattr(pack, "func", pack), "__module__", "")).startswith("actmem.")
            hooks.pack_hook = pack if is_ours else partial(_eager(_pack_as_others), self, pack, whose)
            try:
                return enter(hooks)
            finally:
                hooks.pack_hook = pack

        return noting

    def _note_graph(self) -> None:
        """Note the tensors that the nodes of the outputs' graphs saved while hooks were off."""
        for node in graph_nodes(self.tracker):
            for name in dir(node):
                if name.startswith("_saved_"):
                    try:
                        tensors = list(tensors_in(getattr(node, name), 1))
                    except RuntimeError:  # freed by a backward pass
                        continue
                    for tensor in tensors:
                        self._note_saved(tensor, (node.name().rstrip("0").removesuffix("Backward"), name[7:], ""))

    def _note_saved(self, tensor: Tensor, saver: tuple[str, str, str] | None = None, held_by: str = "") -> None:
        """Note that autograd saves a tensor.

        Args:
            tensor: the tensor that is saved.
            saver: operation, argument and line, as ``OperationTracker.saver_of`` returns them; None: those of the
                operation that runs now.
            held_by: what keeps the tensor alive if autograd doesn't, such as "the hooks of f"; "" if autograd does.
        """
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(getattr(tensor, "_base", None), nn.Parameter)
        for storage, part in stored_parts(tensor):
            if storage in self.tracker.weights:
                continue
            if is_weight:
                self._seen_weights.add(storage)
            origin = self.origins.get(storage) or self._add(storage, part, Provenance(made=False))
            views, view = self.saved.setdefault(storage, origin.saved), view_of(part)
            if view not in views:
                op, argument, line = saver or self.tracker.saver_of(part)
                if not kept_as(op, argument):  # it has its name
                    self._without_name.add(storage)
                shape, size = shape_of(part), prod(shape_of(part)) * part.dtype.itemsize
                views[view] = SavedTensor(
                    self.tracker.module, op, argument, shape, part.dtype, size, line,
                    held_by=held_by, device=part.device.type,
                )  # fmt: skip

    def note_names(self, names: tuple[str, ...], tensors: tuple[Tensor, ...], by_product: str) -> None:
        """Note the names that a layer gives its tensors; ``drop.NamedForward`` calls this (``drop.NAME_READERS``).

        Args:
            names: one name for each of ``tensors``.
            tensors: the tensors that get these names.
            by_product: one name for all other tensors that autograd saved since the previous call, such as a norm's
                statistics; "" if they get no name.
        """
        for name, tensor in zip(names, tensors):
            if (storage := storage_of(tensor)) is not None:
                self._terms.setdefault(storage, {})[int(tensor.storage_offset())] = name
        for storage in self._without_name if by_product else ():
            self._terms.setdefault(storage, {0: by_product})
        self._without_name.clear()

    def term(self, storage: torch.UntypedStorage, offset: int) -> str:
        """Return the name that a layer gave to a saved tensor.

        Args:
            storage: the tensor's storage.
            offset: where in the storage the tensor begins, in elements.

        Returns: the name of the tensor that begins at this offset. If it has none: the storage's only name, if the
            storage has just one; else "".
        """
        names = self._terms.get(storage, {})
        return names.get(offset, "") or (next(iter(names.values())) if len(names) == 1 else "")

    # Of what kind a storage is, at the end.

    def kind_of(self, storage: torch.UntypedStorage, dtype: torch.dtype, op: str) -> str:
        """Return the kind of a storage that autograd saved: one of ``STORAGE_KINDS``, such as "activation".

        Args:
            storage: a storage that this tracker has seen.
            dtype: dtype of the saved tensor.
            op: the name of the operation that saved it.
        """
        origin = self.origins[storage]
        if storage in self.tracker.weights:
            return "weight"
        if not (origin.made or origin.gathered):
            if storage in self.tracker.inputs:
                return "input"
            if self.is_weight(storage):
                return "weight"
            if dtype is torch.uint8 and storage.nbytes() in _STATE_BYTES:
                return "generator state"
            # No operation has returned what torch.compile's functions make.
            return "activation" if op == "CompiledFunction" else "constant"
        if origin.operation == "generator state":
            return origin.operation
        if origin.copied_from:
            sources = [source() for source in origin.copied_from]
            if all(source is not None and self.is_weight(source) for source in sources):
                return "gathered weight" if origin.gathered else "cast weight"
        if storage in self._seen_weights:  # a parameter, made while the block ran
            return "gathered weight"
        if storage in self.tracker.inputs and not origin.inside:
            return "input"
        return "constant" if origin.constant else "activation"

    def kind_of_unsaved(self, storage: torch.UntypedStorage, origin: Provenance) -> str:
        """Return the kind of a storage that autograd did not save, one of ``STORAGE_KINDS`` such as "cast weight".

        Args:
            storage: a storage that this tracker has seen.
            origin: the storage's Provenance.
        """
        kind = self.kind_of(storage, origin.dtype, origin.operation)
        if kind in ("generator state", "cast weight", "gathered weight"):
            return kind
        return "weight" if self.is_weight(storage) else UNSAVED

    def made_by(self, storage: torch.UntypedStorage) -> str:
        """Return the name of the operation that made a storage; "" if the storage existed before."""
        origin = self.origins[storage]
        return KIND_OF_NAME.get(origin.operation, origin.operation) if origin.made else ""

    def role(self, storage: torch.UntypedStorage) -> str:
        """Return what a storage is, if better code would not save it, as ``SavedTensor.role`` says; else ""."""
        origin = self.origins[storage]
        picked_from = origin.picked_from() if origin.picked_from is not None else None
        if not origin.made:
            return ""
        if origin.masks is not None and origin.masks.attended:
            return "attention mask"
        if origin.scores is not None and origin.scores.attended:
            return "attention scores"
        if origin.repeats > 1 and origin.multiplied is not None and origin.multiplied.attended:
            return "repeated keys or values"
        if picked_from is not None and self.is_weight(picked_from):
            return "picked from a weight"
        return "number plus tensor" if origin.one_plus else ""

    def is_weight(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage belongs to a parameter or buffer, of any module in this process."""
        if storage in self.tracker.weights or storage in self._seen_weights:
            return True
        return storage not in self.tracker.inputs and storage in self._live_weights

    @cached_property
    def _live_weights(self) -> WeakSet[torch.UntypedStorage]:
        """Storages of every parameter, and of every buffer of every module, that is alive in this process.

        After ``gc.freeze()`` what was there before isn't listed: then only buffers of modules that ran are known.
        """
        # Not [*gc.get_objects(), …]: that list would be among the objects, and so hold itself and all others.
        things = gc.get_objects() + list(self.tracker.ran)
        # There are a million objects of a thousand types.
        kinds = {kind for kind in set(map(type, things)) if issubclass(kind, (Tensor, nn.Module))}
        found = [thing for thing in things if type(thing) in kinds]
        weights = [thing for thing in found if isinstance(thing, nn.Parameter)]
        buffers = [vars(thing).get("_buffers") for thing in found if isinstance(thing, nn.Module)]
        return WeakSet(storages_in([weights, *buffers]))


def _eager(function: Callable) -> Callable:
    """Return ``function``, wrapped so that torch.compile doesn't look into it. It must be a function without a closure.

    If torch's compiler isn't loaded, ``function`` itself is returned, because the wrapper would load the compiler.
    """
    return never_compiled(function) if "torch._dynamo" in sys.modules else function


def _pack(provenance: ProvenanceTracker, outer: Callable | None, tensor: Tensor) -> object:
    provenance._note_saved(tensor)
    if outer is not None:
        return outer(tensor)
    # An output that is saved itself would hold the graph that holds it: a leak.
    return tensor.detach() if tensor.requires_grad else tensor


def _pack_as_others(provenance: ProvenanceTracker, pack: Callable, whose: str, tensor: Tensor) -> object:
    packed = pack(tensor)
    for held in tensors_in(packed):
        provenance._note_saved(held, provenance.tracker.saver_of(tensor), f"the hooks of {whose}")
    return packed


def graph_nodes(tracker: OperationTracker) -> Iterator[Any]:
    """Yield every node of the autograd graphs behind the outputs of the tracker's outermost modules."""
    return nodes_from(tensor.grad_fn for reference in tracker.output_tensors if (tensor := reference()) is not None)


def _repeats(tensor: Tensor) -> int:
    """Return how often an expanded tensor repeats each element; 1 for a plain one."""
    try:
        return prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride == 0 and size > 1)
    except (RuntimeError, NotImplementedError):
        return 1


@cache
def _name_of(func: Any) -> str:
    return func.name().split("::")[-1].split(".")[0]


@cache
def _by_chance(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


@cache
def _writes(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    # This operation and collectives write although their schema doesn't say so.
    return schema is not None and schema.is_mutable or _name_of(func) == "all_gather_copy_in" or bool(kind_of(func))
