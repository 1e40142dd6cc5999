"""Drop any set of a layer's tensors and rebuild each in backward by its own recipe.

``recompute.checkpoint`` takes any code, forgets all that it saves, and runs all of it again in order.  Here a layer
names its tensors one by one and says how each is made, so that each is made again by itself.  (A checkpoint as one
recipe of these would hold all that its region saves until the region ends and names its results: twice the peak of a
layer's forward pass.)  How it works, in six rules:

1. A layer makes each tensor through ``terms(name, function, *sources)``.  That runs the function and notes the
   recipe: the name, the function, and the names of the sources.
2. When autograd saves a tensor whose name is dropped, the graph gets an empty slot.  Any other tensor, a weight too,
   goes to ``keep`` under its name, so an outer ledger, checkpoint or offloading hook sees it.
3. When backward opens an empty slot, the recipe runs again on its sources, which are kept, or rebuilt before, or
   rebuilt now through as many recipes as it takes.
4. What it makes fills all slots that wait for it, as in rule 4 of ``recompute``: each holds it for as long as the
   graph holds the slot.  So a matmul runs once, however many tensors it serves.
5. A name can also be stored: its storage goes to a ``store``, which keeps it elsewhere or smaller; its recipe then
   reads it back.
6. A mask's recipe knows how to draw it again: its seed on a CPU, the generator's state on a GPU.

Gradients equal those without recomputation bit for bit, unless a name is stored in 8 bits: recipes run the forward
pass's functions on the same values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actmem.config import ConfigError, shown
from actmem.keep import Kept, keep
from actmem.recompute import ParametersRead, autocast_state, opened, second_run


@runtime_checkable
class Store(Protocol):
    """A place for tensors that backward reads."""

    def put(self, flat: Tensor, name: str) -> Callable[[], Tensor]:
        """Keep ``flat``, a tensor of one dimension, under ``name``.

        Returns: a function that gives the tensor back, on its device and in its dtype.
        """


def store_of_each(actions: Mapping[str, str], stores: Mapping[str, Store]) -> dict[str, Store]:
    """Find the store of each term that has an action.

    Args:
        actions: the action of each term, from ``LayerTerms.stored``.
        stores: the store of each action.

    Returns: the store of each term, by the term's name.
    Raises: ConfigError on an action without a store.
    """
    for action in actions.values():
        if not isinstance(stores.get(action), Store):
            raise ConfigError("stores", f"must have one for {action!r}, as actmem_more.store has, got {shown(stores)}")
    return {term: stores[action] for term, action in actions.items()}


#: Functions that are told of every tensor that a layer names.  Each is called with the names, with the tensors, and
#: with a name for whatever else autograd has saved since the previous call that got none ("": nothing else was saved).
#: A ledger adds itself while it records.
NAME_READERS: list[Callable[[tuple[str, ...], tuple[Tensor, ...], str], None]] = []


class NamedForward:
    """The named tensors of one forward pass of one layer.

    With nothing dropped and nothing stored, ``terms(name, function, *sources)`` just returns ``function(*sources)``,
    and a ledger may read the names. Otherwise use this object as a context around the forward pass.

    Args:
        dropped: the names that backward rebuilds.
        stored: for each name whose tensor goes to a store, that store.

    Saves: what the layer's operations save, without the tensors of dropped names, and the inputs that the recipes of
        dropped names read. Of a stored name it saves what the store keeps.
    """

    def __init__(self, dropped: Iterable[str] = (), stored: Mapping[str, Store] | None = None):
        self.stored = stored or {}
        self.dropped = frozenset(dropped) | self.stored.keys()
        self.autocast: list[dict] = []  # as in the forward pass
        self.recipes: dict[str, RepeatableCall] = {}
        self.slots: dict[str, list[weakref.ref[Slot]]] = {}
        self.views: dict[str, TensorView] = {}  # of what has a name
        # By storage, then by offset: Q, K and V are views of one tensor.
        self._names: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[int, str]] = weakref.WeakKeyDictionary()
        self._inputs: dict[str, Tensor] = {}  # until the forward pass ends
        self._undecided: list[tuple[Slot, Tensor]] = []  # saved by a call that has not ended
        self._in_store: dict[str, RepeatableCall] = {}
        self._parameters: ParametersRead | None = None

    def __enter__(self) -> NamedForward:
        if self.dropped:
            self.autocast = autocast_state()
            self._hooks = saved_tensors_hooks(self._pack, self._open)
            self._hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        if self.dropped:
            try:
                if error[0] is None:
                    self._decide_rest("")
            finally:  # a checkpoint around this ends its second run at the last tensor that it needs
                self._undecided.clear()
                self._hooks.__exit__(*error)
                del self._hooks  # which holds this object, and would with the graph's slots be a cycle
            if error[0] is None:
                self._keep_sources()
            self._inputs.clear()

    def input(self, name: str, tensor: Tensor) -> Tensor:
        """Name a tensor that enters the layer, and return it. It is saved if the recipe of a dropped name reads it."""
        for tell in NAME_READERS:
            tell((name,), (tensor,), "")
        if self.dropped:
            self._inputs[name] = tensor
            self._note(name, tensor)
        return tensor

    def __call__(self, names: str | tuple[str, ...], function: Callable, *sources: Any, also: str = "") -> Any:
        """Return ``function(*sources)`` and note this call as the recipe of the result.

        Args:
            names: the result's name, or one name for each of several results.
            also: the name of what ``function`` saves besides sources, results and weights, such as a norm's statistics.
        """
        values = function(*sources)
        return self.add(names, values, function, *sources, also=also)

    def add(self, names: str | tuple[str, ...], values: Any, function: Callable, *sources: Any, also: str = "") -> Any:
        """Return ``values``, and note ``function(*sources)`` as the recipe that makes them again.

        The recipe may run without autograd. The other arguments are those of a call of this object.
        """
        for tell in NAME_READERS:
            tell(as_tuple(names), as_tuple(values), also)
        if self.dropped:
            names, results = as_tuple(names), as_tuple(values)
            # Sources first: a result can be a view of a source, and then its name replaces the source's.
            views, read = [TensorView.of(value) for value in results], [self._source(source) for source in sources]
            recipe = RepeatableCall(names, views, function, read, also)
            for name, value in zip(names, results):
                self._note(name, value)
            self.recipes.update(dict.fromkeys((*names, also), recipe))
            self._decide_rest(also)
        return values

    def result(self, module: nn.Module, value: Tensor) -> Tensor:
        """Return ``value``, which leaves the layer.

        If anything is dropped, the backward of ``value`` raises RuntimeError where a parameter of ``module`` was
        written or replaced in between.
        """
        if self.dropped.difference(self.stored):
            self._parameters = ParametersRead(module, value)
        return value

    def _source(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        name = self._name_of(value)
        if not name:
            raise RuntimeError(f"a recipe reads a tensor of shape {tuple(value.shape)} that has no name")
        return RecipeSource(name, TensorView.of(value), value.requires_grad)

    def _note(self, name: str, value: Tensor) -> None:
        self.views[name] = TensorView.of(value)
        self._names.setdefault(value.untyped_storage(), {})[int(value.storage_offset())] = name

    def _name_of(self, tensor: Tensor) -> str:
        names = self._names.get(tensor.untyped_storage(), {})
        return names.get(int(tensor.storage_offset()), "") or (next(iter(names.values())) if len(names) == 1 else "")

    def _pack(self, tensor: Tensor) -> Slot:
        slot = Slot(TensorView.of(tensor), tensor.is_leaf and tensor.requires_grad)
        if name := self._name_of(tensor):
            self._decide(slot, tensor, name)
        else:  # a result, saved before its call ends and gives it a name; or a by-product; or a weight
            self._undecided.append((slot, tensor.detach()))
        return slot

    def _decide_rest(self, also: str) -> None:
        # Deciding can end a second run around this one (rule 3 of ``recompute``), which must leave nothing undecided.
        undecided, self._undecided = self._undecided, []
        for slot, tensor in undecided:
            self._decide(slot, tensor, self._name_of(tensor) or ("" if slot.is_weight else also))

    def _decide(self, slot: Slot, tensor: Tensor, name: str) -> None:
        """Leave the slot of a dropped name empty, and keep the tensor of any other (rule 2)."""
        slot.name = name
        self.slots.setdefault(name, []).append(weakref.ref(slot))
        if name in self.dropped and name not in self.stored:
            return
        self._hooks.__exit__()  # what is kept is the business of the hooks outside
        try:
            if name not in self.stored:
                slot.keep(tensor.detach(), self.views.get(name, slot.view))
            elif name not in self._in_store:
                self._store(tensor.detach(), name)
        finally:
            self._hooks.__enter__()

    def _store(self, tensor: Tensor, name: str) -> None:
        """Store the tensor's whole storage once; every name that shares it reads that copy (rule 5)."""
        flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        names = tuple(self._names[tensor.untyped_storage()].values())
        fetch = self.stored[name].put(flat, ", ".join(names))
        recipe = RepeatableCall(names, [TensorView.of(flat)] * len(names), lambda: (fetch(),) * len(names), [], "")
        self._in_store.update(dict.fromkeys(names, recipe))
        self.recipes.update(self._in_store)

    def _keep_sources(self) -> None:
        """Let the slots of dropped names hold what their recipes read.

        Without that a source could be freed too early: the node that saved it may be done before the recipe runs, and
        an input of the layer may have been saved by no node at all.
        """
        readers: dict[str, list[str]] = {}  # found before any is kept: what is kept needs no input
        for name in self.dropped & self.slots.keys():
            for needed in self._read_by(name):
                readers.setdefault(needed, []).append(name)
        for needed, names in readers.items():
            source = self.kept(needed)
            if source is None and needed in self.stored:
                self._store(self._inputs[needed].detach(), needed)
                continue
            if source is None:
                source = Slot(self.views[needed], name=needed)
                source.keep(self._inputs[needed].detach(), source.view)
                self.slots.setdefault(needed, []).append(weakref.ref(source))
            for slot in (slot for name in names for slot in self.alive(name)):
                slot.holds.append(source)

    def _read_by(self, name: str) -> set[str]:
        """Return the names of kept tensors and inputs that the recipe of ``name`` reads, directly or through other
        recipes.
        """
        if self.kept(name) or name not in self.recipes:
            return {name}
        sources = (source for source in self.recipes[name].sources if isinstance(source, RecipeSource))
        return {needed for source in sources for needed in self._read_by(source.name)}

    def alive(self, name: str) -> list[Slot]:
        """Return the slots of that name which the graph still holds."""
        return [slot for reference in self.slots.get(name, ()) if (slot := reference()) is not None]

    def kept(self, name: str) -> Slot | None:
        """Return a slot that keeps the tensor of that name; None if there is no such slot."""
        return next((slot for slot in self.alive(name) if slot.kept), None)

    def _open(self, slot: Slot) -> Tensor:
        """Return the tensor that backward reads from this slot: the one kept, or the one made again (rules 3 and 4).

        Autograd calls this as its unpack hook.
        """
        if slot.kept and (held := slot.held()):
            return slot.view.on(*held)
        return opened(slot, lambda: self._rebuild(self.recipes[slot.name]))

    def _rebuild(self, recipe: RepeatableCall) -> dict[str, tuple[Tensor, TensorView]]:
        """Run a recipe again and fill the empty slots of what it makes.

        Returns: by name, each result of this run and the view that the first run's result had.
        """
        saves_also = recipe.also in self.dropped  # then autograd must save again what it saved in the first run
        sources = [self._value(each, saves_also) if isinstance(each, RecipeSource) else each for each in recipe.sources]
        saved: list[Tensor] = []  # each without its graph, which holds the hook that holds this list

        def save(tensor: Tensor) -> None:
            if not (tensor.is_leaf and tensor.requires_grad):  # else a weight, or a source
                saved.append(tensor.detach())

        with second_run(self.autocast, save if saves_also else None, self._parameters):
            values = as_tuple(recipe.function(*sources))
        results = {}
        for name, view, value in zip(recipe.names, recipe.views, values):
            results[name] = view.checked(name, value).detach(), view
            for slot in self.alive(name):
                if not slot.kept:
                    slot.tensor = slot.view.on(*results[name])
        if saves_also:
            named = {id(tensor.untyped_storage()) for tensor in (*sources, *values) if isinstance(tensor, Tensor)}
            saved = [tensor for tensor in saved if id(tensor.untyped_storage()) not in named]
            slots = self.slots.get(recipe.also, [])
            if len(saved) < len(slots):
                raise RuntimeError(f"{recipe.also}: the second run saved {len(saved)} tensors, the first more")
            for reference, tensor in zip(slots, saved):
                if (waiting := reference()) is not None:
                    waiting.tensor = waiting.view.checked(recipe.also, tensor)
        return results

    def _value(self, source: RecipeSource, with_grad: bool) -> Tensor:
        """Return a recipe's source, from its slot or made again, as a leaf that autograd follows if ``with_grad``."""
        tensors = (held for slot in self.alive(source.name) if (held := slot.held()))
        tensor, view = next(tensors, None) or self._rebuild(self.recipes[source.name])[source.name]
        return source.view.on(tensor, view).detach().requires_grad_(with_grad and source.requires_grad)


