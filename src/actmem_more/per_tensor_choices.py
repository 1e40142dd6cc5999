"""What to do with each of a layer's terms so that it keeps few bytes: every best choice.

A term is kept, recomputed, offloaded to the host's memory, or compressed to eight bits (``recipes.ACTIONS``). What
needs no matmul is taken as free (measured: 2% of a layer's time for all of it), so recomputing has a price only in
matmuls: a choice is a set of matmuls that are recomputed, all terms that these can rebuild go with it, and of the terms
that are left some are moved. Exact: all sets of matmuls are tried, and for each the best use of the host's link for
every number of bytes moved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations

from actmem.config import ConfigError, ModelShape, Parallel, check_choice, shown
from actmem.formulas.activations import layer_rows
from actmem.formulas.flops import layer_matmuls
from actmem.recipes import ACTIONS, PAPER_LAYER, LayerTerms
from actmem.rows import Row, on_device, total
from actmem_more.llama_shape import LlamaShape, llama_layer_terms
from actmem_more.llama_terms import llama_matmuls, llama_rows


@dataclass(frozen=True)
class PricedLayer:
    """One layer on one rank.  rows: of all that it keeps if nothing is done.  flops: of each matmul over all ranks."""

    terms: LayerTerms
    rows: tuple[Row, ...]
    flops: dict[str, int]
    element_size: int = 2

    @staticmethod
    def of(shape: ModelShape | LlamaShape, parallel: Parallel = Parallel(), element_size: int = 2) -> PricedLayer:
        """The paper's layer, or today's.  Raises ConfigError if the ranks can't share it."""
        if isinstance(shape, LlamaShape):
            rows = llama_rows(shape, parallel, element_size=element_size)
            return PricedLayer(llama_layer_terms(shape), tuple(rows), llama_matmuls(shape), element_size)
        rows = layer_rows(shape, parallel, element_size=element_size)
        return PricedLayer(PAPER_LAYER, tuple(rows), layer_matmuls(shape), element_size)

    def groups(self, terms: Iterable[str]) -> list[tuple[str, ...]]:
        """These terms, with those together that are views of one tensor."""
        return list(dict.fromkeys(self.terms.one_tensor if t in self.terms.one_tensor else (t,) for t in terms))


@dataclass(frozen=True)
class LayerChoice:
    """What is done.  products: matmuls recomputed in backward.  actions: of each term that isn't kept.

    bytes: kept on the device.  host_bytes: kept on the host.  flops: added, over all ranks.
    """

    matmuls: tuple[str, ...]
    actions: dict[str, str]
    bytes: int
    flops: int
    host_bytes: int = 0

    def seconds(self, rates: Rates) -> float:
        """Time that a layer's forward and backward take longer: matmuls, and copies that computing can't hide."""
        again, copy = self.flops / rates.flops, self.host_bytes / rates.host_bytes
        return again + copy_seconds(copy, rates.forward, again)


@dataclass(frozen=True)
class Rates:
    """What a machine does a second.

    Args:
        flops: a second, of all ranks that share the layer.
        host_bytes: a second, each way.
        forward: seconds of the layer's forward pass.

    Raises: ConfigError unless the rates are above 0 and the seconds at least 0.
    """

    flops: float
    host_bytes: float
    forward: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value > 0 or name == "forward" and value == 0):
                raise ConfigError(name, f"must be {'at least' if name == 'forward' else 'above'} 0, got {shown(value)}")


def recompute_choices(layer: PricedLayer) -> list[LayerChoice]:
    """Every set of matmuls that can be recomputed, from none to all."""
    priced = list(dict.fromkeys(matmul for recipe in layer.terms.recipes for matmul in recipe.matmuls))
    found = []
    for count in range(len(priced) + 1):
        for matmuls in combinations(priced, count):
            terms = [recipe.term for recipe in layer.terms.recipes if set(recipe.matmuls) <= set(matmuls)]
            again = dict.fromkeys([*terms, *layer.terms.statistics], "recompute")
            kept = sum(row.bytes for row in layer.rows if row.term not in again)
            found.append(LayerChoice(matmuls, again, kept, sum(layer.flops[matmul] for matmul in matmuls)))
    return found


def choices(layer: PricedLayer, allowed: Collection[str] = ("recompute", "offload")) -> list[LayerChoice]:
    """Of every set of matmuls, the choices that none with this set beats in bytes on the device and bytes moved.

    allowed: any of recipes.ACTIONS.  Terms that need no matmul are always recomputed.  Compressing takes no time here,
    so it is always used where it is allowed: allow it only where less exact gradients will do.
    """
    allowed = (allowed,) if isinstance(allowed, str) else tuple(allowed)
    for action in allowed:
        check_choice("allowed", action, ACTIONS)
    found = recompute_choices(layer)
    options = cache(partial(_options, layer, frozenset(allowed)))  # most groups are left by many sets of matmuls
    return [
        moved for choice in found[: None if "recompute" in allowed else 1] for moved in _moved(layer, choice, options)
    ]


#: What may be done with a group of terms: the action of each, bytes freed on the device, bytes moved to the host.
_Option = tuple[dict[str, str], int, int]


def _options(layer: PricedLayer, allowed: frozenset[str], group: tuple[str, ...]) -> list[_Option]:
    options = []
    for action in {"offload", "compress"} & allowed:
        if action == "offload" or len(group) == 1 and group[0] not in layer.terms.other_dtype:
            actions = dict.fromkeys(group, action)
            rows = [row for row in layer.rows if row.term in group]
            after = total(on_device(rows, layer.terms, actions, layer.element_size))
            options.append((actions, total(rows) - after, total(rows) if action == "offload" else 0))
    return options


def _moved(
    layer: PricedLayer, choice: LayerChoice, options: Callable[[tuple[str, ...]], list[_Option]]
) -> list[LayerChoice]:
    sizes = {row.term: row.bytes for row in layer.rows}
    names = [layer.terms.input, *(recipe.term for recipe in layer.terms.recipes)]
    left = [
        name for name in names if name in sizes and name not in choice.actions and name not in layer.terms.by_products
    ]
    best = [choice]
    for group in layer.groups(left):
        best += [
            replace(one, actions=one.actions | actions, bytes=one.bytes - freed, host_bytes=one.host_bytes + moved)
            for one in best
            for actions, freed, moved in options(group)
        ]
        best = frontier(best, lambda one: one.host_bytes)
    return best


def frontier(choices: Iterable[LayerChoice], price: Callable[[LayerChoice], float]) -> list[LayerChoice]:
    """The choices that no other beats in bytes and price at once, from the lowest price to the fewest bytes."""
    best: list[LayerChoice] = []
    for choice in sorted(choices, key=lambda one: (price(one), one.bytes)):
        if not best or choice.bytes < best[-1].bytes:
            best.append(choice)
    return best


def copy_seconds(copy: float, forward: float, again: float) -> float:
    """What a layer waits for copies to the host and back, which take ``copy`` seconds each way beside its computing.

    forward: seconds of its forward pass, of which backward takes twice as many.  again: of what is recomputed.
    """
    return max(0.0, copy - forward) + max(0.0, copy - 2 * forward - again)
