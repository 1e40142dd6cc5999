"""Every storage's life during a training step: who made it, when it was born and when it died.

A TorchDispatchMode notes each operation's results, below autograd, and adds up what is alive after
each.  Memory that a kernel allocates and frees inside itself is not seen.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actmem.measure.kinds import Classifier
from actmem.measure.leaves import plain_tensors, shape_of, storage_of, storages_in, tensors_in
from actmem.measure.origins import Origin, Origins
from actmem.measure.savers import OperationTracker


@dataclass
class Life:
    """One storage's life.  sizes: its bytes from each moment on; died: None while it lives."""

    origin: Origin
    phase: str
    born: int
    sizes: list[tuple[int, int]]
    died: int | None = None
    label: tuple[str, str, str] | None = None  # kind, name, operation
    saved: tuple[str, str, str] | None = None  # module, operation, argument
    kind: str = ""
    reference: Any = None

    def bytes_at(self, moment: int) -> int:
        if moment < self.born or (self.died is not None and moment >= self.died):
            return 0
        return next(size for start, size in reversed(self.sizes) if start <= moment)


class Lives(Origins):
    """Notes every storage's birth and death, and the live bytes after every operation.

    A moment is a place in ``curve``.  What is born or dies between two counts is there, or not, at the next one.
    """

    def __init__(self, tracker: OperationTracker):
        super().__init__(tracker)
        self.lives: list[Life] = []
        self.live_bytes = 0
        self.curve: list[int] = []
        self.phase = "before"
        self.phases: list[tuple[str, int]] = []
        self._life_of: weakref.WeakKeyDictionary[torch.UntypedStorage, Life] = weakref.WeakKeyDictionary()

    def enter(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self.phases.append((phase, len(self.curve)))

    def count(self) -> None:
        """Note the bytes that are alive now: a new moment."""
        self.curve.append(self.live_bytes)

    def known(self, value: object, kind: str, name: str, op: str) -> None:
        """All storages of ``value``, alive from now on at the latest, are ``kind``, called ``name``."""
        for tensor in tensors_in(value):
            for part in plain_tensors(tensor):
                storage = storage_of(part)
                if storage is None:
                    continue
                life = self._life_of.get(storage)
                if life is None:
                    origin = Origin(False, op, name, shape_of(part), part.dtype)
                    life = self._begin(storage, origin)
                if life.label is None:
                    life.label = kind, name, op

    def saved(self, tensor: Tensor) -> None:
        for part in plain_tensors(tensor):
            life = self._life_of.get(storage) if (storage := storage_of(part)) is not None else None
            if life is not None and life.saved is None:
                op, argument, _ = self._tracker.saver_of(part)
                life.saved = self._tracker.module, op, argument

    def resized(self, storage: torch.UntypedStorage) -> None:
        life = self._life_of.get(storage)
        if life is not None and life.sizes[-1][1] != (size := storage.nbytes()):
            self.live_bytes += size - life.sizes[-1][1]
            life.sizes.append((len(self.curve), size))

    def classify(self, classifier: Classifier) -> None:
        """Kinds of what is alive, which only a look at its storage tells."""
        for storage, life in list(self._life_of.items()):
            if life.origin.made and (life.origin.copied_from or life.origin.constant):
                life.kind = classifier.kind_of(storage, life.origin.dtype, life.origin.operation)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not self.paused:
            for storage in storages_in([args, kwargs]):
                if storage not in self._life_of:  # from before the step
                    self._begin(storage, self.found.get(storage) or Origin(False, "", "", (), torch.uint8))
                self.resized(storage)
            for storage in storages_in(result):
                self.resized(storage)
            self.count()
        return result

    def _add(self, storage: torch.UntypedStorage, result: Tensor, origin: Origin) -> None:
        super()._add(storage, result, origin)
        if storage not in self._life_of:
            self._begin(storage, origin)

    def _begin(self, storage: torch.UntypedStorage, origin: Origin) -> Life:
        size, moment = storage.nbytes(), len(self.curve)
        life = Life(origin, self.phase, moment, [(moment, size)])
        life.reference = weakref.ref(storage, lambda _: self._end(life))
        self._life_of[storage] = life
        self.lives.append(life)
        self.live_bytes += size
        return life

    def _end(self, life: Life) -> None:
        life.died = len(self.curve)
        self.live_bytes -= life.sizes[-1][1]
