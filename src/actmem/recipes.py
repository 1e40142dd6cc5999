"""What each saved tensor of a layer can be recomputed from: the table behind every mode of recomputation.

A term is a saved tensor, by its name. Each term has a recipe: the terms from which it is recomputed, and the matmuls
that this takes. A mode of recomputation is a set of terms that backward recomputes instead of saving. The layer then
saves the bytes of the remaining terms, and backward runs the matmuls of the set's recipes once more. Here is the table
of the paper's layer; those of Llama are in ``llama_shape``. ``drop`` recomputes term by term, and ``recompute`` whole
regions of code, for *selective* and *full*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from actmem.config import ConfigError, check_choice, shown

#: What can be done with a term between forward and backward.  "keep" saves it, "recompute" drops it, "offload" moves it
#: to the host's memory, "compress" stores it in 8 bits (``actmem_more.store``).
ACTIONS = ("keep", "recompute", "offload", "compress")
#: In 8 bits a block of elements shares a scale: the elements of a block, and its bytes with the float32 scale.
BLOCK, BLOCK_BYTES = 256, 256 + 4


@dataclass(frozen=True)
class Recompute:
    """What backward recomputes instead of saving (2205.05198 section 5).

    Attributes:
        name: "none", "selective" or another name of RECOMPUTE_MODES, or "terms" for a set of the user's own.
        region: the code that backward runs again: "none"; "core" (the core attention, from Q, K and V to its output);
            "layer" (everything, from the layer's input); or "terms" (single tensors, see ``drop``).
        stop_early: True ends recomputation at the last tensor that backward reads. The paper runs a region to its end,
            which saves the same bytes and costs one matmul more.
        terms: the names of the tensors in the user's own set; None for a named mode.
        stored: pairs of a tensor's name and an action other than "recompute", such as "offload".
    """

    name: str
    region: Literal["none", "core", "terms", "layer"]
    stop_early: bool
    terms: frozenset[str] | None = None
    stored: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(mode: Mode) -> Recompute:
        """Return the Recompute for any form in which a user may give a mode of recomputation.

        Args:
            mode: a Recompute; a mode's name such as "selective"; a set of tensors' names to recompute; or a dict from
                tensors' names to "keep", "recompute", "offload" or "compress" (a tensor that isn't named is kept).

        Raises: ConfigError on anything else.
        """
        if isinstance(mode, Recompute):
            return mode
        if isinstance(mode, Mapping):
            for term, action in mode.items():
                if not isinstance(term, str):
                    raise ConfigError("recompute", f"an action belongs to the name of a term, got {shown(term)}")
                check_choice(f"recompute[{term!r}]", action, ACTIONS)
            recomputed = frozenset(term for term, action in mode.items() if action == "recompute")
            stored = tuple((term, action) for term, action in mode.items() if action != "recompute")
            return Recompute("terms", "terms", True, recomputed, stored)
        for named_mode in _MODES:
            if isinstance(mode, str) and named_mode.name == mode:
                return named_mode
        if isinstance(mode, (set, frozenset, list, tuple)) and all(isinstance(term, str) for term in mode):
            return Recompute("terms", "terms", True, frozenset(mode))
        named = f"one of {', '.join(RECOMPUTE_MODES)}"
        raise ConfigError("recompute", f"must be {named}, or a set of terms, or an action for each, got {shown(mode)}")


#: What ``Recompute.of`` reads: a mode, its name, a set of terms, or an action for each.
Mode = Recompute | str | Collection[str] | Mapping[str, str]
#: The modes that have a name: here it is defined what each recomputes.
_MODES = (
    Recompute("none", "none", stop_early=False),
    Recompute("selective", "core", stop_early=True),
    Recompute("elementwise", "terms", stop_early=True),
    Recompute("full", "layer", stop_early=True),
    Recompute("paper-selective", "core", stop_early=False),
    Recompute("paper-full", "layer", stop_early=False),
)
RECOMPUTE_MODES = tuple(mode.name for mode in _MODES)


@dataclass(frozen=True)
class Recipe:
    """How backward recomputes one of a layer's saved tensors.

    Attributes:
        term: the tensor's name.
        sources: the names of the tensors from which it is computed; empty for a dropout mask, which is drawn again.
        matmuls: the matmuls that run for this, by names such as "QKV projection" (``formulas.flops.layer_matmuls``).
            The mode "elementwise" recomputes every tensor that needs no matmul.
    """

    term: str
    sources: tuple[str, ...] = ()
    matmuls: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerTerms:
    """The tensors that one kind of layer saves, by name ("terms"), in the order of the forward pass.

    Attributes:
        input: the name of the layer's input, the one term that can't be recomputed.
        recipes: a Recipe for each other term.
        core: the terms inside the core attention, which selective recomputation drops.
        core_elementwise: whether *elementwise* drops the terms of ``core`` as well, although one of them needs a
            matmul.
        last_matmuls: for each region ("core", "layer") the names of its last matmuls, which run again only in a mode
            that does not stop early.
        one_tensor: terms that are views of one storage, such as Q, K and V; the storage is freed only if all of them
            are dropped.
        statistics: the names of the few numbers a token that norms save besides their input; of the named modes only
            "full" and "paper-full" drop them.
        other_dtype: terms that don't have the dtype of the layer's activations: masks, indices, float32 results.
        by_products: terms that operations save besides inputs and results, too small to be worth offloading.
    """

    input: str
    recipes: tuple[Recipe, ...]
    core: frozenset[str]
    core_elementwise: bool
    last_matmuls: dict[str, tuple[str, ...]]
    one_tensor: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    other_dtype: frozenset[str] = frozenset()
    by_products: frozenset[str] = frozenset()

    def recipe(self, term: str) -> Recipe:
        """Return the recipe of the tensor ``term``; raise ConfigError on the layer's input or an unknown name."""
        for recipe in self.recipes:
            if recipe.term == term:
                return recipe
        if term == self.input:
            raise ConfigError("recompute", f"{term!r} is the layer's input: nothing earlier is left to rebuild it from")
        names = ", ".join(recipe.term for recipe in self.recipes)
        raise ConfigError("recompute", f"{shown(term)} is no term of this layer; its terms are {names}")

    def dropped(self, recompute: Mode) -> frozenset[str]:
        """Return the names of the tensors that this layer does not save, but recomputes, in a mode of recomputation.

        Args:
            recompute: any form that ``Recompute.of`` takes: a mode's name such as "selective", a set of tensors' names,
                or a dict from names to actions.

        Raises: ConfigError on a set that contains the input, an unknown name, or some but not all of ``one_tensor``;
            and if another tensor can't have its action.
        """
        mode = Recompute.of(recompute)
        if mode.terms is not None:
            for term in sorted(mode.terms.difference(self.statistics)):
                self.recipe(term)
            self._check_one_tensor(mode.terms, "drop")
            self.stored(mode)  # raises
            return mode.terms
        everything = frozenset(recipe.term for recipe in self.recipes) | frozenset(self.statistics)
        elementwise = frozenset(recipe.term for recipe in self.recipes if not recipe.matmuls) - self.core
        return {
            "none": frozenset(),
            "core": self.core,
            "terms": elementwise | (self.core if self.core_elementwise else frozenset()),
            "layer": everything,
        }[mode.region]

    def _check_one_tensor(self, terms: Iterable[str], action: str) -> None:
        missing = [term for term in self.one_tensor if term not in terms]
        if missing and len(missing) < len(self.one_tensor):
            parts = ", ".join(self.one_tensor)
            rule = f"{action} all of them or none ({missing[0]} is left)"
            raise ConfigError("recompute", f"{parts} are parts of one tensor: {rule}")

    def stored(self, recompute: Mode) -> dict[str, str]:
        """Return the tensors that are saved on the host or in 8 bits: a dict from name to "offload" or "compress".

        Args:
            recompute: any form that ``Recompute.of`` takes; only a dict from names to actions can store a tensor.

        Raises: ConfigError on an unknown name, and on an action that isn't possible: offloading or compressing a
            by-product or statistics, compressing another dtype or a view, offloading only some of ``one_tensor``.
        """
        stored = dict(Recompute.of(recompute).stored)
        for term, action in stored.items():
            if term not in (self.input, *self.statistics):
                self.recipe(term)
            if action != "keep" and term in (*self.by_products, *self.statistics):
                raise ConfigError("recompute", f"{term!r} is a by-product: it can only be kept or dropped")
            if action == "compress" and term in self.other_dtype:
                raise ConfigError("recompute", f"{term!r} has no elements of the layer's dtype: it can't be compressed")
            if action == "compress" and term in self.one_tensor:
                raise ConfigError("recompute", f"{term!r} is a part of one tensor with others: it can't be compressed")
        self._check_one_tensor([term for term in stored if stored[term] == "offload"], "offload")
        return {term: action for term, action in stored.items() if action != "keep"}

    def recomputed_matmuls(self, recompute: Mode) -> frozenset[str]:
        """Return the names of the matmuls that backward runs again in a mode of recomputation.

        Each of them runs once more, even if several dropped tensors are computed from its result.

        Args:
            recompute: any form that ``Recompute.of`` takes: a mode's name such as "selective", a set of tensors' names,
                or a dict from names to actions.
        """
        mode = Recompute.of(recompute)
        names = {matmul for recipe in self.recipes if recipe.term in self.dropped(mode) for matmul in recipe.matmuls}
        if mode.region in self.last_matmuls and not mode.stop_early:
            names.update(self.last_matmuls[mode.region])
        return frozenset(names)


