"""Where each storage comes from (which operation made it, in which module, out of what), and so of what kind it is.

A TorchDispatchMode sees every operation's results, below autograd.  That finds what saved-tensor
hooks can't: a tensor that an attribute, a closure or a cache keeps alive.  And it tells a copy of a
weight from an activation.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from actmem.measure.comms import KIND_OF_NAME, kind_of
from actmem.measure.savers import OperationTracker
from actmem.measure.tools import QuietDispatchMode, inner_tensors, shape_of, storage_of, storages_of, tensors_in

#: Operations whose result holds the same numbers as their first tensor, perhaps in another dtype or layout.
_COPIES = {
    "_to_copy", "clone", "copy_", "contiguous", "chunk_cat", "_chunk_cat", "split_with_sizes_copy", "all_gather_copy_in",
    "cat", "_foreach_copy_", "wait_tensor", "detach_copy",
}  # fmt: skip


#: Operations that multiply matrices, and attention's fused ones.
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm")
#: The widest head of a fused attention kernel.
WIDEST_HEAD = 256
_FUSED_ATTENTION = "_scaled_dot_product_"


@dataclass
class Scores:
    """A product of two activations, with all that has its size and was made of it.

    normalized: a softmax was among it.  attended: a product read it after that, so it is attention's scores.
    """

    normalized: bool = False
    attended: bool = False


@dataclass
class Origin:
    """How a storage came to be.

    made: False for one that an operation only took a view of, so that it was there before.
    operation, module, shape, dtype, line: of the result that first had this storage.
    inside: a module or an autograd Function was running.
    constant: made without any tensor, or of constants alone, and without chance.
    copied_from: the storages, all from before, that it is a copy of, over any number of copies; else empty.
    gathered: one of those copies was a collective.
    repeats: how many times this copy of an expanded tensor holds each element.
    picked_from: the storage from before of which it is some matrices.
    scores: the product that it came from, if nothing but operations on each element and a softmax lie between.
    device: where it is.
    """

    made: bool
    operation: str = ""
    module: str = ""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    inside: bool = False
    constant: bool = False
    copied_from: tuple[weakref.ref, ...] = ()
    gathered: bool = False
    repeats: int = 1
    picked_from: weakref.ref | None = None
    scores: Scores | None = None
    device: str = "cpu"
    tensor: weakref.ref | None = field(default=None, repr=False)


class Origins(QuietDispatchMode):
    """Notes the origin of every storage that an operation returns while it is active.

    torch.compile compiles as without it: compiled code counts as one operation that returns nothing.
    """

    def __init__(self, tracker: OperationTracker):
        super().__init__()
        self._tracker = tracker
        self.found: WeakKeyDictionary[torch.UntypedStorage, Origin] = WeakKeyDictionary()
        #: The scores that each storage masks, or was multiplied for last.
        self.masks: WeakKeyDictionary[torch.UntypedStorage, Scores] = WeakKeyDictionary()
        self.operands: WeakKeyDictionary[torch.UntypedStorage, Scores] = WeakKeyDictionary()
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.paused:
            return result
        if isinstance(result, Tensor):
            self._note(result, func, args, kwargs)
        elif isinstance(result, (list, tuple)):
            for one in result:
                if isinstance(one, Tensor):
                    self._note(one, func, args, kwargs)
        elif result is None and kwargs and "out" in kwargs:  # writes into its argument
            for one in tensors_in(kwargs["out"], 1):
                self._note(one, func, args, kwargs)
        return result

    def note_state(self, state: Tensor) -> None:
        """Note the state of a generator, which no operation returns."""
        storage = storage_of(state)
        if storage is not None:
            self._tracker.checkpoint_ran = True
            self._add(storage, state, Origin(True, "generator state", inside=self._tracker.inside))

    def _note(self, result: Tensor, func: Any, args: tuple, kwargs: dict | None) -> None:
        storage = storage_of(result)
        if storage is None:
            for part in inner_tensors(result):
                inner = storage_of(part)
                if inner is not None and inner not in self.found:
                    self._add(inner, part, Origin(True, _name_of(func), inside=self._tracker.inside))
            return
        origin = self.found.get(storage)
        if origin is None:
            origin = self._origin(storage, result.numel(), func, args, kwargs)
            self._add(storage, result, origin)
        elif origin.made and (origin.constant or origin.copied_from) and _writes(func):
            self._rewritten(origin, storage, func, args, kwargs)
        if not origin.made and kwargs and "out" in kwargs:  # FSDP gathers into the buffers of the step before
            self._trace_copy(origin, func, [source for source in _storages(args, {}) if source is not storage])

    def _add(self, storage: torch.UntypedStorage, result: Tensor, origin: Origin) -> None:
        origin.module, origin.shape, origin.dtype = self._tracker.module, shape_of(result), result.dtype
        origin.device = result.device.type
        origin.tensor = weakref.ref(result)
        self.found[storage] = origin

    def _origin(self, storage: torch.UntypedStorage, size: int, func: Any, args: tuple, kwargs: dict | None) -> Origin:
        sources = list(_storages(args, kwargs))
        if any(source is storage for source in sources):
            return Origin(made=False)
        origin = Origin(True, _name_of(func), inside=self._tracker.inside)
        known = [self.found.get(source) for source in sources]
        origin.constant = not _by_chance(func) and all(one is not None and one.constant for one in known)
        self._trace_copy(origin, func, sources)
        if origin.operation in _COPIES and args and isinstance(args[0], Tensor):
            origin.repeats = _repeats(args[0])
        elif (
            origin.operation in ("index", "index_select", "gather")
            and known
            and (known[0] is None or not known[0].made)
            and args[0].dim() > 2
        ):
            origin.picked_from = weakref.ref(sources[0])
        origin.scores = self._scores(origin.operation, size, sources, args)
        return origin

    def _scores(self, operation: str, size: int, sources: list[torch.UntypedStorage], args: tuple) -> Scores | None:
        """What ``operation``'s result of ``size`` elements belongs to; notes what it reads as masks and operands."""
        origins = [self.found.get(source) for source in sources]
        scored = [one.scores for one in origins if one is not None and one.scores is not None]
        if operation in _PRODUCTS:
            scores = next((scores for scores in scored if scores.normalized), None) or Scores()
            scores.attended = scores.normalized
            self.operands.update(dict.fromkeys(sources, scores))
            weights = self._tracker.weights
            roots = [root() for one in origins if one is not None for root in one.copied_from]
            width = args[operation.count("add")].shape[-1]  # that of a head, if these are scores
            if scores.attended or width > WIDEST_HEAD or any(source in weights for source in (*sources, *roots)):
                return None
            return scores
        if operation.startswith(_FUSED_ATTENTION):
            self.operands.update(dict.fromkeys(sources[:3], Scores(attended=True)))
            self.masks.update(dict.fromkeys(sources[3:], Scores(attended=True)))
            return None
        if scored and operation.startswith(("masked_fill", "where")):
            others = [source for source, one in zip(sources, origins) if one is None or one.scores is None]
            self.masks.update(dict.fromkeys(others, scored[0]))
        alike = (
            one.scores for one in origins if one is not None and one.scores is not None and prod(one.shape) == size
        )
        found = next(alike, None)
        if found is not None and "softmax" in operation:
            found.normalized = True
        return found

    def _rewritten(self, origin: Origin, storage: torch.UntypedStorage, func: Any, args: tuple, kwargs) -> None:
        """``func`` wrote into a storage that was constant, or a copy, until now."""
        sources = [source for source in _storages(args, kwargs) if source is not storage]
        known = [self.found.get(source) for source in sources]
        if _by_chance(func) or not all(one is not None and one.constant for one in known):
            origin.constant, origin.copied_from = False, ()
            self._trace_copy(origin, func, sources)
        elif origin.copied_from and _collective(func) == "all-gather":  # of a part of the same storage
            origin.gathered = True

    def _trace_copy(self, origin: Origin, func: Any, sources: list[torch.UntypedStorage]) -> None:
        collective = _collective(func) in ("all-gather", "broadcast")
        if not (collective or _is_copy(func)):
            return
        roots: list[weakref.ref] = []
        for source in sources:
            before = self.found.get(source)
            if before is None or not before.made:
                roots.append(weakref.ref(source))
            elif before.copied_from:
                roots.extend(before.copied_from)
                collective = collective or before.gathered
            else:
                return
        origin.copied_from, origin.gathered = tuple(roots), collective


