"""The backward side of ``drop``: what autograd finds in a slot that it opens (rules 3 to 5 there).

The forward pass noted its calls, by the names of their results, and left a slot in the graph for
each saved tensor, empty where the name is dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from actmem.keep import Kept, released_by_reader
from actmem.torch_private import graph_is_retained


class Rebuilder:
    """The calls and slots of one forward pass of one layer, and what backward has made again so far.

    dropped: names that are made again.  autocast: the state in which the forward pass ran.
    """

    def __init__(self, dropped: Iterable[str]):
        self.dropped = frozenset(dropped)
        self.autocast: list[dict] = []
        self.recipes: dict[str, RepeatableCall] = {}
        self.slots: dict[str, list[weakref.ref[Slot]]] = {}
        self._rebuilt: dict[str, list[Tensor]] = {}  # one tensor a name; of by-products, several

    def alive(self, name: str) -> list[Slot]:
        """The slots of that name which the graph still holds."""
        return [slot for slot in (reference() for reference in self.slots.get(name, ())) if slot is not None]

    def kept(self, name: str) -> Slot | None:
        """A slot of that name that has its tensor, if there is one."""
        return next((slot for slot in self.alive(name) if slot.kept), None)

    def read(self, slot: Slot) -> Tensor:
        """The tensor of a slot whose name is dropped (rules 3 and 4)."""
        if slot.name not in self._rebuilt:
            self._rebuild(self.recipes[slot.name])
        if slot.index is None:
            tensor = slot.view.on(self._rebuilt[slot.name][0], self._view_of(slot.name))
        else:
            tensor = self._rebuilt[slot.name][slot.index]
        slot.was_read = True
        self._forget(self.recipes[slot.name])
        if graph_is_retained() and all(other.was_read for other in self.alive(slot.name)):
            for other in self.alive(slot.name):
                other.was_read = False  # for the next backward pass
        return tensor

    def _rebuild(self, recipe: RepeatableCall) -> None:
        sources = [self._value(source) if isinstance(source, RecipeSource) else source for source in recipe.sources]
        saved: list[tuple[Tensor, bool]] = []  # each without its graph, which holds the hook that holds this list
        with ExitStack() as stack:
            for arguments in self.autocast:
                stack.enter_context(torch.autocast(**arguments))
            if recipe.also in self.dropped:  # autograd must save again what it saved then
                for i, source in enumerate(recipe.sources):
                    if isinstance(source, RecipeSource):
                        sources[i] = sources[i].detach().requires_grad_(source.requires_grad)
                stack.enter_context(torch.enable_grad())
                stack.enter_context(
                    saved_tensors_hooks(lambda x: saved.append((x.detach(), x.is_leaf and x.requires_grad)), _never)
                )
            else:
                stack.enter_context(torch.no_grad())
            values = as_tuple(recipe.function(*sources))
        for name, view, value in zip(recipe.names, recipe.views, values):
            if (value.shape, value.stride()) != (view.size, view.stride):
                raise RuntimeError(f"{name}: the second run made {TensorView.of(value)}, the first {view}")
            self._rebuilt[name] = [value.detach()]
        if recipe.also in self.dropped:
            known = {id(tensor.untyped_storage()) for tensor in (*sources, *values) if isinstance(tensor, Tensor)}
            self._rebuilt[recipe.also] = [
                tensor for tensor, is_weight in saved if id(tensor.untyped_storage()) not in known and not is_weight
            ]

    def _value(self, source: RecipeSource) -> Tensor:
        """A recipe's source: rebuilt before and still needed, or kept, or rebuilt now."""
        # The node that reads now may have read the source first: a kernel that keeps Q and its own result.
        for read in self.alive(source.name):
            if read.tensor is not None:
                return source.view.on(read.tensor, read.view)
        if source.name not in self._rebuilt and (slot := self.kept(source.name)):
            return source.view.on(slot.kept[0].tensors()[0], slot.view)
        if source.name not in self._rebuilt:
            self._rebuild(self.recipes[source.name])
        tensor = source.view.on(self._rebuilt[source.name][0], self._view_of(source.name))
        self._forget(self.recipes[source.name])
        return tensor

    def _view_of(self, name: str) -> TensorView:
        recipe = self.recipes[name]
        return recipe.views[recipe.names.index(name)]

    def _forget(self, recipe: RepeatableCall) -> None:
        """Let go of what the recipe made and no empty slot waits for (rule 4)."""
        for name in (*recipe.names, recipe.also):
            if all(slot.was_read or slot.kept for slot in self.alive(name)):
                self._rebuilt.pop(name, None)


def open_slot(slot: Slot) -> Tensor:
    """What autograd asks for when backward reads a saved tensor: the one kept, or the one made again."""
    if slot.kept:
        return slot.kept[0].tensors()[0]
    if slot.tensor is not None:
        return slot.tensor
    empties = released_by_reader() or graph_is_retained()
    tensor = slot.rebuilder.read(slot)
    if not empties:
        slot.tensor = tensor
    return tensor


def _never(_: Any) -> Tensor:
    raise RuntimeError("nothing reads the graph of a second run")


class Slot:
    """What the graph holds in place of a saved tensor: what ``keep`` returned, or nothing until backward reads it.

    index: which of a call's by-products; None for a tensor with a name of its own.  holds: slots of
    inputs that this one's recipe reads.
    """

    def __init__(self, rebuilder: Rebuilder, view: TensorView, is_weight: bool = False):
        self.rebuilder, self.view, self.is_weight = rebuilder, view, is_weight
        self.name, self.was_read = "", False
        self.index: int | None = None
        self.kept: list[Kept] = []
        self.holds: list[Slot] = []
        self.tensor: Tensor | None = None


class TensorView(NamedTuple):
    """How a tensor lies in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> TensorView:
        return TensorView(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def on(self, tensor: Tensor, had: TensorView) -> Tensor:
        """This view of the storage of ``tensor``, which had the view ``had`` in the first run."""
        if self == had:
            return tensor
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset - had.offset)


class RecipeSource(NamedTuple):
    """A tensor that a recipe reads."""

    name: str
    view: TensorView
    requires_grad: bool


class RepeatableCall(NamedTuple):
    """A call that can be repeated.  names and views: of its results.  also: name of its by-products."""

    names: tuple[str, ...]
    views: list[TensorView]
    function: Callable
    sources: list
    also: str


def as_tuple(values: Any) -> tuple:
    """One value or several, as several."""
    return values if isinstance(values, tuple) else (values,)