#: The paper's layer (2205.05198 section 4.1).  *elementwise* keeps 20sbh of its 34sbh + 5as²b.
PAPER_LAYER = LayerTerms(
    "layer-norm 1 input",
    (
        Recipe("QKV projection input", ("layer-norm 1 input",)),
        Recipe("Q", ("QKV projection input",), ("QKV projection",)),
        Recipe("K", ("QKV projection input",), ("QKV projection",)),
        Recipe("softmax output", ("Q", "K"), ("QKᵀ",)),
        Recipe("softmax dropout mask"),
        Recipe("softmax dropout output", ("softmax output", "softmax dropout mask")),
        Recipe("V", ("QKV projection input",), ("QKV projection",)),
        Recipe("attention projection input", ("softmax dropout output", "V"), ("attention over V",)),
        Recipe("attention dropout mask"),
        Recipe(
            "layer-norm 2 input",
            ("layer-norm 1 input", "attention projection input", "attention dropout mask"),
            ("attention projection",),
        ),
        Recipe("h→4h input", ("layer-norm 2 input",)),
        Recipe("GeLU input", ("h→4h input",), ("h→4h",)),
        Recipe("4h→h input", ("GeLU input",)),
        Recipe("MLP dropout mask"),
    ),
    core=frozenset({"softmax output", "softmax dropout mask", "softmax dropout output"}),
    core_elementwise=True,
    statistics=("layer-norm 1 statistics", "layer-norm 2 statistics"),
    last_matmuls={"core": ("attention over V",), "layer": ("4h→h",)},
    one_tensor=("Q", "K", "V"),
    other_dtype=frozenset({"softmax dropout mask", "attention dropout mask", "MLP dropout mask"}),
)