def _repeats(tensor: Tensor) -> int:
    """How often an expanded tensor repeats each element; 1 for a plain one."""
    try:
        return prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride == 0 and size > 1)
    except (RuntimeError, NotImplementedError):
        return 1


def _storages(args: tuple, kwargs: dict | None) -> Iterator[torch.UntypedStorage]:
    for value in (*args, *(kwargs or {}).values()):
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, Tensor):
                for part in inner_tensors(one):
                    storage = storage_of(part)
                    if storage is not None:
                        yield storage


@cache
def _name_of(func: Any) -> str:
    try:
        return func.name().split("::")[-1].split(".")[0]
    except AttributeError:
        return getattr(func, "__name__", "unknown")


@cache
def _collective(func: Any) -> str:
    try:
        return kind_of(func)
    except (AttributeError, ValueError):  # an operator of a higher order
        return ""


@cache
def _is_copy(func: Any) -> bool:
    return _name_of(func) in _COPIES


@cache
def _by_chance(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


@cache
def _writes(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    # These don't say so in their schema.
    return (
        bool(schema is not None and schema.is_mutable)
        or _name_of(func) == "all_gather_copy_in"
        or bool(_collective(func))
    )


def live_weights() -> WeakSet[torch.UntypedStorage]:
    """The storages of every parameter, and of every buffer of every module, that is alive in this process."""
    tensors: list[Tensor] = []
    # There are a million objects of a thousand types.
    wanted: dict[type, type | None] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in wanted:
            wanted[kind] = next((base for base in (Tensor, nn.Module) if issubclass(kind, base)), None)
        if wanted[kind] is Tensor:
            if issubclass(kind, nn.Parameter) or getattr(thing, "_is_param", False):
                tensors.append(thing)
        elif wanted[kind] is nn.Module:
            tensors.extend(t for t in thing.__dict__.get("_buffers", {}).values() if isinstance(t, Tensor))
    return storages_of(*tensors)


UNSAVED = "alive but not saved by autograd"
#: In the order in which tables list them.
STORAGE_KINDS = (
    "activation",
    "input",
    "cast weight",
    "constant",
    "generator state",
    UNSAVED,
    "weight",
    "gathered weight",
)


class Classifier:
    """Tells the kind of a storage once forward has ended."""

    def __init__(
        self,
        tracker: OperationTracker,
        origins: Origins,
        own_weights: WeakSet[torch.UntypedStorage],
        seen_weights: WeakSet[torch.UntypedStorage],
    ):
        self._tracker, self._origins = tracker, origins
        self._own, self._seen = own_weights, seen_weights

    @cached_property
    def _live(self) -> WeakSet[torch.UntypedStorage]:
        # A look at every object of the process, so only when some storage needs it.
        return live_weights()

    def kind_of(self, storage: torch.UntypedStorage, dtype: torch.dtype, op: str) -> str:
        """One of ``STORAGE_KINDS``, except the one for what autograd didn't save.  op: that which saved it."""
        origin = self._origins.found.get(storage)
        if origin is None or not (origin.made or origin.gathered):
            return self._kind_from_before(storage, dtype, op)
        if origin.operation == "generator state":
            return origin.operation
        if origin.copied_from:
            sources = [source() for source in origin.copied_from]
            if all(source is not None and self.is_weight(source) for source in sources):
                return "gathered weight" if origin.gathered else "cast weight"
        if storage in self._seen:  # a parameter, made while the block ran
            return "gathered weight"
        if storage in self._tracker.inputs and not origin.inside:
            return "input"
        return "constant" if origin.constant else "activation"

    def kind_of_unsaved(self, storage: torch.UntypedStorage, origin: Origin) -> str:
        """The same for a storage made in the block that autograd did not save."""
        kind = self.kind_of(storage, origin.dtype, origin.operation)
        if kind in ("generator state", "cast weight", "gathered weight"):
            return kind
        return "weight" if self.is_weight(storage) else UNSAVED

    def made_by(self, storage: torch.UntypedStorage) -> str:
        """The operation that made a storage, and how, where that tells a waste; "" if it was there before."""
        origin = self._origins.found.get(storage)
        if origin is None or not origin.made:
            return ""
        mask, operand = self._origins.masks.get(storage), self._origins.operands.get(storage)
        if mask is not None and mask.attended:
            return "attention mask"
        if origin.scores is not None and origin.scores.attended:
            return "attention scores"
        if origin.repeats > 1 and operand is not None and operand.attended:
            return f"{origin.operation}, repeated ×{origin.repeats}"
        source = origin.picked_from() if origin.picked_from is not None else None
        if source is not None and self.is_weight(source):
            return "picked from a weight"
        return KIND_OF_NAME.get(origin.operation, origin.operation)

    def _kind_from_before(self, storage: torch.UntypedStorage, dtype: torch.dtype, op: str) -> str:
        if storage in self._tracker.inputs:
            return "input"
        if self.is_weight(storage):
            return "weight"
        if dtype is torch.uint8 and storage.nbytes() in _STATE_BYTES:
            return "generator state"
        return "activation" if op in _COMPILED else "constant"

    def is_weight(self, storage: torch.UntypedStorage) -> bool:
        """True for the storage of any parameter or buffer of this process."""
        if storage in self._own or storage in self._seen:
            return True
        return storage not in self._tracker.inputs and storage in self._live


#: Bytes of the state of a CPU's generator and of a GPU's.
_STATE_BYTES = (5056, 16)
#: Functions of torch.compile: what they make, no operation returned.
_COMPILED = ("CompiledFunction",)
