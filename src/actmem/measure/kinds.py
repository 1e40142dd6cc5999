"""What each storage is: activation, input, a kind of weight, constant, generator state."""

from __future__ import annotations

from functools import cached_property
from weakref import WeakSet

import torch

from actmem.measure.comms import KIND_OF_NAME
from actmem.measure.origins import Origin, Origins, live_weights
from actmem.measure.savers import OperationTracker

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
        if origin is None or not origin.made:
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
        if origin.repeats > 1:
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
