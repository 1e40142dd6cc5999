"""Drop any set of a layer's tensors and rebuild each in backward by its own recipe.

``checkpoint`` forgets all that a region saves; here a layer names its tensors one by one, and says
how each is made.  How it works, in five rules:

1. A layer makes each tensor through ``terms(name, function, *sources)``.  That runs the function
   and notes the recipe: the name, the function, and the names of the sources.
2. When autograd saves a tensor whose name is dropped, the graph gets an empty slot.  Any other
   tensor goes to ``keep`` under its name, so an outer ledger, checkpoint or offloading hook sees it.
3. The first slot of a name that backward opens is rebuilt: the recipe runs on its sources, which are
   kept, or rebuilt before, or rebuilt now through as many recipes as it takes.
4. A rebuilt tensor lives until the last slot of its name is read; each slot holds it for as long as
   autograd holds the slot.  So a product runs once, however many tensors it serves.  If the graph
   is retained, every slot is empty again after it is read, as in ``recompute``.
5. Nothing needs a state of a random-number generator: a mask's recipe knows its seed.

Gradients equal those without recomputation bit for bit: recipes run the functions of the forward
pass on the same values.  This file is the forward side, rules 1 and 2; ``rebuilder`` is the backward side.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from actmem.keep import keep
from actmem.rebuilder import Rebuilder, RecipeSource, RepeatableCall, Slot, TensorView, as_tuple, open_slot
from actmem.recompute import autocast_state


class Terms:
    """The named tensors of one forward pass of one layer.

    dropped: names that backward rebuilds.  With none, ``terms(name, function, *sources)`` is
    ``function(*sources)`` and nothing else happens.  Otherwise use it as a context around the forward
    pass.  Keeps what the layer's operations save, without the dropped names, and the inputs that
    their recipes read.
    """

    def __init__(self, dropped: Iterable[str] = ()):
        self.dropped = frozenset(dropped)
        self.rebuilder = Rebuilder(self.dropped)
        # By storage, then by offset: Q, K and V are views of one tensor.
        self._names: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[int, str]] = weakref.WeakKeyDictionary()
        self._inputs: dict[str, Tensor] = {}  # until the forward pass ends
        self._undecided: list[tuple[Slot, Tensor]] = []  # saved by a call that has not ended

    def __enter__(self) -> Terms:
        if self.dropped:
            self.rebuilder.autocast = autocast_state()
            self._hooks = saved_tensors_hooks(self._pack, open_slot)
            self._hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        if self.dropped:
            self._decide_rest("")
            self._hooks.__exit__(*error)
            self._keep_inputs()
            self._inputs.clear()

    def input(self, name: str, tensor: Tensor) -> Tensor:
        """Give a tensor that comes from outside its name; returns it.  Kept if a recipe reads it."""
        if self.dropped:
            self._inputs[name] = tensor
            self._note(name, tensor)
        return tensor

    def __call__(self, names: str | tuple[str, ...], function: Callable, *sources: Any, also: str = "") -> Any:
        """``function(*sources)``, a tensor or one for each name, with this call as its recipe.

        also: the name of what ``function`` saves besides sources, results and weights: a norm's statistics.
        """
        values = function(*sources)
        return self.add(names, values, function, *sources, also=also)

    def add(self, names: str | tuple[str, ...], values: Any, function: Callable, *sources: Any, also: str = "") -> Any:
        """Note that ``function(*sources)``, which may run without autograd, makes ``values`` again; returns them."""
        if self.dropped:
            names, made = as_tuple(names), as_tuple(values)
            # Sources first: a result can be a view of one, and then takes over its place.
            views, read = [TensorView.of(value) for value in made], [self._source(source) for source in sources]
            recipe = RepeatableCall(names, views, function, read, also)
            for name, value in zip(names, made):
                self._note(name, value)
            self.rebuilder.recipes.update(dict.fromkeys((*names, also), recipe))
            self._decide_rest(also)
        return values

    def _source(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        name = self._name_of(value)
        if not name:
            raise RuntimeError(f"a recipe reads a tensor of shape {tuple(value.shape)} that has no name")
        return RecipeSource(name, TensorView.of(value), value.requires_grad)

    def _note(self, name: str, value: Tensor) -> None:
        self._names.setdefault(value.untyped_storage(), {})[int(value.storage_offset())] = name

    def _name_of(self, tensor: Tensor) -> str:
        names = self._names.get(tensor.untyped_storage(), {})
        return names.get(int(tensor.storage_offset()), "") or (next(iter(names.values())) if len(names) == 1 else "")

    def _pack(self, tensor: Tensor) -> Slot:
        slot = Slot(self.rebuilder, TensorView.of(tensor), tensor.is_leaf and tensor.requires_grad)
        if name := self._name_of(tensor):
            self._decide(slot, tensor, name)
        else:  # a result, saved before its call ends and gives it a name; or a by-product; or a weight
            self._undecided.append((slot, tensor.detach()))
        return slot

    def _decide_rest(self, also: str) -> None:
        by_products = 0
        for slot, tensor in self._undecided:
            name = self._name_of(tensor)
            if not name and also and not slot.is_weight:
                name, slot.index, by_products = also, by_products, by_products + 1
            self._decide(slot, tensor, name)
        self._undecided.clear()

    def _decide(self, slot: Slot, tensor: Tensor, name: str) -> None:
        """Leave the slot of a dropped name empty, and keep the tensor of any other (rule 2)."""
        slot.name = name
        self.rebuilder.slots.setdefault(name, []).append(weakref.ref(slot))
        if name not in self.dropped:
            self._hooks.__exit__()  # what is kept is the business of the hooks outside
            try:
                slot.kept.append(keep(tensor.detach(), name=name))
            finally:
                self._hooks.__enter__()

    def _keep_inputs(self) -> None:
        """Keep the inputs that recipes read and no operation saved, for as long as a slot may ask for them."""
        for name, slots in list(self.rebuilder.slots.items()):
            for needed in self._inputs_of(name) if name in self.dropped else ():
                source = Slot(self.rebuilder, TensorView.of(self._inputs[needed]))
                source.name = needed
                source.kept.append(keep(self._inputs[needed].detach(), name=needed))
                self.rebuilder.slots.setdefault(needed, []).append(weakref.ref(source))
                for slot in filter(None, (reference() for reference in slots)):
                    slot.holds.append(source)

    def _inputs_of(self, name: str) -> set[str]:
        """The inputs that the recipe of ``name`` reads, at first or second hand, and that nothing keeps."""
        recipes = self.rebuilder.recipes
        if self.rebuilder.kept(name) or name not in recipes:
            return {name} & self._inputs.keys() if not self.rebuilder.kept(name) else set()
        sources = [source.name for source in recipes[name].sources if isinstance(source, RecipeSource)]
        return {needed for source in sources for needed in self._inputs_of(source)}


#: Names nothing and drops nothing.
KEEP_ALL = Terms()
