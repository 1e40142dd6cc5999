"""Drop any set of a layer's tensors, and recompute each of them by itself in backward.

``recompute.checkpoint`` recomputes a whole region of code, in order.  Here a layer names its tensors one by one and
says how each is computed, so backward can recompute a single one.  (A checkpoint can't be one such computation: it
would hold everything that its region saves until the region ends, twice the peak of a layer's forward pass.)  How it
works, in six rules:

1. A layer makes each tensor by ``terms(name, function, *sources)``, where ``terms`` is a NamedForward.  This calls
   the function and notes the recipe: the names of results and sources, and the function.
2. When autograd saves a tensor whose name is to be dropped, the graph gets an empty slot in place of the tensor.
   Every other tensor is saved for backward as usual (by ``keep``, under its name), so that a ledger, a checkpoint or
   an offloading hook around the layer sees it.
3. When backward reads an empty slot, the recipe runs again on its sources.  A source that was dropped too is
   recomputed first, by its own recipe.
4. The result fills every empty slot of that name, and a slot holds it for as long as the graph holds the slot.  So
   each matmul runs once more, however many tensors are computed from it.
5. A tensor can also go to a ``Store``, which keeps it on the host or in 8 bits.  Its recipe then reads it back.
6. A dropout mask's recipe draws the same mask again: from the mask's seed on a CPU, from the generator's state on a
   GPU.

Gradients equal those without recomputation bit for bit, because recipes call the same functions on the same values.
The exception is a tensor stored in 8 bits.
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
    """Interface of a place that keeps tensors for backward outside the graph: on the host, or in 8 bits."""

    def put(self, flat: Tensor, name: str) -> Callable[[], Tensor]:
        """Take a tensor in forward, and return the function that backward calls to get it back.

        Args:
            flat: a whole storage, as a tensor of one dimension.
            name: the tensor's name, for a ledger.

        Returns: a function that returns the tensor, on the device and in the dtype of ``flat``.
        """


def store_of_each(actions: Mapping[str, str], stores: Mapping[str, Store]) -> dict[str, Store]:
    """Return the store into which each stored tensor of a layer goes.

    Args:
        actions: a dict from tensors' names to "offload" or "compress", as ``LayerTerms.stored`` returns it.
        stores: a dict from these actions to the Store that does each, such as ``{"offload": HostMemory()}``.

    Returns: a dict from tensors' names to stores.
    Raises: ConfigError on an action without a store.
    """
    for action in actions.values():
        if not isinstance(stores.get(action), Store):
            raise ConfigError("stores", f"must have one for {action!r}, as actmem_more.store has, got {shown(stores)}")
    return {term: stores[action] for term, action in actions.items()}


#: Functions that are told of every tensor that a layer names.  Each is called with three arguments: a tuple of names,
#: the tuple of their tensors, and ``by_product``, one name for all unnamed tensors that autograd has saved since the
#: previous call ("" if there are none).  A ledger adds its own function to this list while it records.
NAME_READERS: list[Callable[[tuple[str, ...], tuple[Tensor, ...], str], None]] = []


class NamedForward:
    """Names the tensors of one forward pass of one layer, and recomputes the dropped ones in backward.

    A layer makes one for each forward pass, ``terms = NamedForward(…)``, and computes each tensor by
    ``terms(name, function, *sources)``. This returns ``function(*sources)``, notes how to compute it again, and tells
    the name to a ledger that records. If any tensor is dropped or stored, run the forward pass inside ``with terms:``.

    Args:
        dropped: the names of the tensors that are not saved; backward recomputes them.
        stored: a dict from a tensor's name to the Store that keeps this tensor, on the host or in 8 bits.

    Saves: what the layer's operations save, without the dropped tensors, and those inputs of the layer from which
        dropped tensors are recomputed. Of a stored tensor it saves what the store keeps.
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
        """Name an input of the layer, and return it.

        The input is saved for backward if a dropped tensor is recomputed from it.

        Args:
            name: the input's name, such as "layer-norm 1 input".
            tensor: the input.
        """
        for tell in NAME_READERS:
            tell((name,), (tensor,), "")
        if self.dropped:
            self._inputs[name] = tensor
            self._note(name, tensor)
        return tensor

    def __call__(self, names: str | tuple[str, ...], function: Callable, *sources: Any, by_product: str = "") -> Any:
        """Return ``function(*sources)`` and note this call as the recipe of the result.

        Args:
            names: the result's name, or a tuple with one name for each of several results.
            function: computes the result, a tensor or a tuple of tensors; backward may call it again.
            sources: its arguments. Each tensor among them must have a name already, from ``input`` or from such a call.
            by_product: the name of what ``function`` saves besides sources, results and weights, such as a norm's
                statistics; "" if it saves nothing else.
        """
        values = function(*sources)
        return self.add(names, values, function, *sources, by_product=by_product)

    def add(
        self, names: str | tuple[str, ...], values: Any, function: Callable, *sources: Any, by_product: str = ""
    ) -> Any:
        """Name tensors that are already computed, and note how backward can compute them again.

        Args:
            names: the tensor's name, or a tuple of names.
            values: the tensor, or a tuple of tensors, one for each name.
            function: computes the tensors again: ``function(*sources)`` must return ``values``. It may run without
                autograd.
            sources: its arguments. Each tensor among them must have a name already.
            by_product: the name of what else ``function`` saves for backward, such as a norm's statistics; "" for
                nothing.

        Returns: ``values``.
        Raises: RuntimeError if a tensor is dropped and one of the names has been given already in this forward pass.
        """
        for tell in NAME_READERS:
            tell(as_tuple(names), as_tuple(values), by_product)
        if self.dropped:
            names, results = as_tuple(names), as_tuple(values)
            if twice := (self.views.keys() | self.recipes.keys()) & {*names, by_product} - {""}:
                raise RuntimeError(f"{min(twice)!r} names two tensors of one forward pass: give each its own name")
            # Sources first: a result can be a view of a source, and then its name replaces the source's.
            views, read = [TensorView.of(value) for value in results], [self._source(source) for source in sources]
            recipe = RepeatableCall(names, views, function, read, by_product)
            for name, value in zip(names, results):
                self._note(name, value)
            self.recipes.update(dict.fromkeys((*names, by_product), recipe))
            self._decide_rest(by_product)
        return values

    def check_parameters(self, module: nn.Module, value: Tensor) -> Tensor:
        """Make backward check that the layer's parameters have not changed since the forward pass.

        If any tensor is recomputed, backward raises RuntimeError if a parameter or buffer of ``module`` was written
        or replaced since the forward pass, because the recomputed values would then differ from those of forward.

        Args:
            module: the layer.
            value: the layer's output.

        Returns: ``value``.
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

    def _decide_rest(self, by_product: str) -> None:
        # Deciding can end a second run around this one (rule 3 of ``recompute``), which must leave nothing undecided.
        undecided, self._undecided = self._undecided, []
        for slot, tensor in undecided:
            self._decide(slot, tensor, self._name_of(tensor) or ("" if slot.is_weight else by_product))

    def _decide(self, slot: Slot, tensor: Tensor, name: str) -> None:
        """Leave the slot of a dropped name empty; for any other name keep the tensor (rule 2)."""
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
        """Let the slots of dropped names hold the slots of the tensors that their recipes read.

        Else a source could be freed too early: the node that saved the source may be done before the recipe runs, and
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
        """Return the Slots that stand for the tensor called ``name`` in the autograd graph and are not freed yet.

        There is one Slot for each time that an operation saved the tensor.
        """
        return [slot for reference in self.slots.get(name, ()) if (slot := reference()) is not None]

    def kept(self, name: str) -> Slot | None:
        """Return a Slot that holds the saved tensor called ``name``; None if the tensor isn't saved, but dropped."""
        return next((slot for slot in self.alive(name) if slot.kept), None)

    def _open(self, slot: Slot) -> Tensor:
        """Return the tensor that backward reads from this slot: saved, or recomputed now (rules 3 and 4).

        Autograd calls this as its unpack hook.
        """
        if slot.kept and (held := slot.held()):
            return slot.view.on(*held)
        return opened(slot, lambda: self._rebuild(self.recipes[slot.name]))

    def _rebuild(self, recipe: RepeatableCall) -> dict[str, tuple[Tensor, TensorView]]:
        """Run a recipe again, and put its results into the empty slots of their names.

        Returns: by name, each result of this run and the TensorView that the first run's result had.
        """
        # If the by-product was dropped, autograd must save again what it saved in the first run.
        saves = recipe.by_product in self.dropped
        sources = [self._value(each, saves) if isinstance(each, RecipeSource) else each for each in recipe.sources]
        saved: list[Tensor] = []  # each without its graph, which holds the hook that holds this list

        def save(tensor: Tensor) -> None:
            if not (tensor.is_leaf and tensor.requires_grad):  # else a weight, or a source
                saved.append(tensor.detach())

        with second_run(self.autocast, save if saves else None, self._parameters):
            values = as_tuple(recipe.function(*sources))
        results = {}
        for name, view, value in zip(recipe.names, recipe.views, values):
            results[name] = view.checked(name, value).detach(), view
            for slot in self.alive(name):
                if not slot.kept:
                    slot.tensor = slot.view.on(*results[name])
        if saves:
            named = {id(tensor.untyped_storage()) for tensor in (*sources, *values) if isinstance(tensor, Tensor)}
            saved = [tensor for tensor in saved if id(tensor.untyped_storage()) not in named]
            slots = self.slots.get(recipe.by_product, [])
            if len(saved) < len(slots):
                raise RuntimeError(f"{recipe.by_product}: the second run saved {len(saved)} tensors, the first more")
            for reference, tensor in zip(slots, saved):
                if (waiting := reference()) is not None:
                    waiting.tensor = waiting.view.checked(recipe.by_product, tensor)
        return results

    def _value(self, source: RecipeSource, with_grad: bool) -> Tensor:
        """Return a source of a recipe as a leaf tensor: from its slot, or recomputed if the slot is empty.

        Args:
            source: the source's name and its view.
            with_grad: the leaf requires a gradient if the source did in forward; False: it requires none.
        """
        tensors = (held for slot in self.alive(source.name) if (held := slot.held()))
        tensor, view = next(tensors, None) or self._rebuild(self.recipes[source.name])[source.name]
        return source.view.on(tensor, view).detach().requires_grad_(with_grad and source.requires_grad)