#: The NamedForward of a layer that drops nothing.
KEEP_ALL = NamedForward()


@dataclass(eq=False)
class Slot:
    """What the graph holds in place of a saved tensor.

    Attributes:
        view: the view of the tensor that autograd saved.
        is_weight: whether that tensor is a parameter.
        name: the tensor's name; "" if it has none.
        kept: what ``keep`` returned, with the view of what is kept; None for a dropped name.
        tensor: what a recipe made again; None until then.
        holds: slots of what this name's recipe reads.
    """

    view: TensorView
    is_weight: bool = False
    name: str = ""
    kept: tuple[Kept, TensorView] | None = None
    tensor: Tensor | None = None
    holds: list[Slot] = field(default_factory=list)

    def keep(self, tensor: Tensor, whole: TensorView) -> None:
        """Keep the whole tensor that has this slot's name, of which ``tensor`` is a view.

        The whole, because a recipe may read more than the graph saved.

        Args:
            whole: the view that the whole tensor has.
        """
        self.kept = keep(whole.on(tensor, self.view), name=self.name), whole

    def held(self) -> tuple[Tensor, TensorView] | None:
        """Return the tensor that is here, kept or made again, and its view; None if there is none."""
        if self.kept:
            kept, view = self.kept
            (tensor,) = kept.read_once()
            return view.restored(tensor) if self.name else tensor, view
        return None if self.tensor is None else (self.tensor, self.view)


