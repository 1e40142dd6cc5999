"""What each stored tensor of a layer can be recomputed from: the table behind every choice of what to keep.

A layer is a table of terms. Each has a recipe: the terms from which it is rebuilt, and the matmuls that this takes.
What to recompute is then a set of terms, those that backward recomputes instead of saving. The bytes saved are those of
the remaining terms, the FLOPs added are the matmuls of the set's recipes, and a named mode is a set with a name.
Llama's tables are in ``llama_shape``. ``drop`` carries out what this file describes (and ``recompute`` carries out the
regions of *selective* and *full*).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from actmem.config import ConfigError, check_choice, shown

#: What can be done with a term.  "offload" moves it to the host's memory, "compress" makes it 8 bits (``store``).
ACTIONS = ("keep", "recompute", "offload", "compress")
#: Elements that share a scale in 8 bits, a block, and the bytes of a block with its float32 scale.
BLOCK, BLOCK_BYTES = 256, 256 + 4


@dataclass(frozen=True)
class Recompute:
    """What backward recomputes instead of saving (2205.05198 section 5).

    Attributes:
        name: what users type: one of RECOMPUTE_MODES, or "terms" for a set of their own.
        region: what is dropped: "none"; "core" (the core attention, from Q, K and V to its output); "layer" (all but
            the input); or "terms", each rebuilt by itself (see ``drop``).
        stop_early: the second run ends at the last tensor that backward reads. The paper runs the region to its end,
            which saves the same bytes and costs one matmul more.
        terms: the user's own set; None for a named mode.
        stored: the terms that have an action other than "recompute", each with its action.
    """

    name: str
    region: Literal["none", "core", "terms", "layer"]
    stop_early: bool
    terms: frozenset[str] | None = None
    stored: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(mode: Mode) -> Recompute:
        """Return the Recompute that a value stands for.

        Args:
            mode: a Recompute, a mode's name, a set of terms to recompute, or an action for each term (one of ACTIONS;
                terms that aren't named are kept).

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
#: The one place that says what each name means.
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
    """How backward recomputes one term.

    Attributes:
        term: what is recomputed.
        sources: the terms from which it is made; empty for a dropout mask, which is drawn again from its seed.
        matmuls: the matmuls that this takes, named as in ``formulas.flops``; if there are none, the recipe is
            elementwise.
    """

    term: str
    sources: tuple[str, ...] = ()
    matmuls: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerTerms:
    """The terms of one kind of layer, in the order of the forward pass.

    Attributes:
        input: the one term without a recipe.
        recipes: how each of the others is recomputed.
        core: the terms that selective recomputation drops.
        core_elementwise: whether *elementwise* drops the core as well, at the price of its matmul.
        last_matmuls: the last matmuls of each region, which a mode runs only if it does not stop early.
        one_tensor: terms that are views of one storage, which is freed only if all of them are dropped.
        statistics: by-products of norms, a few numbers a token; of the named modes only "full" drops them.
        other_dtype: masks, indices and float32 results, which don't have the dtype of the layer's activations.
        by_products: what an operation saves besides its results; too small to be worth storing elsewhere.
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
        """Return the recipe of that term; raise ConfigError on the layer's input and on an unknown name."""
        for recipe in self.recipes:
            if recipe.term == term:
                return recipe
        if term == self.input:
            raise ConfigError("recompute", f"{term!r} is the layer's input: nothing earlier is left to rebuild it from")
        names = ", ".join(recipe.term for recipe in self.recipes)
        raise ConfigError("recompute", f"{shown(term)} is no term of this layer; its terms are {names}")

    def dropped(self, recompute: Mode) -> frozenset[str]:
        """Return the terms that a mode, or a set of terms, drops.

        Raises: ConfigError on a set that contains the input, an unknown name, or some but not all of ``one_tensor``.
        """
        mode = Recompute.of(recompute)
        if mode.terms is not None:
            for term in sorted(mode.terms.difference(self.statistics)):
                self.recipe(term)
            self._check_one_tensor(mode.terms, "drop")
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
            raise ConfigError(
                "recompute", f"{parts} are parts of one tensor: {action} all of them or none ({missing[0]} is left)"
            )

    def stored(self, recompute: Mode) -> dict[str, str]:
        """Return the terms that are saved on the host or in 8 bits, each with its action.

        Raises: ConfigError if an action is not possible for its term.
        """
        stored = dict(Recompute.of(recompute).stored)
        for term, action in stored.items():
            if term not in (self.input, *self.statistics):
                self.recipe(term)
            if action != "keep" and term in (*self.by_products, *self.statistics):
                raise ConfigError(
                    "recompute", f"{term!r} is a by-product of an operation: it can only be kept or dropped"
                )
            if action == "compress" and term in self.other_dtype:
                raise ConfigError("recompute", f"{term!r} has no elements of the layer's dtype: it can't be compressed")
            if action == "compress" and term in self.one_tensor:
                raise ConfigError("recompute", f"{term!r} is a part of one tensor with others: it can't be compressed")
        self._check_one_tensor([term for term in stored if stored[term] == "offload"], "offload")
        return {term: action for term, action in stored.items() if action != "keep"}

    def recomputed_matmuls(self, recompute: Mode) -> frozenset[str]:
        """Return the matmuls that backward recomputes, each once, however many terms it serves."""
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