#: The NamedForward of a layer that drops nothing.
KEEP_ALL = NamedForward()


@dataclass(eq=False)
class Slot:
    """What the autograd graph holds in place of a saved tensor: the tensor itself, or room for a recomputed one.

    Attributes:
        view: shape, strides, offset and dtype of the tensor that autograd saved.
        is_weight: whether that tensor is a parameter.
        name: the tensor's name; "" if it has none.
        kept: the pair (Kept, TensorView): the object from which backward reads the saved tensor, and how that tensor
            lies in its storage; None for a dropped tensor.
        tensor: the recomputed tensor; None until backward has recomputed it.
        holds: the slots of saved tensors from which this slot's tensor is recomputed, so that those slots live as long
            as this one.
    """

    view: TensorView
    is_weight: bool = False
    name: str = ""
    kept: tuple[Kept, TensorView] | None = None
    tensor: Tensor | None = None
    holds: list[Slot] = field(default_factory=list)

    def keep(self, tensor: Tensor, whole: TensorView) -> None:
        """Save this slot's tensor for backward.

        What autograd wants to save may be a view of a part of the layer's named tensor. The whole named tensor is saved
        instead, because the recomputation of another tensor may read more of it.

        Args:
            tensor: the tensor that autograd wants to save; its shape and strides are those of this slot's ``view``.
            whole: how the whole named tensor lies in the same storage.
        """
        self.kept = keep(whole.on(tensor, self.view), name=self.name), whole

    def held(self) -> tuple[Tensor, TensorView] | None:
        """Return this slot's saved or recomputed tensor with its TensorView; None if the slot is empty."""
        if self.kept:
            kept, view = self.kept
            (tensor,) = kept.read_once()
            return view.restored(tensor) if self.name else tensor, view
        return None if self.tensor is None else (self.tensor, self.view)