class TensorView(NamedTuple):
    """How a tensor lies in its storage: its size, strides, offset (in elements) and dtype."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorView:
        return TensorView(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def checked(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor``, the second run's version of this one; RuntimeError if shape, strides or dtype differ."""
        if (tensor.shape, tensor.stride(), tensor.dtype) != (self.size, self.stride, self.dtype):
            raise RuntimeError(f"{name}: the second run made {TensorView.of(tensor)}, the first {self}")
        return tensor

    def restored(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` with this view's strides: a hook outside may have returned a copy with other strides."""
        if tensor.stride() == self.stride:
            return tensor
        return tensor.new_empty_strided(self.size, self.stride).copy_(tensor)

    def on(self, tensor: Tensor, had: TensorView) -> Tensor:
        """Return this view of the storage of ``tensor``, which in the first run had the view ``had``."""
        if self == had:
            return tensor
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset - had.offset)


class RecipeSource(NamedTuple):
    """A tensor that a recipe (the call that makes a term again) reads.

    Attributes:
        name: of the term that the tensor is.
        view: its shape and strides, and where in its storage it begins.
        requires_grad: whether it requires a gradient.
    """

    name: str
    view: TensorView
    requires_grad: bool


class RepeatableCall(NamedTuple):
    """A call that backward can repeat.

    Attributes:
        names: of its results.
        views: of its results.
        function: what is called.
        sources: its arguments; tensors are replaced by RecipeSource.
        also: the name of its by-products; "" if it has none.
    """

    names: tuple[str, ...]
    views: list[TensorView]
    function: Callable
    sources: list
    also: str


def as_tuple(values: Any) -> tuple:
    """Return ``values`` if it is a tuple, else a tuple of this one value."""
    return values if isinstance(values, tuple) else (values,)