class TensorView(NamedTuple):
    """How a tensor lies in its storage.

    Attributes:
        size: the tensor's shape.
        stride: the tensor's strides, in elements.
        offset: where in the storage the tensor begins, in elements.
        dtype: the tensor's dtype.
    """

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorView:
        return TensorView(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def checked(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor`` after a check that it has this view's shape, strides and dtype.

        Args:
            name: the tensor's name, for the error message.
            tensor: a recomputed tensor, in place of the one that had this view in forward.

        Raises: RuntimeError if shape, strides or dtype differ.
        """
        if (tensor.shape, tensor.stride(), tensor.dtype) != (self.size, self.stride, self.dtype):
            raise RuntimeError(f"{name}: the second run made {TensorView.of(tensor)}, the first {self}")
        return tensor

    def restored(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` with this view's strides: a copy if its strides differ, else the tensor itself.

        Another saved-tensor hook, such as one that offloads, may have returned a copy with other strides.
        """
        if tensor.stride() == self.stride:
            return tensor
        return tensor.new_empty_strided(self.size, self.stride).copy_(tensor)

    def on(self, tensor: Tensor, had: TensorView) -> Tensor:
        """Return the tensor that lies as this view says, out of the storage of ``tensor``.

        This finds Q in a recomputed QKV, for instance: the view is Q's in the forward pass, ``tensor`` is the new QKV.

        Args:
            tensor: saved or recomputed; its storage is a stand-in for the one in which the view lay.
            had: the view, in the old storage, of the tensor for which ``tensor`` stands. The result's offset is this
                view's, plus the difference between the offsets of ``tensor`` and ``had``.
        """
        if self == had:
            return tensor
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset - had.offset)


class RecipeSource(NamedTuple):
    """A tensor argument of a RepeatableCall, noted by name in place of the tensor itself.

    Attributes:
        name: the tensor's name in its layer.
        view: the tensor's shape, strides, dtype and offset in its storage.
        requires_grad: whether the tensor requires a gradient.
    """

    name: str
    view: TensorView
    requires_grad: bool


class RepeatableCall(NamedTuple):
    """A recipe: a call from the forward pass that backward can repeat to recompute its results.

    Attributes:
        names: the name of each result.
        views: shape, strides, offset and dtype of each result.
        function: the function that is called.
        sources: the function's arguments, with a RecipeSource in place of each tensor.
        by_product: the name of what else ``function`` saves for backward, such as a norm's statistics; "" for
            nothing.
    """

    names: tuple[str, ...]
    views: list[TensorView]
    function: Callable
    sources: list
    by_product: str


def as_tuple(values: Any) -> tuple:
    """Return ``values`` if it is a tuple, else a tuple of this one value."""
    return values if isinstance(values, tuple) else (values,)
